"""Words of 15-bit floats on their way: each column arrives within its own error, whatever its neighbours are, NaNs too."""

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
from autotax.kernels.flash_decode.compact import number, pack_columns, pack_heads, scale_of
from autotax.kernels.flash_decode.exchange import age, column_of, lse_of
from autotax.runner.ranks import Ranks

ROWS, COLUMNS = 8, 32


@triton.jit
def round_trip(o, lse, back, back_lse, ages, epoch, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    g, d, w = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, COLUMNS // 4)
    rows = tl.load(o + g[:, None] * COLUMNS + d[None, :])
    scale = scale_of(rows)
    words, heads = pack_columns(rows, scale, epoch, ROWS, COLUMNS), pack_heads(scale, tl.load(lse + g), epoch)
    sent = column_of(heads, False, tl.float32)[:, None]
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
    """Rows of any magnitude that float32 has, among them zeros; and columns of other magnitudes among them."""
    random = Random(draw(st.integers(0, 2**32)))
    of_rows = draw(st.lists(st.integers(-149, 126), min_size=ROWS, max_size=ROWS))
    spread = draw(st.sampled_from([0, 8, 30, 60, 200]))

    def column(of: int) -> float:
        return random.choice([0.0, 1.0, -1.0, 2 - 2**-23, random.uniform(-2, 2)]) * 2.0 ** (of - random.randint(0, spread))

    return [[column(of) for _ in range(COLUMNS)] for of in of_rows]


def allowed(o: torch.Tensor) -> torch.Tensor:
    """The error that `minifloat` promises for each column of o, in float64."""
    finite = o.double().abs().nan_to_num(0.0, posinf=0.0)
    return 2**-10 * 1.0001 * finite + 2**-39 * finite.amax(1, keepdim=True) + 2**-149


def test_the_hardest_rows_arrive_within_the_promise(rank: Ranks) -> None:
    largest = torch.finfo(torch.bfloat16).max  # beyond it a column may be rounded to infinity
    rows = torch.randn(ROWS, COLUMNS)
    rows[0, 1:4] = torch.tensor([1000.0, 30000.0, 0.0])
    rows[1] *= 1e-31
    rows[2] *= 2.0**-140
    rows[3] = rows[3].sign() * largest
    rows[4] = 2.0 ** -torch.arange(COLUMNS).float() * largest
    rows[5] = 0.0
    rows[6] = 2.0**-149
    rows[7, ::2] = 0.0
    _hold_what_is_promised(rank, rows.tolist(), 0.0, 3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=some_rows(), epoch=st.integers(-(2**31), 2**31 - 1), lse=st.floats(-8192.0, 8192.0, width=32) | st.just(-math.inf))
def test_columns_arrive_within_the_promise(rank: Ranks, rows: list[list[float]], epoch: int, lse: float) -> None:
    _hold_what_is_promised(rank, rows, lse, epoch)


def _hold_what_is_promised(rank: Ranks, rows: list[list[float]], lse: float, epoch: int) -> None:
    ((o, back, sums, back_lse, ages),) = rank.run(_send, rows, [lse] * ROWS, epoch)
    assert ((back.double() - o.double()).abs() <= allowed(o)).all()
    assert (back[o == 0] == 0).all(), "zeros stay zeros"
    assert torch.equal(sums, back_lse), "log-sum-exps travel whole"
    assert not ages.any(), "each word is of the call that it was made for"


@pytest.mark.parametrize("magnitude", [1.0, 1e-31, 1e36, 0.0])
@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf, -math.inf])
def test_only_a_column_that_is_not_finite_arrives_so(rank: Ranks, odd: float, magnitude: float) -> None:
    rows = torch.randn(ROWS, COLUMNS) * magnitude
    rows[3, 17] = odd
    rows[4, ::3] = odd
    rows[5] = odd
    ((o, back, *_),) = rank.run(_send, rows.tolist(), [0.0] * ROWS, 5)
    finite = o.isfinite()
    assert ((back.double() - o.double()).abs() <= allowed(o))[finite].all()
    assert torch.equal(back[~finite].nan_to_num(7.0), o[~finite].nan_to_num(7.0)), "infinities keep their sign, NaNs are NaNs"


def test_nan_of_any_bits_stays_one(rank: Ranks) -> None:
    ((back,),) = rank.run(_send_nans)
    assert back.isnan().all()


def _send_nans(_: World) -> tuple[torch.Tensor]:
    nans = (0x7FFFFFFF, -1, 0x7FC00000, -0x00400000, 0x7F800001, 0x7F801FFF, -0x007FFFFF, 0x7FFFE000)
    bits = torch.tensor(nans, dtype=torch.int32)
    o = bits.view(torch.float32).repeat(ROWS, COLUMNS // len(bits))
    back, sums, ages = torch.zeros_like(o), torch.zeros(ROWS), torch.empty(ROWS, dtype=torch.int32)
    round_trip[(1,)](o, sums, back, sums.clone(), ages, 5, ROWS, COLUMNS)
    return (back,)
