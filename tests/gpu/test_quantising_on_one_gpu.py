"""The kernel that quantises: on a GPU it divides by FMA, which the interpreter cannot show."""

from __future__ import annotations

import pytest
import torch

from autotax.hardware import detect
from autotax.kernels.quantising import quantised_by_kernel
from autotax.operators.scaled import SCALES_OF, quantised, scales_of

pytestmark = pytest.mark.gpu


def by_kernel(x: torch.Tensor, static: torch.Tensor | None, quantize: str) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_by_kernel(x, static, SCALES_OF[quantize], torch.zeros(2, dtype=torch.int64, device="cuda"), detect())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (7, 5120), (300, 8192), (4096, 7168)])
@pytest.mark.parametrize("quantize", list(SCALES_OF))
def test_codes_and_scales_are_torchs(quantize: str, rows: int, k: int, dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(rows)
    powers = torch.randint(-4, 4, (rows, 1), generator=draw, device="cuda")
    x = (torch.randn(rows, k, generator=draw, device="cuda") * 10.0**powers).to(dtype)
    x[0, :64], x[-1, ::128] = 0.0, 3.0e4
    static = torch.full((1,), 1 / 64, device="cuda") if quantize == "static" else None
    scales = scales_of(x, quantize) if static is None else static
    codes, kernel_scales = by_kernel(x, static, quantize)
    assert torch.equal(codes.view(torch.uint8), quantised(x, scales, quantize).view(torch.uint8))
    assert torch.equal(kernel_scales.reshape(scales.shape), scales)


def test_an_infinite_number_leaves_others_numbers() -> None:
    x = torch.ones(1, 256, dtype=torch.bfloat16, device="cuda")
    x[0, 5] = float("inf")
    codes, _ = by_kernel(x, None, "block")
    numbers = codes.float()[0]
    assert numbers[5].isnan() and numbers[:5].eq(0).all() and numbers[128:].eq(448).all()
