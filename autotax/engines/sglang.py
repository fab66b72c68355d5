"""SGLang (entry point `sglang.srt.plugins`): its sequence-parallel layers and its row-parallel ones on tuned kernels.

With --enable-layernorm-sp, SGLang calls torch's fused operators: `autotax.torch.install` serves them. Its column-parallel layers
throw the gathered input away but let torch return it; here they do not. Row-parallel layers that sum over the ranks fuse
the sum with their product where a winner is faster. Merges of decode context parallelism use winners by number of tokens.

In SGLang's deterministic mode row-parallel layers may run one config for all numbers of tokens, and the rest is SGLang's own: see
autotax.engines.plugin.

The drop-ins for `sglang/srt/layers/dcp/comm.py` have the same names, signatures and results. They take O [tokens, heads,
head_dim] and LSE [tokens, heads] of this rank, and `cp_group`, SGLang's GroupCoordinator. They do not use `ctx`,
`cuda_graph_buffers` and `comm_backend`. autotax.engines.merges runs them. SGLang loads this module in each process, so it imports
torch only in functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from autotax.engines.plugin import Contract, Part, first_broken, sglang_is_invariant, take

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.engines.rows import Row, Stored

_LINEAR, _SP, _DCP = "sglang.srt.layers.linear", "sglang.srt.layers.layernorm_sp", "sglang.srt.layers.dcp.comm"
_REGISTRY = Contract.of("sglang.srt.plugins.hook_registry", "HookRegistry.register", "cls target hook hook_type source")
_LAYERS = (
    Contract.of(_LINEAR, "RowParallelLinear.forward", "self input_ skip_all_reduce forward_batch output_tensor"),
    Contract.of("sglang.srt.layers.moe.utils", "should_skip_mlp_all_reduce"),
    Contract.of(_SP, "column_parallel_g_matmul", "linear input_parallel bias"),
    Contract.of(_SP, "row_parallel_gbar_matmul", "linear input_ bias"),
    Contract.of(_SP, "sp_fused_matmul_eligible", "linear"),
    Contract.of(_SP, "sp_num_tokens"),
    _REGISTRY,
)
_QUANTISED = "sglang.srt.layers.quantization"
_FP8 = (
    Contract.of(f"{_QUANTISED}.fp8", "Fp8LinearMethod.apply", "self layer x bias"),
    Contract.of(f"{_QUANTISED}.w8a8_fp8", "W8A8Fp8LinearMethod.apply", "self layer x bias"),
)
_O_AND_LSE = "cp_attn_out cp_attn_lse cp_group"
_MERGING = (
    Contract.of(_DCP, "dcp_a2a_lse_reduce", f"{_O_AND_LSE} is_lse_base_on_e cuda_graph_buffers comm_backend"),
    Contract.of(_DCP, "cp_lse_ag_out_rs_mha", f"{_O_AND_LSE} return_lse"),
    Contract.of(_DCP, "cp_lse_ag_out_rs_mla", f"{_O_AND_LSE} ctx is_lse_base_on_e"),
    _REGISTRY,
)
_NORM, _FUSED = "sglang.srt.layers.layernorm", "sglang.kernels.ops.communication.all_reduce_fusion"
_NORMING = (
    Contract.of(
        _NORM, "_forward_with_allreduce_fusion", "norm_module x residual post_residual_addition weight use_attn_tp_group"
    ),
    Contract.of(
        _FUSED, "all_reduce_residual_norm",
        "input residual norm_weight norm_eps world_size gemma residual_out cluster_size two_shot vecs_per_thread",
    ),
    _REGISTRY,
)  # fmt: skip
CONTRACTS = (*_LAYERS, *_FP8, *_MERGING[:-1], *_NORMING[:-1])
_installed = False
"""Whether this plugin has installed our implementations of torch's fused operators."""


def register() -> None:
    """The entry point in each process of SGLang. Never raises: a part that differs in SGLang stays as it is, with one line."""
    merges = {f"{_DCP}.{name}": hook for name, hook in _MERGES.items()}
    norms = {
        f"{_NORM}._forward_with_allreduce_fusion": forward_with_allreduce_fusion,
        f"{_FUSED}.all_reduce_residual_norm": all_reduce_residual_norm,
    }
    layers = Part("parallel layers", _LAYERS, _hook_layers)
    others = Part("decode merges", _MERGING, partial(_hook, merges)), Part("norms", _NORMING, partial(_hook, norms))
    take("SGLang", (layers,) if sglang_is_invariant() else (layers, *others))


def _hook(hooks: Mapping[str, Any]) -> None:
    """Registers functions that run around SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found]

    for name, hook in hooks.items():
        HookRegistry.register(name, hook, HookType.AROUND)


def _hook_layers() -> None:
    import autotax.torch

    global _installed
    if not sglang_is_invariant():
        autotax.torch.install(prove=True)
        _installed = True
    _hook({
        f"{_SP}.column_parallel_g_matmul": column_parallel,
        f"{_SP}.row_parallel_gbar_matmul": scattered_row_parallel,
        f"{_LINEAR}.RowParallelLinear.forward": row_parallel,
    })  # fmt: skip


def _stands_back() -> bool:
    """Whether SGLang is in deterministic mode. If so, this also restores torch's fused operators."""
    global _installed
    if not sglang_is_invariant():
        return False
    if _installed:
        import autotax.torch

        _installed = False
        autotax.torch.uninstall()
    return True


# A merge with `original` is a hook around SGLang's function: that runs numbers of tokens without a winner.

def _run_a2a(
    original: Any, cp_attn_out: Any, cp_attn_lse: Any, cp_group: Any, is_lse_base_on_e: bool = True,
    cuda_graph_buffers: Any = None, comm_backend: str = "a2a",
) -> Any:  # fmt: skip
    """The merged O of this rank's heads [tokens, heads / ranks, head_dim]. SGLang may select FlashInfer's kernel."""
    if original and (comm_backend != "a2a" or not _serves_merge(cp_attn_out, cp_group, is_lse_base_on_e)):
        return original(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e, cuda_graph_buffers, comm_backend)
    return _own_heads(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e)[0]


def _run_mha(original: Any, cp_attn_out: Any, cp_attn_lse: Any, cp_group: Any, return_lse: bool = False) -> Any:
    """The merge for natural logarithms, and with `return_lse` the merged LSE [tokens, heads / ranks]."""
    if original and not _serves_merge(cp_attn_out, cp_group, True):
        return original(cp_attn_out, cp_attn_lse, cp_group, return_lse)
    result, sums = _own_heads(cp_attn_out, cp_attn_lse, cp_group, True)
    return (result, sums) if return_lse else result


def _run_mla(
    original: Any, cp_attn_out: Any, cp_attn_lse: Any, cp_group: Any, ctx: Any = None, is_lse_base_on_e: bool = False
) -> Any:
    """The merged O of this rank's heads, in the layout of SGLang's callers: [heads / ranks, tokens, head_dim]."""
    if original and not _serves_merge(cp_attn_out, cp_group, is_lse_base_on_e):
        return original(cp_attn_out, cp_attn_lse, cp_group, ctx, is_lse_base_on_e)
    result = _own_heads(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e)[0]
    return result if cp_group.world_size == 1 else result.transpose(0, 1)


_MERGES: dict[str, Callable[..., Any]] = {
    "dcp_a2a_lse_reduce": _run_a2a, "cp_lse_ag_out_rs_mha": _run_mha, "cp_lse_ag_out_rs_mla": _run_mla,
}  # fmt: skip
dcp_a2a_lse_reduce, cp_lse_ag_out_rs_mha, cp_lse_ag_out_rs_mla = (partial(merge, None) for merge in _MERGES.values())


def _own_heads(o: Tensor, lse: Tensor, cp_group: Any, base_on_e: bool) -> tuple[Tensor, Tensor]:
    from autotax.engines.merges import merged

    return merged(o, lse, cp_group, output="head_scatter", base_on_e=base_on_e)


def _serves_merge(o: Any, cp_group: Any, base_on_e: bool) -> bool:
    from autotax.engines.merges import taken

    return not _stands_back() and taken(o, cp_group, "head_scatter", base_on_e)


def forward_with_allreduce_fusion(
    original: Any, norm_module: Any, x: Any, residual: Any, post_residual_addition: Any, weight: Any,
    use_attn_tp_group: bool = True,
) -> Any:  # fmt: skip
    """All-reduce, residual and norm, called by norms of layers whose sum was left out. Ours for the tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

    from autotax.engines import norms
    from autotax.torch.normed import RmsNorm

    whole = use_attn_tp_group and getattr(norm_module, "variance_size_override", None) is None

    def theirs(x: Any, residual: Any) -> Any:
        return original(norm_module, x, residual, None, weight, use_attn_tp_group)

    def fused(x: Any, residual: Any) -> Any:
        function = norms.Fused("_forward_with_allreduce_fusion", theirs)
        outputs = _normed(x, residual, weight, norm_module.variance_epsilon, fused=function)
        return theirs(x, residual) if outputs is None else outputs[:2]

    if residual is not None and whole and post_residual_addition is None:
        ours = RmsNorm(weight, norm_module.variance_epsilon)
        return norms.summed_and_normed(x, residual, get_parallel().tp_group, fused, norm_module, ours)
    return original(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)


def all_reduce_residual_norm(
    original: Any, input: Any, residual: Any, norm_weight: Any, norm_eps: float, *, world_size: int, gemma: bool = False,
    residual_out: Any = None, **how: Any,
) -> Any:  # fmt: skip
    """Replaces SGLang's one-shot kernel, unless the caller gives options of that kernel."""
    from autotax.engines.norms import Fused

    def theirs(x: Any, added: Any, residual_out: Any = None) -> Any:
        return original(x, added, norm_weight, norm_eps, world_size=world_size, gemma=gemma, residual_out=residual_out, **how)

    if not any(value is not None for value in how.values()):
        more = {"offset": int(gemma), "residual_out": residual_out, "fused": Fused("all_reduce_residual_norm", theirs)}
        outputs = _normed(input, residual, norm_weight, norm_eps, world_size, **more)
        if outputs is not None:
            return outputs[0], outputs[1]
    return theirs(input, residual, residual_out)


def _normed(x: Any, residual: Any, weight: Any, eps: float, ranks: int | None = None, **more: Any) -> Any:
    """The results of `autotax.engines.norms.normed`; None where SGLang's own function is to run."""
    from sglang.srt.runtime_context import get_parallel

    from autotax.engines import norms

    parallel = get_parallel()
    group = parallel.tp_group
    # SGLang may give attention a smaller group than `tp_group`.
    alike = getattr(parallel, "attn_tp_size", group.world_size) == group.world_size == (ranks or group.world_size)
    return None if _stands_back() or not alike else norms.normed(x, residual, weight, group, eps, **more)


def column_parallel(original: Any, linear: Any, input_parallel: Any, bias: Any) -> Any:
    """The product of the gathered rows with a column-parallel layer's weight. The gathered rows are not returned."""
    import torch
    from sglang.srt.layers import layernorm_sp  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_parallel

    if _stands_back() or not layernorm_sp.sp_fused_matmul_eligible(linear) or getattr(linear, "_sp_use_cutlass", False):
        output = _in_fp8(linear, input_parallel, bias, "all_gather")
        return original(linear, input_parallel, bias) if output is None else output[: layernorm_sp.sp_num_tokens()]
    group = get_parallel().tp_group.device_group.group_name
    _, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(
        input_parallel.contiguous(), [linear.weight.t()], 0, group, return_A=False
    )
    return output[: layernorm_sp.sp_num_tokens()]


def scattered_row_parallel(original: Any, linear: Any, input_: Any, bias: Any) -> Any:
    """A row-parallel layer whose sum is scattered over the sequence; the ranks share padded rows."""
    import torch

    short = -len(input_) % linear.tp_group.world_size if isinstance(input_, torch.Tensor) and linear.tp_group else 0
    output = _in_fp8(linear, torch.nn.functional.pad(input_, (0, 0, 0, short)) if short else input_, bias, "reduce_scatter")
    return original(linear, input_, bias) if output is None else output


def _in_fp8(linear: Any, x: Any, bias: Any, collective: str) -> Any:
    """The result of a layer of the sequence-parallel region with an FP8 weight and a winner; else None."""
    import torch

    from autotax.engines import rows
    from autotax.nn.groups import capturing

    name = f"_autotax_{collective}"
    if not isinstance(x, torch.Tensor) or bias is not None or _stands_back():
        return None
    if name not in vars(linear):
        if capturing(x.device):
            return None
        setattr(linear, name, _scaled_row(linear, collective))
    row = getattr(linear, name)
    return None if row is None else rows.run(row, linear, x.contiguous())


def row_parallel(
    original: Any, layer: Any, input_: Any, skip_all_reduce: bool = False, forward_batch: Any = None, output_tensor: Any = None
) -> Any:
    """A row-parallel layer. Runs a tuned sum if the layer sums over the ranks and has a winner for some number of tokens."""
    import torch
    from sglang.srt.layers.moe.utils import should_skip_mlp_all_reduce  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_exec, get_forward

    from autotax.engines import norms, rows
    from autotax.nn.groups import capturing

    def theirs(x: Any) -> Any:
        return original(layer, x, skip_all_reduce, forward_batch, output_tensor)

    row, mode = None, _stands_back()
    if isinstance(input_, torch.Tensor):  # the norm in front of the layer may have quantised its input
        if "_autotax_row" not in vars(layer) and not capturing(input_.device):
            layer._autotax_row = _row_of(layer)
        row = vars(layer).get("_autotax_row")
    summed = layer.reduce_results and not skip_all_reduce
    if not rows.serves(row, summed, mode) or should_skip_mlp_all_reduce() or get_forward().sp_active:
        return theirs(input_)
    if layer.use_decode_attn_tp or output_tensor is not None or get_exec().comm.enable_quant_communications:
        return theirs(input_)
    output = rows.run(row, layer, input_, mode) if summed else norms.unsummed(layer, row, input_, lambda x: theirs(x)[0])
    return output, layer.bias if layer.skip_bias_add else None


def _row_of(layer: Any) -> Row | None:
    """How a layer sums its products where a winner does it faster."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import get_parallel

    from autotax.engines import rows

    group = get_parallel().tp_group
    no_bias = layer.bias is None or layer.skip_bias_add
    whole = layer.parallel_group in (None, "tp") and not layer.use_dp_attention_reduce
    if not (no_bias and whole and layer.input_is_parallel and group.world_size > 1):
        return None
    k = layer.input_size_per_partition
    name = getattr(layer, "prefix", "") or f"a row-parallel layer of {layer.output_size} x {k}"
    if type(layer.quant_method) is UnquantizedLinearMethod:
        return rows.plain_row(layer.output_size, k, layer.weight.dtype, group, layer.weight.device, name)
    return _scaled_row(layer, "all_reduce")


def _scaled_row(layer: Any, collective: str) -> Row | None:
    """How a layer with an FP8 weight runs beside a collective of the tensor-parallel group, where a winner does it faster."""
    from sglang.srt.runtime_context import get_parallel

    from autotax.engines import rows

    stored, group = _stored(layer), get_parallel().tp_group
    k = getattr(layer, "input_size_per_partition", None) or layer.input_size
    name = getattr(layer, "prefix", "") or f"a layer of {layer.output_size} x {k}"
    if isinstance(stored, rows.Stored):
        stored = first_broken(_FP8) or stored
    if isinstance(stored, str):
        rows.left(name, stored)
    if not isinstance(stored, rows.Stored) or group.world_size == 1:
        return None
    return rows.scaled_row(layer, stored, layer.params_dtype, k, group, name, collective)


def _stored(layer: Any) -> Stored | str | None:
    """How SGLang stores the FP8 weight of a layer, or why the layer is left; None for other weights."""
    from autotax.engines.rows import Stored

    method, scheme = layer.quant_method, getattr(layer, "scheme", None)
    holder = {"Fp8LinearMethod": method, "W8A8Fp8LinearMethod": method}.get(type(method).__name__, scheme)
    if type(holder).__name__ not in ("Fp8LinearMethod", "W8A8Fp8LinearMethod", "CompressedTensorsW8A8Fp8"):
        return None
    if any(getattr(holder, name, False) for name in ("use_marlin", "use_mxfp8", "block_fp8_as_mxfp8")):
        return "its weight is stored for Marlin or as MXFP8"
    if getattr(getattr(holder, "quant_config", None), "scale_fmt", None) == "ue8m0":
        return "scales of its blocks are powers of two"
    block = getattr(holder, "weight_block_size", None)
    if block is not None:
        if list(block) != [128, 128]:
            return f"blocks of its weight are {list(block)}"
        return Stored("block", "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale")
    return Stored("row" if getattr(layer, "input_scale", None) is None else "static")
