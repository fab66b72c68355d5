"""Drop-ins for vLLM's decode context parallelism, `vllm/v1/attention/ops/dcp.py`: the same names, signatures and results.

All three take O [tokens, heads, head_dim] and LSE [tokens, heads] of this rank, and `cp_group`, vLLM's GroupCoordinator. `ctx`
is not used. With `seq_lens` and `query_start_loc`, tokens of a sequence without keys on this rank have no weight; the kernels
find them. autotax.engines.merges runs the drop-ins.

The entry point `vllm.general_plugins` calls `register`. It replaces row-parallel layers, merges, and norms behind an all-reduce
where winners are faster. vLLM loads this module in each process, so it imports torch only in functions.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from autotax.engines.plugin import Contract, Part, first_broken, take, vllm_is_invariant

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.engines.rows import Row, Stored


def _merge(output: str, original: Callable[..., Any] | None = None) -> Any:
    """A function of vLLM's that merges: by tuned kernels, or by `original` for numbers of tokens without a winner."""

    def merge(
        cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: Any, ctx: Any = None, return_lse: bool = False,
        is_lse_base_on_e: bool = True, seq_lens: Tensor | None = None, query_start_loc: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The merged O [tokens, heads, head_dim] of this rank's heads or of all, and with `return_lse` their LSE."""
        from autotax.engines.merges import merged, taken

        if original and (vllm_is_invariant() or not taken(cp_attn_out, cp_group, output, is_lse_base_on_e)):
            more = seq_lens, query_start_loc
            return original(cp_attn_out, cp_attn_lse, cp_group, ctx, return_lse, is_lse_base_on_e, *more)
        options: Any = {"output": output, "base_on_e": is_lse_base_on_e}
        result, sums = merged(cp_attn_out, cp_attn_lse, cp_group, seq_lens=seq_lens, query_start_loc=query_start_loc, **options)
        return (result, sums) if return_lse else result

    return wraps(original)(merge) if original else merge


MERGES = {"dcp_a2a_lse_reduce": "head_scatter", "cp_lse_ag_out_rs": "head_scatter", "cp_lse_ag_out_ar": "replicated"}
"""vLLM's merge functions, each with the output of each rank."""
dcp_a2a_lse_reduce, cp_lse_ag_out_rs, cp_lse_ag_out_ar = map(_merge, MERGES.values())


# The plugin.

_LAYERS, _DCP, _PARALLEL = "vllm.model_executor.layers", "vllm.v1.attention.ops.dcp", "vllm.distributed.parallel_state"
_LINEAR, _QUANTISED = f"{_LAYERS}.linear", f"{_LAYERS}.quantization"
_HASHING = Contract.of("vllm.config.vllm", "VllmConfig.compute_hash", "self include_version")
_ROW_PARALLEL = (
    Contract.of(_LINEAR, "RowParallelLinear.forward", "self input_"),
    Contract.of(
        _LINEAR, "RowParallelLinear.__init__",
        "self input_size output_size bias input_is_parallel skip_bias_add params_dtype reduce_results quant_config prefix "
        "return_bias disable_tp",
    ),
    Contract.of(_LINEAR, "UnquantizedLinearMethod.apply", "self layer x bias"),
    Contract.of("vllm.model_executor.custom_op", "PluggableLayer.register_oot", "cls _decorated_layer_cls name"),
    Contract.of(_PARALLEL, "get_tp_group"),
    Contract.of(_PARALLEL, "GroupCoordinator.all_reduce", "self input_"),
    _HASHING,
)  # fmt: skip
_FP8 = (
    Contract.of(f"{_QUANTISED}.fp8", "Fp8LinearMethod.apply", "self layer x bias"),
    Contract.of(f"{_QUANTISED}.fp8", "Fp8LinearMethod.process_weights_after_loading", "self layer"),
    Contract.of(f"{_QUANTISED}.input_quant_fp8", "QuantFP8.forward_native", "self x scale scale_ub use_triton"),
)
_MERGE = "cp_attn_out cp_attn_lse cp_group ctx return_lse is_lse_base_on_e seq_lens query_start_loc"
_MERGING = tuple(Contract.of(_DCP, name, _MERGE) for name in MERGES)
_EAGER = {
    Contract.of("vllm.models.common.ops.fused_allreduce_rms_norm", "fused_allreduce_rms_norm", "hidden_states residual norm"): 0,
    Contract.of(f"{_LAYERS}.fused_allreduce_gemma_rms_norm", "fused_allreduce_gemma_rms_norm", "hidden_states residual norm"): 1,
}
"""Functions that eager models call, each with the offset of its norm's weight."""
_FUSING = Contract.of(
    "vllm.compilation.passes.fusion.allreduce_rms_fusion", "call_trtllm_fused_allreduce_norm",
    "allreduce_in residual rms_gamma rms_eps world_size launch_with_pdl fp32_acc max_token_num pattern_code norm_out quant_out "
    "scale_out scale_factor weight_bias",
)  # fmt: skip
_PASSES = (
    Contract.of("vllm.compilation.passes.pass_manager", "PostGradPassManager.configure", "self config"),
    Contract.of("vllm.compilation.passes.inductor_pass", "CallableInductorPass.__init__", "self callable uuid"),
)
_NORM = Contract.of("vllm.ir.ops.layernorm", "fused_add_rms_norm", "x x_residual weight epsilon variance_size")
"""A function that vLLM makes an operator of its compiler."""
CONTRACTS = (*_ROW_PARALLEL[:-1], *_FP8, *_MERGING, *_EAGER, _FUSING, *_PASSES, _NORM, _HASHING)
_library: Any = None
"""Holds our implementation of vLLM's fused operator."""


def register() -> None:
    """The entry point in each process of vLLM. Never raises: a part that differs in vLLM stays as it is, with one line."""
    parts = [Part("row-parallel layers", _ROW_PARALLEL, _replace_layer)]
    if not vllm_is_invariant():
        parts.append(Part("decode merges", _MERGING, _wrap_merges))
        for norm, offset in _EAGER.items():
            install = partial(_wrap, norm.module, norm.name, partial(_tuned_norm, offset))
            parts.append(Part(norm.name, (norm,), install))
        parts.append(Part("compiled norms", (_FUSING,), _replace_fused_norm))
        parts.append(Part("norms behind compiled products", _PASSES, _add_pass))
    take("vLLM", parts)


def _replace_layer() -> str | None:
    from vllm.model_executor.custom_op import op_registry_oot  # type: ignore[import-not-found]
    from vllm.model_executor.layers.linear import RowParallelLinear  # type: ignore[import-not-found]

    if "RowParallelLinear" in op_registry_oot:
        return "another plugin has replaced RowParallelLinear"
    _enter_key()
    RowParallelLinear.register_oot(tuned_layer(RowParallelLinear), name="RowParallelLinear")
    return None


def _enter_key() -> None:
    """Makes winners of row-parallel layers a part of the key of compiled graphs: a graph holds our operator, or not."""
    from vllm.config.vllm import VllmConfig  # type: ignore[import-not-found]

    original = VllmConfig.compute_hash
    if hasattr(original, "_autotax"):
        return

    @wraps(original)
    def compute_hash(self: Any, include_version: bool = True) -> str:
        from autotax.engines.thresholds import fingerprint

        own: str = original(self, include_version)
        left = vllm_is_invariant()
        winners = fingerprint("gemm-reduce-scatter") + fingerprint("all-reduce-norm")
        return own if left else hashlib.sha256((own + winners).encode()).hexdigest()[: len(own)]

    compute_hash._autotax = True  # type: ignore[attr-defined]
    VllmConfig.compute_hash = compute_hash


def _wrap_merges() -> None:
    for name, output in MERGES.items():
        _wrap(_DCP, name, partial(_merge, output))


def _wrap(module: str, name: str, wrapper: Any) -> None:
    """Wraps a function in its module, and in the modules that have imported it by name."""
    original = getattr(importlib.import_module(module), name)
    if hasattr(original, "_autotax"):
        return
    wrapped = wrapper(original)
    wrapped._autotax = True
    for other in [loaded for path, loaded in list(sys.modules.items()) if path.partition(".")[0] == "vllm"]:
        for attribute, value in list(vars(other).items()):
            if value is original:
                setattr(other, attribute, wrapped)


# All-reduce, residual and norm.


def _normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **more: Any) -> tuple[Tensor, ...] | None:
    """The results of `autotax.engines.norms.normed` over vLLM's tensor-parallel group; None where vLLM's function is to run."""
    from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]

    from autotax.engines import norms

    return None if vllm_is_invariant() else norms.normed(x, residual, weight, get_tp_group(), eps, **more)


def _tuned_norm(offset: int, original: Any) -> Any:
    """A function of vLLM that sums the partial results of layers with `reduce_results=False`, adds a residual and norms."""

    @wraps(original)
    def call(hidden_states: Any, residual: Any, norm: Any) -> Any:
        from vllm.distributed.parallel_state import get_tp_group

        from autotax.engines import norms
        from autotax.torch.normed import RmsNorm

        whole = getattr(norm, "variance_size_override", None) is None
        ours = RmsNorm(norm.weight, norm.variance_epsilon, offset) if whole else None

        def fused(partial: Any, residual: Any) -> Any:
            theirs = norms.Fused(original.__name__, lambda x, added: original(x, added, norm))
            outputs = _normed(partial, residual, *ours[:2], offset=offset, fused=theirs) if ours else None
            return original(partial, residual, norm) if outputs is None else (outputs[0], outputs[1])

        if residual is None:
            return original(hidden_states, residual, norm)
        return norms.summed_and_normed(hidden_states, residual, get_tp_group(), fused, norm, ours)

    return call


def _replace_fused_norm() -> None:
    """Takes the operator that vLLM's compiler puts in place of an all-reduce and a norm."""
    import torch

    global _library
    if _library is not None:
        return
    original = getattr(importlib.import_module(_FUSING.module), _FUSING.name)
    key = "CUDA" if torch.cuda.is_available() else "CPU"
    _library = torch.library.Library("vllm", "IMPL")
    _library.impl("flashinfer_trtllm_fused_allreduce_norm", _tuned_fused_norm(original), key, allow_override=True)


def _tuned_fused_norm(original: Any) -> Any:
    """vLLM's operator: FlashInfer's fused kernel, or ours where it is taken. Both write the same tensors."""

    @wraps(original)
    def call_trtllm_fused_allreduce_norm(
        allreduce_in: Any, residual: Any, rms_gamma: Any, rms_eps: float, world_size: int, launch_with_pdl: bool,
        fp32_acc: bool, max_token_num: int, pattern_code: int, norm_out: Any = None, quant_out: Any = None,
        scale_out: Any = None, scale_factor: Any = None, weight_bias: float = 0.0,
    ) -> None:  # fmt: skip
        import torch

        from autotax.engines.norms import Fused

        def theirs(x: Any, residual: Any, **_: Any) -> None:
            original(
                x, residual, rms_gamma, rms_eps, world_size, launch_with_pdl, fp32_acc, max_token_num, pattern_code, norm_out,
                quant_out, scale_out, scale_factor, weight_bias,
            )  # fmt: skip

        static = quant_out is not None and scale_out is None and quant_out.dtype is torch.float8_e4m3fn
        # With norm_out vLLM's norm has no residual: `residual` holds zeros, and the sum goes to allreduce_in.
        kept = residual if norm_out is None else allreduce_in
        plain = quant_out is None and scale_factor is None
        if weight_bias in (0.0, 1.0) and (plain or (static and norm_out is None)) and allreduce_in.dim() == 2:
            out = quant_out if static else allreduce_in if norm_out is None else norm_out
            scale = scale_factor.view(1) if static else None
            more = {"offset": int(weight_bias), "scale": scale, "fused": Fused(original.__name__, theirs)}
            if _normed(allreduce_in, residual, rms_gamma, rms_eps, out=out, residual_out=kept, **more) is not None:
                return
        theirs(allreduce_in, residual)

    return call_trtllm_fused_allreduce_norm


def _add_pass() -> str | None:
    """Adds our pass behind vLLM's own, which have fused some norms with a quantiser."""
    import torch
    from vllm.compilation.passes.inductor_pass import CallableInductorPass  # type: ignore[import-not-found]
    from vllm.compilation.passes.pass_manager import PostGradPassManager  # type: ignore[import-not-found]

    from autotax.engines import norm_pass
    from autotax.engines.thresholds import fingerprint
    from autotax.engines.vllm_norms import norms_of_vllm

    importlib.import_module(_NORM.module)
    original, norm = PostGradPassManager.configure, torch.ops.vllm_ir.fused_add_rms_norm
    if tuple(argument.name for argument in norm.default._schema.arguments) != _NORM.parameters:
        return f"vLLM declares {norm.default._schema}"
    norm_pass.use(norms_of_vllm(norm.default))
    if hasattr(original, "_autotax"):
        return None

    @wraps(original)
    def configure(self: Any, config: Any) -> None:
        original(self, config)
        self.add(CallableInductorPass(norm_pass.fuse, uuid=fingerprint("all-reduce-norm")))

    configure._autotax = True  # type: ignore[attr-defined]
    PostGradPassManager.configure = configure
    return None


def tuned_layer(base: type[Any]) -> type[Any]:
    """vLLM's RowParallelLinear with a sum that is tuned."""
    import torch

    from autotax.engines import norms, rows

    @torch.compiler.assume_constant_result
    def invariant() -> bool:
        return vllm_is_invariant()

    class TunedRowParallelLinear(base):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._autotax_row = _row_of(self)

        def forward(self, input_: Any) -> Any:
            mode = invariant()
            # Other inputs were quantised by the norm in front of the layer.
            row = self._autotax_row
            if not isinstance(input_, torch.Tensor) or not rows.serves(row, self.reduce_results, mode):
                return super().forward(input_)
            if self.reduce_results:
                output = rows.run(row, self, input_, mode)
            else:
                output = norms.unsummed(self, row, input_, lambda x: self.quant_method.apply(self, x, None))
            if not self.return_bias:
                return output
            return output, self.bias if self.skip_bias_add else None

    TunedRowParallelLinear.__name__ = base.__name__  # vLLM and its loaders look classes up by name
    TunedRowParallelLinear.__qualname__ = base.__qualname__
    return TunedRowParallelLinear


def _row_of(layer: Any) -> Row | None:
    """How a layer sums its products where a winner does it faster. That of an FP8 weight follows when vLLM has stored it."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from autotax.engines import rows

    no_bias = layer.bias is None or layer.skip_bias_add
    if not (no_bias and layer.input_is_parallel and layer.tp_size > 1):
        return None
    group, name = get_tp_group(), layer.prefix or type(layer).__name__
    if type(layer.quant_method) is UnquantizedLinearMethod:
        sizes = layer.output_size, layer.input_size_per_partition, layer.params_dtype
        return _noting_norm(layer, rows.plain_row(*sizes, group, group.device, name), layer.params_dtype, group)
    kernel = getattr(layer.quant_method, "fp8_linear", None) or getattr(getattr(layer, "scheme", None), "fp8_linear", None)
    if kernel is not None:
        stored = first_broken(_FP8) or _stored(layer, kernel)
        if isinstance(stored, str):
            rows.left(name, stored)
        else:
            _follow_weight(layer.quant_method, stored, kernel.config.out_dtype, group, name)
    return None


def _noting_norm(layer: Any, row: Row | None, dtype: Any, group: Any) -> Row | None:
    """Returns the row. If the layer sums by itself, the ranks agree on winners with norms, for graphs that are compiled later."""
    from autotax.engines import rows
    from autotax.operators.scaled import quants_of_norms

    if row and layer.reduce_results and not vllm_is_invariant():
        sizes = layer.output_size, layer.input_size_per_partition
        for quant in quants_of_norms(row.quantize):  # the next layer quantises as this one does, in most models
            rows.ranges_of_norms(*sizes, dtype, row.quantize, group.device_group, group.device, quant=quant)
    return row


def _follow_weight(method: Any, stored: Stored, result: Any, group: Any, name: str) -> None:
    """Gives a layer its row each time that vLLM has stored the layer's weight: before that its layout is another one."""
    from autotax.engines import rows

    process = method.process_weights_after_loading

    @wraps(process)
    def processed(layer: Any) -> None:
        process(layer)
        row = None
        if not vllm_is_invariant():
            row = rows.scaled_row(layer, stored, result, layer.input_size_per_partition, group, name)
        layer._autotax_row = _noting_norm(layer, row, result, group)

    method.process_weights_after_loading = processed


_QUANTIZE = {
    (True, (-1, -1), (-1, -1)): "static",
    (False, (1, -1), (-1, -1)): "row",
    (False, (1, -1), (-1, 1)): "row",
    (False, (1, 128), (128, 128)): "block",
}
"""`quantize` by three properties of a vLLM scheme: whether the inputs' scale is static, and the shapes of the groups of inputs
and of weights that share a scale. -1 is a whole dimension.
"""


def _stored(layer: Any, kernel: Any) -> Stored | str:
    """How vLLM stores the FP8 weight of a layer, or why the layer is left."""
    from autotax.engines.rows import Stored

    inputs, weights = kernel.config.activation_quant_key, kernel.config.weight_quant_key
    quantize = _QUANTIZE.get((inputs.scale.static, tuple(inputs.scale.group_shape), tuple(weights.scale.group_shape)))
    if quantize is None:
        return f"inputs are quantised as {inputs} and weights as {weights}"
    if quantize == "block" and getattr(getattr(kernel, "base", kernel).quant_fp8, "use_ue8m0", False):
        return "scales of its blocks are powers of two"
    return Stored(quantize, "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale")
