"""Fixed-point words on their way: what is sent arrives within half a step, and what is not a number never looks like one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotax.heap import World
from autotax.kernels.flash_decode.fixed_point import number, pack_columns, pack_heads, scale_of
from autotax.kernels.flash_decode.words import age, column_of, lse_of
from tests.ranks import Ranks

ROWS, COLUMNS, STEPS = 8, 32, 16383


@triton.jit
def round_trip(o, lse, back, back_lse, ages, epoch, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    g, d, w = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 4)
    rows = tl.load(o + g[:, None] * COLUMNS + d[None, :])
    scale = scale_of(rows)
    words, heads = pack_columns(rows, scale, epoch, ROWS, COLUMNS), pack_heads(scale, tl.load(lse + g), epoch)
    sent = column_of(heads, False, tl.float32)[:, None] / 16383
    at = back + g[:, None] * COLUMNS + 4 * w[None, :]
    for column in tl.static_range(4):
        tl.store(at + column, number(words, column) * sent)
    tl.store(back_lse + g, lse_of(heads, tl.float32))
    tl.store(ages + g, age(heads, epoch, tl.float32) + tl.sum(age(words, epoch, tl.float32), 1))


def _send(_: World, rows: list[list[float]], lse: list[float], epoch: int) -> tuple[Any, ...]:
    o, sums = torch.tensor(rows), torch.tensor(lse)
    back, back_lse, ages = torch.full_like(o, math.nan), torch.empty_like(sums), torch.empty(ROWS, dtype=torch.int32)
    round_trip[(1,)](o, sums, back, back_lse, ages, epoch, ROWS, COLUMNS)
    return o, back, sums, back_lse, ages


@pytest.fixture(scope="module")
def rank() -> Iterator[Ranks]:
    with Ranks(1) as one:
        yield one


@st.composite
def some_rows(draw: st.DrawFn) -> list[list[float]]:
    """Rows of any magnitude, among them zeros; and columns of other magnitudes among them."""
    random = Random(draw(st.integers(0, 2**32)))
    of_rows = draw(st.lists(st.integers(-140, 120), min_size=ROWS, max_size=ROWS))
    spread = draw(st.sampled_from([0, 8, 30]))
    return [
        [random.choice([random.gauss(0.0, 1.0) * 2.0 ** (of - random.randint(0, spread)), 0.0, 2.0**of]) for _ in range(COLUMNS)]
        for of in of_rows
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=some_rows(), epoch=st.integers(-(2**31), 2**31 - 1), lse=st.floats(-8192.0, 8192.0, width=32) | st.just(-math.inf))
def test_columns_arrive_within_half_a_step_of_their_row(rank: Ranks, rows: list[list[float]], epoch: int, lse: float) -> None:
    ((o, back, sums, back_lse, ages),) = rank.run(_send, rows, [lse] * ROWS, epoch)
    largest = o.abs().amax(1, keepdim=True)
    step = torch.where(largest > 1e-30, largest / STEPS, torch.tensor(0.0))
    assert ((back - o).abs() <= 0.501 * step + 1e-30).all()
    assert torch.equal(sums, back_lse), "log-sum-exps travel whole"
    assert not ages.any(), "each word is of the call that it was made for"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_column_that_is_not_finite_arrives_as_nan(rank: Ranks, odd: float) -> None:
    rows = torch.randn(ROWS, COLUMNS)
    rows[3, 17] = odd
    ((_, back, *_),) = rank.run(_send, rows.tolist(), [0.0] * ROWS, 5)
    assert back[3].isnan().all()
    assert back[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
