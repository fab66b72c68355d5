"""vLLM (entry point `vllm.general_plugins`): row-parallel layers whose sum over the ranks is computed with their product.

Replaces RowParallelLinear for all models, by vLLM's own way for that. A layer that has no winner for any number of tokens is as
it was. One that has some asks at each call, inside of one opaque operator, and sums as vLLM does where nothing tuned is faster.
"""

from __future__ import annotations

import logging
from typing import Any

from autotax.plugins.contracts import Contract, first_broken

_LINEAR = "vllm.model_executor.layers.linear"
CONTRACTS = (
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
log = logging.getLogger("autotax")


def register() -> None:
    """What vLLM calls in each of its processes. Never raises: a vLLM that differs keeps its own layers, with one line."""
    try:
        broken = first_broken(CONTRACTS)
        if broken:
            log.warning("autotax leaves vLLM as it is: %s", broken)
            return
        from vllm.model_executor.custom_op import op_registry_oot  # type: ignore[import-not-found]
        from vllm.model_executor.layers.linear import RowParallelLinear  # type: ignore[import-not-found]

        if "RowParallelLinear" in op_registry_oot:
            log.warning("autotax leaves vLLM as it is: another plugin has replaced RowParallelLinear")
            return
        RowParallelLinear.register_oot(tuned_layer(RowParallelLinear), name="RowParallelLinear")
    except Exception as error:
        log.warning("autotax leaves vLLM as it is: %s", " ".join(str(error).split()) or type(error).__name__)


def tuned_layer(base: type[Any]) -> type[Any]:
    """vLLM's RowParallelLinear with a sum that is tuned."""
    import torch

    class TunedRowParallelLinear(base):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._autotax_group = _group_of(self)

        def forward(self, input_: Any) -> Any:
            if not self._autotax_group:
                return super().forward(input_)
            output = torch.ops.autotax.fused_matmul_all_reduce(input_, self.weight.t(), self._autotax_group)
            if not self.return_bias:
                return output
            return output, self.bias if self.skip_bias_add else None

    TunedRowParallelLinear.__name__ = base.__name__  # vLLM and its loaders go by names
    TunedRowParallelLinear.__qualname__ = base.__qualname__
    return TunedRowParallelLinear


def _group_of(layer: Any) -> str:
    """The name of the group whose ranks sum a layer's products, if a winner does it faster; else empty."""
    from vllm.distributed.parallel_state import get_tp_group  # type: ignore[import-not-found]
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from autotax.nn.agree import DTYPES
    from autotax.plugins.thresholds import token_ranges
    from autotax.torch import symm_mem, torchs_own  # noqa: F401 - declares torch.ops.autotax.fused_*

    plain = type(layer.quant_method) is UnquantizedLinearMethod and layer.params_dtype in DTYPES
    no_bias = layer.bias is None or layer.skip_bias_add
    if not (plain and no_bias and layer.reduce_results and layer.input_is_parallel and layer.tp_size > 1):
        return ""
    ranges = token_ranges(layer.output_size, layer.input_size_per_partition, DTYPES[layer.params_dtype], layer.tp_size)
    if not ranges:
        return ""
    group = get_tp_group()
    name = str(group.device_group.group_name)
    torchs_own.reduce_by(name, group.all_reduce)
    told = ", ".join(f"{first} to {last}" for first, last in ranges)
    log.info("autotax serves %s for %s tokens", layer.prefix or type(layer).__name__, told)
    return name
