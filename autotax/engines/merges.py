"""MERGES of decode attention in a serving engine: which of its calls the drop-ins of `autotax.nn` take.

The first call of a shape looks up winners for all numbers of tokens and compares them over the ranks. Later calls compare their
number with what was agreed. What is not taken is the engine's own, on all ranks alike.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.engines.merge_calls import MOST_TOKENS
from autotax.engines.thresholds import Ranges, agreed, merge_ranges
from autotax.nn.consensus import DTYPES
from autotax.nn.groups import capturing

Key = tuple[int, int, torch.dtype, torch.device, str, bool]
_known: WeakKeyDictionary[dist.ProcessGroup, dict[Key, Ranges]] = WeakKeyDictionary()


def taken(o: Tensor, cp_group: Any, output: str, base_on_e: bool) -> bool:
    """Whether a winner merges O [tokens, heads, head_dim] faster than bulk-synchronously.

    Collective at the first call of a shape, unless a graph is being captured: then nobody is asked, and the answer is no.
    """
    if cp_group.world_size == 1 or o.dim() != 3:
        return False
    tokens, heads, head_dim = o.shape
    group, key = cp_group.device_group, (heads, head_dim, o.dtype, o.device, output, base_on_e)
    known = _known.setdefault(group, {})
    ranges = known.get(key)
    if ranges is None:
        if capturing(o.device):
            return False
        mine: Ranges = []
        if o.dtype in DTYPES and (output == "replicated" or heads % cp_group.world_size == 0):
            asked = {"output": output, "base": "e" if base_on_e else "2", "most": MOST_TOKENS}
            mine = merge_ranges(heads, head_dim, DTYPES[o.dtype], cp_group.world_size, **asked)  # type: ignore[arg-type]
        name = f"merges of {heads} heads of {head_dim}"
        ranges = known[key] = agreed(mine, name, group, o.device)
    return any(first <= tokens <= last for first, last in ranges)


def forget() -> None:
    """Looks winners up anew. Every rank must do so between the same calls."""
    _known.clear()
