"""The merges that drop-ins for serving engines share: one module for each group, shape, type and output, made at its first call.

Engines call functions, not modules, and bring a coordinator of their groups: anything with `device_group`, a process group of
torch, and `world_size`. The first call of a shape makes the module, which is collective and must not be captured in a graph;
`prepare` does it at a time of the engine's choosing. A first call during a capture, a type that kernels do not know, and more
tokens than a module was made for, take the collective library and torch's operators instead, on all ranks alike.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.nn.base import world_of
from autotax.nn.consensus import DTYPES
from autotax.nn.fallback import PlainMerge
from autotax.nn.groups import capturing
from autotax.nn.merge import DecodeMerge
from autotax.nn.tensor_checks import plain

MOST_TOKENS = 1024
"""Query tokens of a call for which a module is made that nobody prepared."""

Key = tuple[int, int, torch.dtype, torch.device, str, str]
Held = tuple[Tensor, Tensor] | None
_merges: WeakKeyDictionary[dist.ProcessGroup, dict[Key, DecodeMerge]] = WeakKeyDictionary()


def prepare(
    cp_group: Any,
    heads: int,
    head_dim: int,
    max_tokens: int = MOST_TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    *,
    output: str = "head_scatter",
    base: str = "e",
    **more: Any,
) -> DecodeMerge:
    """Makes the module that calls of this shape will take from now on. Collective over the group; `more`: see DecodeMerge."""
    group = cp_group.device_group
    asked = {"output": output, "base": base, "device": device, "masked": True} | more
    merge = DecodeMerge(heads, head_dim, max_tokens, group, dtype, **asked)
    known = _merges.setdefault(group, {})
    key = heads, head_dim, dtype, merge._device, output, base
    if before := known.pop(key, None):
        before.close()
    known[key] = merge
    return merge


def forget(cp_group: Any) -> None:
    """Closes all modules of a group. Collective; graphs that were captured before must not be replayed afterwards."""
    for merge in _merges.pop(cp_group.device_group, {}).values():
        merge.close()


def merged(o: Tensor, lse: Tensor, cp_group: Any, *, output: str, base_on_e: bool, held: Held = None) -> tuple[Tensor, Tensor]:
    """The merge of O [tokens, heads, head_dim] and LSE [tokens, heads] of all ranks, float32 its LSE.

    `held`: the `seq_lens` and `query_start_loc` of DecodeMerge.
    """
    tokens, heads, head_dim = o.shape
    lse = lse if lse.dtype is torch.float32 else lse.float()
    base = "e" if base_on_e else "2"
    known = _merges.setdefault(cp_group.device_group, {})
    merge = known.get((heads, head_dim, o.dtype, o.device, output, base))
    if merge is None and o.dtype in DTYPES and not capturing(o.device) and 0 < tokens <= MOST_TOKENS:
        merge = prepare(cp_group, heads, head_dim, MOST_TOKENS, o.dtype, o.device, output=output, base=base)
    if merge is not None and tokens <= merge.choices[-1].problem.batch:  # type: ignore[attr-defined]
        return merge.run(o, lse, None, None, *(held or ()))
    own = heads // cp_group.world_size if output == "head_scatter" else heads
    result, sums = o.new_empty(tokens, own, head_dim), lse.new_empty(tokens, own)
    if tokens:
        PlainMerge(world_of(cp_group.device_group, o.device), scatter=output == "head_scatter", base=base)(
            plain("cp_attn_out", o).contiguous(), plain("cp_attn_lse", lse), sums, result, held
        )
    return result, sums
