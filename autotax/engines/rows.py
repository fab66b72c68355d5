"""Row-parallel layers of serving engines: their operators, for numbers of tokens that a winner of GEMM + All-Reduce serves.

An engine's plugin says how it stores a layer's weight; here the look-up, the agreement of the ranks and the call are made. The
operators decide by number of tokens at each call, so a compiled graph holds one call for all. Calls without a winner run the
engine's own quantiser, product and sum. FP8 weights and their scales are read where the engine has them: nothing is copied but
one scale of a whole weight, which kernels with scales of rows read for each row.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from autotax.core.errors import UsageError
from autotax.engines.thresholds import Ranges, agreed, already, kept_bits, listed, norm_ranges, remembered, token_ranges, within
from autotax.heap.world import World
from autotax.nn.consensus import DTYPES
from autotax.operators.scaled import SCALES_OF, greatest_magnitude, scales_shape
from autotax.torch import scaled, symm_mem
from autotax.torch.normed import RmsNorm, matmul_all_reduce_norm
from autotax.torch.plans import NotTaken

log = logging.getLogger("autotax")
SCALES = "autotax_scales"
"""The buffer of a layer whose one scale is repeated for each row of its weight."""


class Row(NamedTuple):
    """How a layer is run: the arguments of its operator that are not tensors."""

    group: str
    quantize: str = ""
    """Empty for a weight of 16 or 32 bits."""
    scales: str = ""
    """The attribute with the scales."""
    collective: str = scaled.ALL_REDUCE
    keeps_bits: bool = False
    """Whether a winner keeps the bits of a token whatever the number of tokens."""
    scale_ub: float | None = None
    """The greatest magnitude that a scale of quantised rows follows."""


class Stored(NamedTuple):
    """How an engine stores an FP8 weight: how it quantises inputs (row, block, static), and the attribute with its scales."""

    quantize: str
    scales: str = "weight_scale"


def serves(row: Row | None, summed: bool, mode: bool) -> TypeGuard[Row]:
    """Whether a row runs a call of its layer; `summed`: the layer sums by itself, `mode`: the engine is batch-invariant."""
    return row is not None and (not mode or (row.keeps_bits and summed))


def run(row: Row, layer: Any, x: Tensor, batch_invariant: bool = False) -> Tensor:
    """The sum over the ranks of the layer's products, or the product of gathered rows, without a bias."""
    if not row.quantize:
        return cast(Tensor, torch.ops.autotax.fused_matmul_all_reduce(x, layer.weight.t(), row.group, batch_invariant))
    scale = layer.input_scale if row.quantize == "static" else None
    how = getattr(layer, row.scales), row.quantize, row.collective, row.group, row.scale_ub
    return cast(Tensor, torch.ops.autotax.fused_quantised_matmul(x, layer.weight, scale, *how))


def normed(row: Row, layer: Any, x: Tensor, residual: Tensor, norm: RmsNorm, group: Any) -> tuple[Tensor, ...] | None:
    """The norm of the sum over the ranks of the layer's products and the residual, and that sum with the residual; None where no
    winner is a kernel of all this.

    `group` is the engine's coordinator. Collective at the first call of a kind, and never during a graph capture.
    """
    if row.scale_ub is not None:  # kernels of all this take no bound
        return None
    scale = layer.input_scale if row.quantize == "static" else None
    of_b = getattr(layer, row.scales) if row.quantize else None
    return in_one_kernel(x, layer.weight, scale, of_b, row.quantize, residual, norm, group)


def in_one_kernel(
    x: Tensor, weight: Tensor, scale: Tensor | None, scales: Tensor | None, quantize: str, residual: Tensor, norm: RmsNorm,
    group: Any,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """`normed` for a `weight` in either layout, its `scales`, and the `scale` of inputs that are quantised statically."""
    try:
        b = scaled.by_rows(weight, x.shape[-1])
    except NotTaken:
        return None
    n, k = b.shape
    if not within(len(x), ranges_of_norms(n, k, x.dtype, quantize, group.device_group, x.device, norm.offset, norm.quant)):
        return None
    of_b = () if scales is None else (scaled.of_weight(scales, SCALES_OF[quantize], b),)
    of_a = () if scale is None else (scale.view(1),)
    return matmul_all_reduce_norm(x, b, of_a + of_b, quantize, residual, norm, str(group.device_group.group_name))


def ranges_of_norms(
    n: int, k: int, dtype: torch.dtype, quantize: str, group: Any, device: torch.device, offset: int = 0, quant: str = "none"
) -> Ranges:
    """Numbers of tokens for which a winner is one kernel of a product with a weight [n, k], its sum and a norm.

    `quant` says how the norm quantises. Collective at the first call of a shape.
    """

    def ranges(world: World) -> Ranges:
        front: Any = {"k": k, "scales": SCALES_OF[quantize] if quantize else "none", "quantize": quantize or "none"}
        return norm_ranges(n, DTYPES[dtype], world.size, quant=quant, offset=offset, **front, world=world)

    key = _key_of_norms(n, k, dtype, quantize, device, quant, offset=offset)
    return remembered(group, device, key, f"norms behind {n} x {k}", ranges) if dtype in DTYPES else []


def may_norm(n: int, k: int, dtype: torch.dtype, quantize: str, group: Any, device: torch.device, quant: str) -> bool:
    """Whether `ranges_of_norms` has found any for this shape before. Not collective."""
    return bool(already(group, _key_of_norms(n, k, dtype, quantize, device, quant)))


def _key_of_norms(*shape: Any, offset: int = 0) -> tuple[Any, ...]:
    return "norm", *shape, offset


def plain_row(n: int, k: int, dtype: torch.dtype, group: Any, device: torch.device, name: str) -> Row | None:
    """The row of a weight [n, k] that is not quantised. Collective. None where no winner is faster than the engine.

    `group` is the engine's coordinator, `name` that of the layer in logs.
    """
    if group.world_size == 1 or dtype not in DTYPES:
        return None
    sizes = n, k, DTYPES[dtype], group.world_size
    world = World.of(group.device_group, device)
    ranges = token_ranges(*sizes, world=world)
    if not _agreed(ranges, name, world):
        return None
    row = Row(str(group.device_group.group_name), keeps_bits=kept_bits(*sizes, name, world))
    symm_mem.reduce_by(row.group, group.all_reduce)
    return row


def scaled_row(
    layer: Any, stored: Stored, result: torch.dtype, k: int, group: Any, name: str, collective: str = scaled.ALL_REDUCE
) -> Row | None:
    """The row of a layer with an FP8 weight, for inputs [tokens, k] and results of type `result`. None as for `plain_row`.

    Collective, after the engine has stored the weight. `group` is the engine's coordinator, `name` that of the layer in logs.
    """
    try:
        n, scales, alike = _checked(layer, stored, result, k)
        scale_ub = _bound(layer, stored)
    except NotTaken as reason:
        left(name, str(reason))
        return None
    layout, ranks = SCALES_OF[stored.quantize], group.world_size
    more = {"scales": layout, "result": scaled.RESULTS[result], "quantize": stored.quantize}
    output = {scaled.ALL_REDUCE: "replicated", scaled.REDUCE_SCATTER: "scattered", scaled.ALL_GATHER: "gathered"}[collective]
    world = World.of(group.device_group, layer.weight.device)
    ranges = token_ranges(n, k, "e4m3", ranks, output=output, world=world, **more)  # type: ignore[arg-type]
    if not _agreed(ranges if alike else [], name, world):
        return None
    attribute = stored.scales
    if layout == "row" and scales.numel() == 1:
        attribute = SCALES
        repeated = scales.detach().view(1, 1).expand(n, 1).contiguous()
        nn.Module.register_buffer(layer, SCALES, repeated, persistent=False)
    own = weakref.ref(layer)

    def product(x: Tensor) -> Tensor | None:
        here = own()
        return None if here is None else here.quant_method.apply(here, x, bias=None)

    def call(x: Tensor) -> Tensor | None:
        if own() is None:
            return None
        if collective == scaled.ALL_REDUCE:
            return cast(Tensor, group.all_reduce(product(x)))
        return scaled.with_collective(x, cast(Callable[[Tensor], Tensor], product), collective, group.device_group)

    scaled.run_by(layer.weight, scaled.Layer(call, product))
    return Row(str(group.device_group.group_name), stored.quantize, attribute, collective, scale_ub=scale_ub)


def left(name: str, reason: str) -> None:
    """Logs that a layer stays the engine's."""
    log.info("autotax leaves %s as it is: %s", name, reason)


def _agreed(ranges: list[tuple[int, int]], name: str, world: World) -> bool:
    """Whether the ranks have the same ranges, and any. Logs either answer."""
    if ranges := agreed(ranges, name, world):
        log.info("autotax serves %s for %s tokens", name, listed(ranges))
    else:
        left(name, "no winner is faster for any number of tokens")
    return bool(ranges)


def _bound(layer: Any, stored: Stored) -> float | None:
    """The layer's upper bound of scales, if any: its tensor is read once. Raises NotTaken."""
    scale_ub = getattr(layer, "input_scale_ub", None)
    if scale_ub is None:
        return None
    try:
        return greatest_magnitude(float(scale_ub), stored.quantize)
    except (UsageError, RuntimeError) as error:  # torch raises RuntimeError for several elements
        raise NotTaken(str(error)) from None


def _checked(layer: Any, stored: Stored, result: torch.dtype, k: int) -> tuple[int, Tensor, bool]:
    """The columns of the result, the scales, and whether these values serve. Raises NotTaken, on all ranks alike."""
    weight, scales = layer.weight, getattr(layer, stored.scales, None)
    if torch.version.hip:
        raise NotTaken("on AMD GPUs engines shuffle FP8 weights")
    if weight.dtype is not scaled.CODES or result not in scaled.RESULTS:
        raise NotTaken(f"its weight is {weight.dtype} and its result {result}; kernels take {scaled.CODES} and 16 bits")
    n, layout = len(scaled.by_rows(weight, k)), SCALES_OF[stored.quantize]
    if not isinstance(scales, Tensor) or scales.dtype is not torch.float32 or not scales.is_contiguous():
        raise NotTaken(f"its scales are not float32 and contiguous in {stored.scales}")
    counts = {"tensor": (1, n), "row": (1, n), "block": (scales_shape("block", n, k, weight=True),)}[layout]
    if (tuple(scales.shape) if layout == "block" else scales.numel()) not in counts:
        raise NotTaken(f"its scales are {list(scales.shape)} for a weight [{n}, {k}] and inputs quantised by {stored.quantize}")
    if stored.quantize == "static":
        scale = getattr(layer, "input_scale", None)
        if not isinstance(scale, Tensor) or scale.numel() != 1 or scale.dtype is not torch.float32:
            raise NotTaken("it has no single float32 input_scale")
        # Engines repeat the scale of a tensor for each row.
        return n, scales, scales.numel() == 1 or bool((scales == scales.reshape(-1)[0]).all())
    return n, scales, True
