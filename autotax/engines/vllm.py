"""Drop-ins for vLLM's decode context parallelism, `vllm/v1/attention/ops/dcp.py`: the same names, signatures and results.

All three take O [tokens, heads, head_dim] and LSE [tokens, heads] of this rank, and `cp_group`, vLLM's GroupCoordinator. `ctx`
is not used. With `seq_lens` and `query_start_loc`, tokens of a sequence without keys on this rank have no weight; the kernels
find them. autotax.engines.merges runs the drop-ins.

The entry point `vllm.general_plugins` calls `register`, which replaces row-parallel layers and merges where winners are faster.
vLLM loads this module in each process, so it imports torch only in functions.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

from autotax.engines import batch_invariance
from autotax.engines.contracts import Contract, Part, take

if TYPE_CHECKING:
    from torch import Tensor


def dcp_a2a_lse_reduce(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The merged O of this rank's heads [tokens, heads / ranks, head_dim], and with `return_lse` their LSE."""
    del ctx
    return _merge(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc, "head_scatter")


def cp_lse_ag_out_rs(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Like `dcp_a2a_lse_reduce`. vLLM's own version uses an all-gather and a reduce-scatter."""
    del ctx
    return _merge(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc, "head_scatter")


def cp_lse_ag_out_ar(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The merged O of all heads [tokens, heads, head_dim], and with `return_lse` their LSE."""
    del ctx
    return _merge(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc, "replicated")


def _merge(
    o: Tensor,
    lse: Tensor,
    cp_group: Any,
    return_lse: bool,
    base_on_e: bool,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    output: str,
) -> Tensor | tuple[Tensor, Tensor]:
    from autotax.engines.merges import merged

    if cp_group.world_size == 1:
        return (o, lse) if return_lse else o
    _require_shared_heads(o, cp_group.world_size, output)
    held = _both(seq_lens, query_start_loc)
    result, sums = merged(o, lse, cp_group, output=output, base_on_e=base_on_e, held=held)
    return (result, sums) if return_lse else result


def _require_shared_heads(o: Tensor, ranks: int, output: str) -> None:
    if output == "head_scatter" and o.shape[1] % ranks:
        raise ValueError(f"cp_attn_out has {o.shape[1]} heads on {ranks} ranks; they must be a multiple of these: give as many")


def _both(seq_lens: Tensor | None, query_start_loc: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if seq_lens is None and query_start_loc is None:
        return None
    if seq_lens is None or query_start_loc is None:
        raise ValueError("seq_lens and query_start_loc belong together; one of them is not given: give both, or neither")
    if seq_lens.dim() != 1 or query_start_loc.shape != (len(seq_lens) + 1,):
        raise ValueError(
            f"query_start_loc is {list(query_start_loc.shape)} for seq_lens {list(seq_lens.shape)}; it must have one element "
            "more: give the first token of each sequence, and the end"
        )
    return seq_lens, query_start_loc


# The plugin.

_LINEAR, _DCP = "vllm.model_executor.layers.linear", "vllm.v1.attention.ops.dcp"
_MERGE = (
    "cp_attn_out", "cp_attn_lse", "cp_group", "ctx", "return_lse", "is_lse_base_on_e", "seq_lens", "query_start_loc",
)  # fmt: skip
MERGES = {"dcp_a2a_lse_reduce": "head_scatter", "cp_lse_ag_out_rs": "head_scatter", "cp_lse_ag_out_ar": "replicated"}
"""vLLM's merge functions, each with the output of each rank."""
_ROW_PARALLEL = (
    Contract(_LINEAR, "RowParallelLinear.forward", ("self", "input_")),
    Contract(
        _LINEAR,
        "RowParallelLinear.__init__",
        (
            "self", "input_size", "output_size", "bias", "input_is_parallel", "skip_bias_add", "params_dtype", "reduce_results",
            "quant_config", "prefix", "return_bias", "disable_tp",
        ),
    ),
    Contract(_LINEAR, "UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    Contract("vllm.model_executor.custom_op", "PluggableLayer.register_oot", ("cls", "_decorated_layer_cls", "name")),
    Contract("vllm.distributed.parallel_state", "get_tp_group", ()),
    Contract("vllm.distributed.parallel_state", "GroupCoordinator.all_reduce", ("self", "input_")),
)  # fmt: skip
_MERGING = tuple(Contract(_DCP, name, _MERGE) for name in MERGES)
CONTRACTS = (*_ROW_PARALLEL, *_MERGING)
log = logging.getLogger("autotax")


def register() -> None:
    """The entry point in each process of vLLM. Never raises: a part that differs in vLLM stays as it is, with one line."""
    if batch_invariance.vllm():
        return
    parts = (Part("row-parallel layers", _ROW_PARALLEL, _replace_layer), Part("decode merges", _MERGING, _wrap_merges))
    take("vLLM", parts, log)


def _replace_layer() -> str | None:
    from vllm.model_executor.custom_op import op_registry_oot  # type: ignore[import-not-found]
    from vllm.model_executor.layers.linear import RowParallelLinear  # type: ignore[import-not-found]

    if "RowParallelLinear" in op_registry_oot:
        return "another plugin has replaced RowParallelLinear"
    RowParallelLinear.register_oot(tuned_layer(RowParallelLinear), name="RowParallelLinear")
    return None


def _wrap_merges() -> None:
    """Wraps each merge function in its module, and in the modules that have imported it by name."""
    dcp = importlib.import_module(_DCP)
    for name in MERGES:
        original = getattr(dcp, name)
        if hasattr(original, "_autotax_output"):
            continue
        wrapped = _tuned_merge(original, name)
        for module in [each for path, each in list(sys.modules.items()) if path.partition(".")[0] == "vllm"]:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, wrapped)


def _tuned_merge(original: Any, name: str) -> Any:
    """A function of vLLM that merges, with tuned kernels for numbers of tokens that have a winner."""
    from autotax.engines.merges import taken

    ours, output = globals()[name], MERGES[name]

    @functools.wraps(original)
    def merge(
        cp_attn_out: Any,
        cp_attn_lse: Any,
        cp_group: Any,
        ctx: Any = None,
        return_lse: bool = False,
        is_lse_base_on_e: bool = True,
        seq_lens: Any = None,
        query_start_loc: Any = None,
    ) -> Any:
        run = ours if not batch_invariance.vllm() and taken(cp_attn_out, cp_group, output, is_lse_base_on_e) else original
        return run(cp_attn_out, cp_attn_lse, cp_group, ctx, return_lse, is_lse_base_on_e, seq_lens, query_start_loc)

    merge._autotax_output = output  # type: ignore[attr-defined]
    return merge


def tuned_layer(base: type[Any]) -> type[Any]:
    """vLLM's RowParallelLinear with a sum that is tuned."""
    import torch

    @torch.compiler.assume_constant_result
    def invariant() -> bool:
        return batch_invariance.vllm()

    class TunedRowParallelLinear(base):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._autotax_group = _group_of(self)

        def forward(self, input_: Any) -> Any:
            if not self._autotax_group or invariant():
                return super().forward(input_)
            output = torch.ops.autotax.fused_matmul_all_reduce(input_, self.weight.t(), self._autotax_group)
            if not self.return_bias:
                return output
            return output, self.bias if self.skip_bias_add else None

    TunedRowParallelLinear.__name__ = base.__name__  # vLLM and its loaders look classes up by name
    TunedRowParallelLinear.__qualname__ = base.__qualname__
    return TunedRowParallelLinear


def _group_of(layer: Any) -> str:
    """The name of the group whose ranks sum a layer's products, if a winner does it faster; else empty."""
    from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from autotax.engines.thresholds import agreed, listed, token_ranges
    from autotax.nn.consensus import DTYPES
    from autotax.torch import symm_mem

    plain = type(layer.quant_method) is UnquantizedLinearMethod and layer.params_dtype in DTYPES
    no_bias = layer.bias is None or layer.skip_bias_add
    if not (plain and no_bias and layer.reduce_results and layer.input_is_parallel and layer.tp_size > 1):
        return ""
    ranges = token_ranges(layer.output_size, layer.input_size_per_partition, DTYPES[layer.params_dtype], layer.tp_size)
    group, layer_name = get_tp_group(), layer.prefix or type(layer).__name__
    ranges = agreed([] if batch_invariance.vllm() else ranges, layer_name, group.device_group, group.device)
    if not ranges:
        return ""
    name = str(group.device_group.group_name)
    symm_mem.reduce_by(name, group.all_reduce)
    log.info("autotax serves %s for %s tokens", layer_name, listed(ranges))
    return name
