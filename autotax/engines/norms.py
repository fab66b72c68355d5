"""All-reduce, residual and norm for serving engines: which calls a winner serves, and the modules that run them.

Engines pass a coordinator of their groups: anything with `device_group` and `world_size`. `taken` looks winners up at the first
call of a shape, for all numbers of tokens, and compares them over the ranks; so it says from which number of tokens on an
engine's own function runs. `normed` makes one module for each group, shape and quantisation at its first call. Both are
collective then. Neither looks up nor makes anything during a graph capture: a call whose module is missing is the engine's own.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.engines.thresholds import norm_ranges, serves
from autotax.heap.world import World
from autotax.nn.consensus import DTYPES
from autotax.nn.groups import capturing
from autotax.nn.norm import AllReduceNorm

MOST_TOKENS = 8192
"""The most tokens of the operator."""
Key = tuple[Any, ...]
"""The hidden size, dtype, device, quantisation, offset and eps."""
_norms: WeakKeyDictionary[dist.ProcessGroup, dict[Key, AllReduceNorm]] = WeakKeyDictionary()


def taken(x: Tensor, weight: Tensor, residual: Tensor, group: Any, quant: str = "none", offset: int = 0) -> bool:
    """Whether a winner sums, adds and norms x faster than the collective library and a norm.

    Collective at the first call of a shape. During graph capture it is not collective, and the answer for a new shape is no.

    Args:
        x: This rank's partial sums, [tokens, hidden].
        weight: [hidden].
        residual: [tokens, hidden].
        group: The engine's coordinator.
        quant: "none" or "tensor".
        offset: What is added to the weight.
    """
    alike = x.dim() == 2 and x.shape == residual.shape and x.dtype == weight.dtype == residual.dtype
    if group.world_size == 1 or not alike or x.dtype not in DTYPES or x.shape[1] % 8 or x.shape[1] > 16384:
        return False
    tokens, hidden = x.shape

    def ranges(world: World) -> list[tuple[int, int]]:
        return norm_ranges(hidden, DTYPES[x.dtype], group.world_size, quant=quant, offset=offset, world=world)

    name, key = f"norms of {hidden} columns", ("norm", hidden, x.dtype, x.device, quant, offset)
    return serves(tokens, group.device_group, x.device, key, name, ranges)


def normed(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    group: Any,
    eps: float,
    *,
    quant: str = "none",
    offset: int = 0,
    scale: Tensor | None = None,
    **results: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """y and the new residual of a call that is `taken`; see AllReduceNorm. None where a capture runs and nothing is prepared.

    `results` are the `out` and `residual_out` of AllReduceNorm. These may be x and the residual: where the kernel of this size
    cannot work in place, the results are copied.
    """
    norm = _module_of(x, group, eps, quant, offset)
    if norm is None:
        return None
    brought = {name: tensor for name, tensor in results.items() if tensor is not None}
    apart = not {tensor.data_ptr() for tensor in brought.values()} & {x.data_ptr(), residual.data_ptr()}
    if apart or norm.works_in_place(len(x)):
        return norm.run(x, weight, residual, scale, **brought, in_place=True)
    outputs = dict(zip(("out", "residual_out"), norm.run(x, weight, residual, scale), strict=False))
    return tuple(brought[name].copy_(made) if name in brought else made for name, made in outputs.items())


def prepare(
    group: Any, hidden: int, dtype: torch.dtype, device: Any, eps: float, *, quant: str = "none", offset: int = 0
) -> AllReduceNorm:
    """Makes the module for later calls of this shape, before a capture. Collective over the group."""
    options = {"eps": eps, "offset": offset, "quant": quant, "device": device}
    norm = AllReduceNorm(hidden, MOST_TOKENS, group.device_group, dtype, **options)
    _norms.setdefault(group.device_group, {})[hidden, dtype, norm._device, quant, offset, eps] = norm
    return norm


def forget(group: Any) -> None:
    """Closes all modules of a group. Collective; graphs that were captured before must not be replayed afterwards."""
    for norm in _norms.pop(group.device_group, {}).values():
        norm.close()


def _module_of(x: Tensor, group: Any, eps: float, quant: str, offset: int) -> AllReduceNorm | None:
    key = x.shape[1], x.dtype, x.device, quant, offset, eps
    norm = _norms.setdefault(group.device_group, {}).get(key)
    if norm is None and not capturing(x.device):
        norm = prepare(group, x.shape[1], x.dtype, x.device, eps, quant=quant, offset=offset)
    return norm
