"""The product of codes by warps with roles. Its kernel runs on Hopper alone; `tests.models.warps` runs its source here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotax.core.problem import ceil_div
from autotax.kernels import specialized_product, tiling
from autotax.kernels.all_gather_gemm.roles import padded
from autotax.operators.scaled import dequantised, laid_out, scales_shape
from tests.models import warps
from tests.models.warps import Pointer, View, plain, programs_of, together
from tests.volume import volume

PROGRAMS = 3


@pytest.fixture(autouse=True)
def _stored_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's end waits for the last stores; here they reach memory when shared memory was read."""

    def wait(count: int) -> None:
        warps._store_wait(count)
        warps._assembly("wait_group 0")

    monkeypatch.setattr(warps.FAKES["tma"], "store_wait", wait)


def multiply(
    m: int, n: int, k: int, scales: str, tile: tiling.ProductTile, splits: int, high: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """C of the kernel and of torch. Boxes of A have `high` rows."""
    draw = torch.Generator().manual_seed(m + n)
    a, b = (torch.randn(rows, k, generator=draw).to(torch.float8_e4m3fn) for rows in (m, n))
    of_a, of_b = (
        laid_out(torch.rand(scales_shape(scales, rows, k, weight=weight), generator=draw), scales, weight=weight)
        for rows, weight in ((m, False), (n, True))
    )
    out, groups = np.full((1, m, n), np.nan, np.float16), tile.rows // 64
    parts = tiling.parts_of(tile.columns)
    tiles = ceil_div(m, tile.rows) * ceil_div(n, tile.columns)
    partials = np.full(tiles * splits * tile.rows * tile.columns, np.nan, np.float32)
    strides = of_a.stride() if of_a.dim() == 2 else (0, 0)
    args = (
        View(a.view(torch.float16).numpy(), (high, 64)),
        *padded([View(b.view(torch.float16).numpy(), (part, 64)) for part in parts], 3, None),
        *padded([View(out, (1, 64, part)) for part in parts], 3, None),
        Pointer(of_a.t().reshape(-1).numpy()), *strides, Pointer(of_b.reshape(-1).numpy()),
        Pointer(partials), Pointer(np.zeros(tiles * groups, np.int32)), m, n, k // 2,
        scales, splits, groups, tile.turns, *padded(parts, 3, 0), tile.stages, tile.strips, "cuda",
    )  # fmt: skip
    warps.stopped.clear()
    together(programs_of(0, PROGRAMS, plain(specialized_product.specialized_product_kernel), args))
    right = dequantised(a, of_a, scales, weight=False) @ dequantised(b, of_b, scales, weight=True).t()
    return out[0], right.numpy()


@pytest.mark.parametrize("scales", ["row", "block", *volume("tensor")])
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("64x64x8x8x2", 1), ("64x64x4x8x2", 2), ("128x64x3x8x2", 3), ("64x64x3x4x2", 1),
        *volume(("64x128x2x8x1", 1), ("64x112x4x8x2", 2)),
    ],
)
def test_it_is_the_product_of_both_matrices(scales: str, name: str, splits: int) -> None:
    """Programs have several tiles of five steps. So a group that takes turns begins with another step in each of them."""
    tile = tiling.ProductTile.of(name)
    if scales == "block" and tile.columns not in (64, 128):
        pytest.skip("such a tile lies in several blocks of B")
    for m, high in ((5, 8), (130, 64)):
        out, right = multiply(m, 304, 1280, scales, tile, splits, high)
        np.testing.assert_allclose(out, right, rtol=2e-3, atol=5e-2)


def test_groups_must_not_change_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each tile began with the first group, a group would wait for a load of a buffer that it did not see filled before."""
    monkeypatch.setattr(warps, "PATIENCE_S", 2.0)
    monkeypatch.setattr("autotax.kernels.scaled_roles.steps_before", lambda _step, group, _groups: group)
    with pytest.raises(AssertionError):
        for _ in range(20):
            out, right = multiply(200, 304, 1280, "row", tiling.ProductTile(64, 64, 4, 8, 2), 1)
            np.testing.assert_allclose(out, right, rtol=2e-3, atol=5e-2)


@given(tiles=st.lists(st.integers(0, 9), max_size=6), groups=st.integers(1, 4), times=st.integers(1, 3))
def test_each_step_and_each_buffer_has_one_group(tiles: list[int], groups: int, times: int) -> None:
    """`tiles` are steps of the tiles of a program."""
    buffers = [set() for _ in range(groups * times)]  # type: list[set[int]]
    first = 0
    for steps in tiles:
        taken = []
        for group in range(groups):
            mine = range(first + tiling.steps_before(first, group, groups), first + steps, groups)
            taken += mine
            for step in mine:
                buffers[step % len(buffers)].add(group)
        assert sorted(taken) == list(range(first, first + steps))
        first += steps
    assert all(len(users) <= 1 for users in buffers)
