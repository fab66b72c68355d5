"""SGLang (entry point `sglang.srt.plugins`): its sequence-parallel layers and its row-parallel ones on tuned kernels.

With --enable-layernorm-sp, SGLang calls torch's fused operators: `autotax.torch.install` serves them. Its column-parallel layers
throw the gathered input away but let torch return it; here they do not. Row-parallel layers that sum over the ranks by themselves
do so with their product, where a winner is faster.
"""

from __future__ import annotations

import logging
from typing import Any

from autotax.plugins.contracts import Contract, first_broken

_LINEAR, _SP = "sglang.srt.layers.linear", "sglang.srt.layers.layernorm_sp"
CONTRACTS = (
    Contract(_LINEAR, "RowParallelLinear.forward", ("self", "input_", "skip_all_reduce", "forward_batch", "output_tensor")),
    Contract("sglang.srt.layers.moe.utils", "should_skip_mlp_all_reduce", ()),
    Contract(_SP, "column_parallel_g_matmul", ("linear", "input_parallel", "bias")),
    Contract(_SP, "sp_fused_matmul_eligible", ("linear",)),
    Contract(_SP, "sp_num_tokens", ()),
    Contract("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("cls", "target", "hook", "hook_type", "source")),
)
log = logging.getLogger("autotax")


def register() -> None:
    """What SGLang calls in each of its processes. Never raises: an SGLang that differs keeps its own layers, with one line."""
    try:
        broken = first_broken(CONTRACTS)
        if broken:
            log.warning("autotax leaves SGLang as it is: %s", broken)
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

        import autotax.torch

        autotax.torch.install()
        HookRegistry.register(f"{_SP}.column_parallel_g_matmul", column_parallel, HookType.AROUND)
        HookRegistry.register(f"{_LINEAR}.RowParallelLinear.forward", row_parallel, HookType.AROUND)
    except Exception as error:
        log.warning("autotax leaves SGLang as it is: %s", " ".join(str(error).split()) or type(error).__name__)


def column_parallel(original: Any, linear: Any, input_parallel: Any, bias: Any) -> Any:
    """The gathered rows times a column-parallel layer's weight, without the rows."""
    import torch
    from sglang.srt.layers import layernorm_sp  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

    if not layernorm_sp.sp_fused_matmul_eligible(linear) or getattr(linear, "_sp_use_cutlass", False):
        return original(linear, input_parallel, bias)
    group = get_parallel().tp_group.device_group.group_name
    _, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(
        input_parallel.contiguous(), [linear.weight.t()], 0, group, return_A=False
    )
    return output[: layernorm_sp.sp_num_tokens()]


def row_parallel(
    original: Any, layer: Any, input_: Any, skip_all_reduce: bool = False, forward_batch: Any = None, output_tensor: Any = None
) -> Any:
    """A row-parallel layer, by a tuned sum where the layer sums at all and has a winner for some number of tokens."""
    import torch
    from sglang.srt.layers.moe.utils import should_skip_mlp_all_reduce  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_exec, get_forward

    group = vars(layer).get("_autotax_group")
    if group is None:
        group = layer._autotax_group = _group_of(layer)
    summed = not (skip_all_reduce or should_skip_mlp_all_reduce() or get_forward().sp_active or layer.use_decode_attn_tp)
    if not group or not summed or output_tensor is not None or get_exec().comm.enable_quant_communications:
        return original(layer, input_, skip_all_reduce, forward_batch, output_tensor)
    output = torch.ops.autotax.fused_matmul_all_reduce(input_, layer.weight.t(), group)
    return output, layer.bias if layer.skip_bias_add else None


def _group_of(layer: Any) -> str:
    """The name of the group whose ranks sum a layer's products, if a winner does it faster; else empty."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_parallel

    from autotax.nn.agree import DTYPES
    from autotax.plugins.thresholds import token_ranges
    from autotax.torch import torchs_own

    group = get_parallel().tp_group
    plain = type(layer.quant_method) is UnquantizedLinearMethod and layer.weight.dtype in DTYPES
    no_bias = layer.bias is None or layer.skip_bias_add
    whole = layer.parallel_group in (None, "tp") and not layer.use_dp_attention_reduce
    if not (plain and no_bias and whole and layer.reduce_results and layer.input_is_parallel and group.world_size > 1):
        return ""
    n, k = layer.weight.shape
    if not token_ranges(n, k, DTYPES[layer.weight.dtype], group.world_size):
        return ""
    name = str(group.device_group.group_name)
    torchs_own.reduce_by(name, group.all_reduce)
    return name
