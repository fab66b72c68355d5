"""Problems: their names, their shards, and one line for each that makes no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from autotax.core.errors import UsageError
from autotax.core.problem import Problem, with_world_size
from autotax.operators import operators, problem_from_dict
from autotax.operators.problems import AllGatherGemm, FlashDecode
from tests.spaces.drawing import problems

OPERATORS = f"allowed are {', '.join(operators())}: name one of these, or --load its module"
GEMM: dict[str, Any] = {"op": "all-gather-gemm", "m": 512, "n": 7168, "k": 8192, "world_size": 4}
DECODE: dict[str, Any] = {"op": "flash-decode", "batch": 2, "q_heads": 64, "kv_heads": 8, "head_dim": 128, "kv_len": 131072}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        problem_from_dict(values)
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("values", [GEMM, DECODE], ids=["all-gather-gemm", "flash-decode"])
@pytest.mark.parametrize("size", [0, -1, 2**31, True, False, 64.0, "64", None], ids=repr)
def test_a_size_is_a_whole_number_above_zero(values: dict[str, Any], size: object) -> None:
    for name in values.keys() - {"op"}:
        message = refusal(values | {name: size})
        assert message.startswith(f"{name} is {size!r}; it must be a whole number from 1 to ")
        assert f"--{name.replace('_', '-')}" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (GEMM | {"dtype": "fp8"}, "dtype is 'fp8'; allowed are bf16, fp16, fp32, e4m3: give one of these as --dtype"),
        (DECODE | {"dtype": None}, "dtype is None; allowed are bf16, fp16, fp32: give one of these as --dtype"),
        (GEMM | {"dtype": ["bf16"]}, "dtype is ['bf16']; allowed are bf16, fp16, fp32, e4m3: give one of these as --dtype"),
        (GEMM | {"shard": "n"}, "shard is 'n'; allowed are m, k: give one of these as --shard"),
        (
            GEMM | {"shard": "k", "k": 8190},
            "k is 8190 on 4 ranks; with --shard k it must be a multiple of the world size: pad k to 8192",
        ),
        (GEMM | {"world_size": 65}, "world_size is 65; it must be a whole number from 1 to 64: give another --world-size"),
        (
            DECODE | {"q_heads": 60},
            "q_heads is 60 and kv_heads 8; q_heads must be a multiple of kv_heads: give another --q-heads or --kv-heads",
        ),
        (
            DECODE | {"q_heads": 4},
            "q_heads is 4 and kv_heads 8; q_heads must be a multiple of kv_heads: give another --q-heads or --kv-heads",
        ),
        (
            DECODE | {"output": "split"},
            "output is 'split'; allowed are replicated, head_scatter: give one of these as --output",
        ),
        (
            DECODE | {"output": "head_scatter", "world_size": 6},
            "q_heads is 64 on 6 ranks; with --output head_scatter it must be a multiple of the world size: "
            "give another --q-heads or --world-size, or --output replicated",
        ),
        (DECODE | {"page": 1}, "page is 1; allowed are 0 (contiguous), 16, 64: give one of these as --page"),
        (DECODE | {"page": False}, "page is False; allowed are 0 (contiguous), 16, 64: give one of these as --page"),
        (DECODE | {"head_dim": 257}, "head_dim is 257; it must be a whole number from 1 to 256: give another --head-dim"),
        (GEMM | {"op": "gemm"}, f"op is 'gemm'; {OPERATORS}"),
        ({"m": 1}, f"op is None; {OPERATORS}"),
        (
            GEMM | {"batch": 3, "bm": 1},
            "all-gather-gemm has no batch, bm; it takes m, n, k, dtype, shard, world_size, weight, scales, result, quantize, "
            "operand, accumulate: take the others out",
        ),
        (
            {"op": "all-gather-gemm", "m": 3},
            "all-gather-gemm lacks n, k; it takes m, n, k, dtype, shard, world_size, weight, scales, result, quantize, operand, "
            "accumulate: give them all",
        ),
    ],
)  # fmt: skip
def test_a_refusal_says_what_was_given_what_is_allowed_and_what_to_do(change: dict[str, Any], message: str) -> None:
    assert refusal(change) == message


@given(problems)
def test_a_problem_survives_json(problem: Problem) -> None:
    again = problem_from_dict(json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert again.key == problem.key
    assert hash(again) == hash(problem)


@given(problems, problems)
def test_problems_are_equal_when_their_keys_are(one: Problem, other: Problem) -> None:
    assert (one == other) == (one.key == other.key)


def test_the_key_reads_as_on_the_command_line() -> None:
    assert (
        AllGatherGemm(512, 7168, 8192, world_size=4).key == "all-gather-gemm/m=512,n=7168,k=8192,dtype=bf16,shard=m,world_size=4"
    )
    assert (
        FlashDecode(1, 64, 8, 128, 131072, "fp16", 8).key
        == "flash-decode/batch=1,q_heads=64,kv_heads=8,head_dim=128,kv_len=131072,dtype=fp16,world_size=8"
    )


def test_an_option_is_named_only_where_it_is_not_at_its_default() -> None:
    """Otherwise a new option would hide all winners that were stored before it existed."""
    usual = FlashDecode(1, 64, 8, 128, 131072, world_size=4)
    assert usual.key == "flash-decode/batch=1,q_heads=64,kv_heads=8,head_dim=128,kv_len=131072,dtype=bf16,world_size=4"
    assert problem_from_dict(DECODE | {"output": "replicated"}).to_dict() == DECODE | {"dtype": "bf16", "world_size": 1}
    assert replace(usual, output="head_scatter").key == usual.key + ",output=head_scatter"
    assert replace(usual, output="head_scatter", page=16).key == usual.key + ",output=head_scatter,page=16"
    drafts = replace(usual, kv_dtype="e4m3", sinks="learned", window=128, queries=4)
    assert drafts.key == usual.key + ",kv_dtype=e4m3,sinks=learned,window=128,queries=4"
    assert drafts.nbytes == 2 * 8 * 128 * drafts.shard_len + 2 * 2 * 64 * 4 * 128, "one byte an element of the cache"


@given(problems)
def test_shards_hold_the_whole(problem: Problem) -> None:
    world = problem.world_size
    if isinstance(problem, AllGatherGemm):
        rows, cols = (world, 1) if problem.shard == "m" else (1, world)
        assert 0 <= problem.shard_rows * rows - problem.m < rows
        assert problem.shard_cols * cols == problem.k
    if isinstance(problem, FlashDecode):
        assert 0 <= problem.shard_len * world - problem.kv_len < world
        assert problem.group * problem.kv_heads == problem.q_heads * problem.queries
        per = problem.shard_len
        first = max(0, problem.kv_len - problem.window - problem.queries + 1) if problem.window else 0
        seen = [sum(first <= token for token in range(r * per, min(problem.kv_len, (r + 1) * per))) for r in range(world)]
        assert problem.seen_len == max(seen)


def test_another_world_size_is_checked_too() -> None:
    problem = AllGatherGemm(512, 7168, 8192, shard="k", world_size=4)
    assert with_world_size(problem, 8) == AllGatherGemm(512, 7168, 8192, shard="k", world_size=8)
    with pytest.raises(UsageError, match=r"k is 8192 on 3 ranks; .* pad k to 8193"):
        with_world_size(problem, 3)
