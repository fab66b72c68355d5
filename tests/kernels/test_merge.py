"""Partial results in any number are merged as a softmax over all of them, whichever pieces have seen no token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autotax.core.problem import power_of_two
from autotax.heap import World
from autotax.kernels.flash_decode.bsp import merge_kernel
from autotax.runner.ranks import Ranks


@pytest.fixture(scope="module")
def rank() -> Iterator[Ranks]:
    with Ranks(1) as one:
        yield one


def _merged(_: World, o: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Of o [pieces, rows, head_dim] and lse [pieces, rows], `heads` rows a program."""
    pieces, rows, dim = o.shape
    out, out_lse = torch.full((rows, dim), math.nan), torch.full((rows,), math.nan)
    blocks = {"GROUP": heads, "HEAD_DIM": dim, "BLOCK_G": power_of_two(heads), "BLOCK_D": max(16, power_of_two(dim))}
    merge_kernel[(rows // heads,)](o, lse, out, out_lse, rows * dim, rows, PIECES=pieces, TARGET="interpreter", **blocks)
    return out, out_lse


@given(
    pieces=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16, 32, 48]),
    heads=st.sampled_from([1, 3, 8, 16]),
    dim=st.sampled_from([16, 40, 128]),
    empty=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    spread=st.sampled_from([0.1, 10.0, 200.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_merged_is_the_softmax_over_all(
    rank: Ranks, pieces: int, heads: int, dim: int, empty: float, spread: float, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    o, lse = torch.randn(pieces, 2 * heads, dim, generator=drawn), spread * torch.randn(pieces, 2 * heads, generator=drawn)
    nothing = torch.rand(lse.shape, generator=drawn) < empty
    o[nothing], lse[nothing] = 0.0, -math.inf
    ((out, out_lse),) = rank.run(_merged, o, lse, heads)
    wide = lse.double() * math.log(2.0)  # the kernels' logarithms are of base 2
    right_lse = torch.logsumexp(wide, 0) / math.log(2.0)
    weights = torch.exp(wide - torch.logsumexp(wide, 0)).nan_to_num(0.0)  # of rows without any token
    torch.testing.assert_close(out, (weights[..., None] * o.double()).sum(0).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out_lse, right_lse.float(), rtol=1e-5, atol=1e-4)
