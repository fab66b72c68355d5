"""Sums of few rows by warps with roles. The kernel runs on Hopper alone; `tests.models.warps` runs its source here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotax.core.problem import ceil_div
from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.push_words import NOTHING
from autotax.kernels.gemm_reduce_scatter.specialized_words import add_tiles
from autotax.operators.scaled import dequantised, laid_out, scales_shape
from tests.models import warps
from tests.models.warps import Pointer, View, plain, programs_of, together
from tests.volume import volume

PROGRAMS = 3


def sums(
    world: int, sizes: list[int], n: int, k: int, scales: str, tile: tiling.ProductTile, splits: int, added: int | None,
    scattered: bool,
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """C of all calls and ranks, what torch says of them, and the inboxes. Calls of other sizes come between."""
    draw = torch.Generator().manual_seed(n + world)
    most, groups = max(sizes), tile.rows // 64
    room = (ceil_div(most, world) if scattered else most) * n // 4
    inboxes = np.full(2 * world * room * world, NOTHING, np.int64)
    bases = np.arange(world, dtype=np.int64) * (2 * world * room * 8)
    tiles = ceil_div(most, tile.rows) * ceil_div(n, tile.columns)
    limit = np.array([0, 0, 0, 1 << 30], np.int32)
    call = plain(add_tiles)

    def operand(rows: int, *, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if scales == "none":
            return torch.randn(rows, k, generator=draw).half(), torch.empty(0)
        codes = torch.randn(rows, k, generator=draw).to(torch.float8_e4m3fn)
        return codes, laid_out(torch.rand(scales_shape(scales, rows, k, weight=weight), generator=draw), scales, weight=weight)

    weights = [operand(n, weight=True) for _ in range(world)]
    inputs = [[operand(m, weight=False) for _ in range(world)] for m in sizes]
    for calls in inputs:
        calls[0][0][0] = 0.0
        if scales != "none":
            calls[0][0].view(torch.uint8)[0, :] = 0x80  # products of -0.0
    bias = torch.randn(n, generator=draw).half()
    high = [ceil_div(m, world) if scattered else m for m in sizes]
    residuals = [[torch.randn(rows, n, generator=draw).half()] * world for rows in high]
    outs = [[np.full((rows, n), np.nan, np.float16) for _ in range(world)] for rows in high]

    def words(matrix: np.ndarray) -> Pointer:
        return Pointer(matrix.reshape(-1).view(np.int64))

    def calls_of(rank: int) -> None:
        for number, m in enumerate(sizes):
            (a, of_a), (b, of_b) = inputs[number][rank], weights[rank]
            partials = np.full(tiles * splits * tile.rows * tile.columns, np.nan, np.float32)
            finished = np.zeros(tiles * groups, np.int32)
            strides = of_a.stride() if of_a.dim() == 2 else (0, 0)
            factors = Pointer(of_a.t().reshape(-1).numpy()), *strides, Pointer(of_b.reshape(-1).numpy())
            of_all = (*factors, Pointer(partials), Pointer(finished))
            inbox = Pointer(inboxes, rank * 2 * world * room)
            inbox.dtype = inboxes
            more = (None, None, None) if added is None else (words(bias.numpy()), words(residuals[number][rank].numpy()), added)
            exchanged = (words(outs[number][rank]), *more, inbox, Pointer(bases), Pointer(limit), rank, number + 1, room)
            items = ceil_div(m, tile.rows) * ceil_div(n, tile.columns) * splits
            args = (
                View(a.view(torch.float16).numpy(), (64, 64)), View(b.view(torch.float16).numpy(), (tile.columns, 64)),
                View(outs[number][rank][None], (1, 64, tile.columns)), of_all, exchanged, (items, m, n, k * a.itemsize // 2),
                world, scattered, scales, splits, groups, tile.turns, tile.columns, tile.stages, tile.strips, "cuda",
            )  # fmt: skip
            together(programs_of(rank, PROGRAMS, call, args))

    warps.stopped.clear()
    together([(lambda rank=rank: calls_of(rank)) for rank in range(world)])

    def numbers(matrix: tuple[torch.Tensor, torch.Tensor], weight: bool) -> torch.Tensor:
        return matrix[0].float() if scales == "none" else dequantised(*matrix, scales, weight=weight)

    right = []
    for number, calls in enumerate(inputs):
        total = sum((numbers(a, False) @ numbers(b, True).t()).half().float() for a, b in zip(calls, weights, strict=True))
        shares = [total[rank * high[number] :][: high[number]] if scattered else total for rank in range(world)]
        for share, residual in zip(shares, residuals[number], strict=True):
            if added is not None:
                share = share if scattered else share.half().float()
                share = share + (bias.float() if added % 2 else 0) + (residual[: len(share)].float() if added >= 2 else 0)
            padding = torch.zeros(high[number] - len(share), n)
            right.append(torch.cat([share, padding]).numpy())
    return [out for of_ranks in outs for out in of_ranks], right, inboxes


@pytest.mark.parametrize(
    ("world", "scales", "name", "splits", "added"),
    [
        (2, "row", "64x64x8x8x2", 1, None), (2, "block", "64x64x4x8x2", 2, 3),
        (2, "none", "128x64x4x8x1", 1, 2), (3, "none", "64x64x3x4x1", 5, None),
        *volume((3, "row", "128x64x3x8x2", 1, 1), (2, "tensor", "64x128x2x8x1", 1, 2), (3, "block", "64x128x3x4x2", 3, None)),
    ],
)  # fmt: skip
def test_all_ranks_get_the_sum_with_equal_bits(world: int, scales: str, name: str, splits: int, added: int | None) -> None:
    outs, right, inboxes = sums(world, [130, 5, 130, 64], 304, 768, scales, tiling.ProductTile.of(name), splits, added, False)
    for number, (out, wanted) in enumerate(zip(outs, right, strict=True)):
        np.testing.assert_allclose(out, wanted, rtol=3e-3, atol=5e-2)
        np.testing.assert_array_equal(out.view(np.int16), outs[number // world * world].view(np.int16))
    assert (inboxes == NOTHING).all(), "a word was left behind"


@pytest.mark.parametrize(
    ("world", "scales", "name", "splits", "added"),
    [
        (2, "row", "64x64x8x8x2", 1, None), (2, "none", "64x128x3x4x1", 1, 1),
        *volume((4, "row", "128x64x3x8x2", 1, 3), (2, "block", "64x64x4x8x2", 2, 1), (4, "tensor", "64x128x2x8x1", 3, 2)),
    ],
)  # fmt: skip
def test_each_rank_gets_the_sum_of_its_rows(world: int, scales: str, name: str, splits: int, added: int | None) -> None:
    """129 rows and 5 leave padding, which is zero. One row leaves ranks with padding alone."""
    outs, right, inboxes = sums(world, [129, 1, 5, 130, 64], 304, 768, scales, tiling.ProductTile.of(name), splits, added, True)
    for out, wanted in zip(outs, right, strict=True):
        np.testing.assert_allclose(out, wanted, rtol=3e-3, atol=5e-2)
    assert (inboxes == NOTHING).all(), "a word was left behind"
