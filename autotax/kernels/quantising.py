"""The quantisation of activations by one kernel, for layers that run no variant."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autotax.core.problem import ceil_div, power_of_two
from autotax.hardware import Hardware
from autotax.kernels.all_gather_gemm.scaled_shards import CODES, quantise_kernel
from autotax.kernels.context import overlapping
from autotax.operators.scaled import GROUP


def quantised_by_kernel(
    a: Tensor, static: Tensor | None, quant: str, nowhere: Tensor, hardware: Hardware, most: float = math.inf
) -> tuple[Tensor, Tensor]:
    """A [rows, k] in e4m3 and its scales, by one kernel on this rank, in new tensors.

    `static` is the scale of quant "tensor", which makes none. `nowhere` are two zeros, int64. With quant "row" no
    scale follows a magnitude above `most`. One compilation serves all numbers of
    rows but for what Triton knows of them.
    """
    rows, k = a.shape
    groups = {"tensor": 0, "row": 1, "block": ceil_div(k, GROUP)}[quant]
    codes = torch.empty((rows, k), dtype=CODES, device=a.device)
    scales = torch.empty((max(1, groups), rows), dtype=torch.float32, device=a.device)
    quantise_kernel[(rows,)](
        a, scales if static is None else static, most, codes.view(torch.uint8), scales, nowhere, rows, groups, k,
        QUANT=quant, COLS=power_of_two(max(k, GROUP)), TARGET=hardware.family, num_warps=8, **overlapping(hardware),
    )  # fmt: skip
    return codes, scales.t() if static is None else static
