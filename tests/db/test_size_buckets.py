"""Buckets: geometric, without gaps, and small enough that what is tuned for the end suits the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotax.core.problem import Problem
from autotax.db.index import bucket, bucket_key, representative, spelled
from autotax.operators.problems import AllGatherGemm, FlashDecode

SIZES = st.integers(1, 2**31 - 1)
GEMM = AllGatherGemm(512, 7168, 8192, world_size=4)
DECODE = FlashDecode(8, 64, 8, 128, 32768, world_size=4)


def test_the_first_ones() -> None:
    ends = [size for size in range(1, 129) if bucket(size)[1] == size]
    assert ends == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert [bucket(size) for size in (1, 2, 3, 5, 6, 7, 385, 512)] == [
        (1, 1), (2, 2), (3, 3), (5, 6), (5, 6), (7, 8), (385, 512), (385, 512),
    ]  # fmt: skip


@given(SIZES)
def test_every_size_is_in_one_bucket_which_its_end_represents(size: int) -> None:
    first, last = bucket(size)
    assert first <= size <= last
    assert bucket(first) == bucket(last) == (first, last)
    assert bucket(last + 1)[0] == last + 1  # the next one begins where this one ends
    assert 3 * first > 2 * last or first == last


@given(SIZES, SIZES)
def test_buckets_are_monotonic(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert bucket(low)[1] <= bucket(high)[1]


def problems() -> st.SearchStrategy[Problem]:
    gemms = st.builds(lambda m: replace(GEMM, m=m), SIZES)
    decodes = st.builds(lambda b, s: replace(DECODE, batch=b, kv_len=s), st.integers(1, 65535), SIZES)
    return gemms | decodes


@given(problems())
def test_a_representative_is_a_problem_of_the_same_bucket(problem: Problem) -> None:
    end = representative(problem)
    assert bucket_key(end.key) == bucket_key(problem.key)
    assert representative(end) == end


@given(problems(), problems())
def test_keys_of_buckets_tell_buckets_apart(one: Problem, other: Problem) -> None:
    assert (bucket_key(one.key) == bucket_key(other.key)) == (representative(one) == representative(other))


@pytest.mark.parametrize("change", [{"n": 7169}, {"k": 8193}, {"dtype": "fp16"}, {"world_size": 2}])
def test_the_architecture_is_never_bucketed(change: dict[str, object]) -> None:
    assert bucket_key(replace(GEMM, **change).key) != bucket_key(GEMM.key)  # type: ignore[arg-type]


def test_ranges_are_spelled() -> None:
    assert spelled(GEMM) == "m 385 to 512"
    assert spelled(replace(DECODE, batch=1)) == "batch 1, kv_len 24577 to 32768"


def test_keys_of_operators_that_are_not_known_stay() -> None:
    assert bucket_key("all-reduce/m=500") == "all-reduce/m=500"
