"""Products of e4m3 by warps with roles, which no interpreter runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotax.hardware import detect
from autotax.kernels.specialized_product import SpecializedProduct
from autotax.kernels.tiling import ProductTile
from autotax.operators.problems import AllGatherGemm
from autotax.operators.scaled import dequantised, laid_out, scales_shape

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def operand(rows: int, k: int, scales: str, draw: torch.Generator, *, weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randn(rows, k, generator=draw, device="cuda").to(torch.float8_e4m3fn)
    factors = torch.rand(scales_shape(scales, rows, k, weight=weight), generator=draw, device="cuda") + 0.1
    return codes, laid_out(factors, scales, weight=weight)


def product_of(tile: ProductTile, splits: int, scales: str, n: int, k: int, rows: int) -> SpecializedProduct:
    problem = AllGatherGemm(rows, n, k, "e4m3", world_size=1, scales=scales)
    context: Any = SimpleNamespace(
        processors=detect().processors,
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cuda"),
        launch=lambda kernel, grid, *args, **options: kernel[grid](*args, TARGET="cuda", **options),
    )
    return SpecializedProduct(tile, splits, problem, rows, context)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("scales", ["row", "block", "tensor"])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 8192, 4096), (130, 5120, 1280), (301, 3072, 2816)])
def test_each_tile_gives_the_product_with_equal_bits(m: int, n: int, k: int, scales: str) -> None:
    """Steps of 256 columns that parts and groups do not divide, calls with fewer rows between, and replays of a graph."""
    draw = torch.Generator("cuda").manual_seed(m)
    (a, of_a), (b, of_b) = operand(m, k, scales, draw, weight=False), operand(n, k, scales, draw, weight=True)
    right = dequantised(a, of_a, scales, weight=False) @ dequantised(b, of_b, scales, weight=True).t()
    names = ["64x64x12x8x2", "64x128x6x8x1", "128x64x8x8x2", *([] if scales == "block" else ["64x80x12x4x2", "128x160x5x8x2"])]
    for name in names:
        for splits in (1, 3):
            product = product_of(ProductTile.of(name), splits, scales, n, k, m)
            outs = torch.full((3, m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            product(a, of_a, b, of_b, outs[0])
            few = torch.empty(max(1, m // 2), n, dtype=torch.bfloat16, device="cuda")
            few_scales = of_a[: len(few)] if of_a.dim() == 2 else of_a
            product(a[: len(few)], few_scales, b, of_b, few)
            product(a, of_a, b, of_b, outs[1])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                product(a, of_a, b, of_b, outs[2])
            for _ in range(20):
                graph.replay()
            case = f"{name} in {splits} parts"
            torch.testing.assert_close(outs[0].float(), right, rtol=8e-3, atol=2e-3 * float(right.abs().max()), msg=case)
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), case
            torch.testing.assert_close(few.float(), right[: len(few)], rtol=8e-3, atol=2e-3 * float(right.abs().max()), msg=case)
