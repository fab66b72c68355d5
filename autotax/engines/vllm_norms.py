"""The norms of vLLM's compiled graphs behind which, or with which, our sums are fused: see `norm_pass`.

vLLM's passes have fused some norms with the quantiser behind them when ours runs. These are operators of its extension that
write their arguments, so graphs hold them functionalised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotax.engines.norm_pass import Norm, Results
from autotax.torch.normed import RmsNorm
from autotax.torch.scaled import CODES

BY_ROW, BY_TENSOR = "rms_norm_dynamic_per_token_quant", "fused_add_rms_norm_static_fp8_quant"
SCHEMAS = {
    BY_ROW: "result input weight scale epsilon scale_ub residual",
    BY_TENSOR: "result input residual weight scale epsilon",
}
"""The arguments of vLLM's operators that norm and quantise. The first quantises by row, the second with a given scale."""


def norms_of_vllm(norm: Any) -> dict[Any, Norm]:
    """By operator. `norm` is vLLM's operator without a quantiser, of which the arguments are known. Others are left out where the
    installed vLLM has other arguments.
    """

    def alone(total: Tensor, residual: Tensor, of_y: RmsNorm) -> Results:
        y, kept = norm(total, residual, *of_y[:2])
        return y, kept

    operands = "x", "x_residual", "weight", "epsilon"
    norms = {norm: Norm("none", alone, operands, ("variance_size",), (0, 1))}
    # Of an operator's results the first is its own, which these have not.
    by_row = Norm("row", _by_row, ("input", "residual", "weight", "epsilon"), ("scale_ub",), (1, 3, 2))
    by_tensor = Norm("tensor", _by_tensor, ("input", "residual", "weight", "epsilon", "scale"), (), (1, 2))
    for name, kind in ((BY_ROW, by_row), (BY_TENSOR, by_tensor)):
        packet = getattr(torch.ops._C, name, None)
        if packet is not None and [argument.name for argument in packet.default._schema.arguments] == SCHEMAS[name].split():
            norms[packet.default] = kind
    return norms


def _by_row(total: Tensor, residual: Tensor, norm: RmsNorm) -> Results:
    y, scales, kept = torch.empty_like(total, dtype=CODES), total.new_empty(len(total), 1, dtype=torch.float32), residual.clone()
    torch.ops._C.rms_norm_dynamic_per_token_quant(y, total, norm.weight, scales, norm.eps, None, kept)
    return y, kept, scales


def _by_tensor(total: Tensor, residual: Tensor, norm: RmsNorm) -> Results:
    y, kept = torch.empty_like(total, dtype=CODES), residual.clone()
    torch.ops._C.fused_add_rms_norm_static_fp8_quant(y, total, kept, norm.weight, norm.scale, norm.eps)
    return y, kept
