"""Merges of decode attention for serving engines: which calls a winner serves, and the modules that run them.

Engines call functions, not modules, and pass a coordinator of their groups: anything with `device_group`, a process group of
torch, and `world_size`. `taken` looks winners up at the first call of a shape, for all numbers of tokens, and compares them over
the ranks. It makes one module for each group, shape, dtype and output, and leaves a call without a tuned kernel to the engine.

`merged` computes in any case. It makes a missing module at its first call; that is collective and must not be captured in a
graph, so `taken` or `prepare` does it earlier. All ranks alike use the collective library and torch's operators during a capture,
for dtypes without kernels, and for more tokens than a module was made for.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.engines.thresholds import Ranges, merge_ranges, tuned
from autotax.heap.world import World
from autotax.nn.base import world_of
from autotax.nn.consensus import DTYPES
from autotax.nn.fallback import PlainMerge
from autotax.nn.groups import capturing
from autotax.nn.merge import DecodeMerge
from autotax.nn.tensor_checks import plain
from autotax.torch.plans import TORCH, count_of

MOST_TOKENS = 1024
"""The greatest number of query tokens for which a call makes a module without `prepare`."""

Key = tuple[int, int, torch.dtype, torch.device, str, str]
"""Heads, head_dim, dtype, device, output, base."""
_merges: WeakKeyDictionary[dist.ProcessGroup, dict[Key, DecodeMerge]] = WeakKeyDictionary()


def taken(o: Tensor, cp_group: Any, output: str, base_on_e: bool) -> bool:
    """Whether a tuned kernel merges O [tokens, heads, head_dim] of this rank: its winner beat the bulk-synchronous merge.

    Collective at the first call of a shape. During graph capture it is not collective, and the answer for a new shape is no.
    `output` is "head_scatter" or "replicated". `base_on_e`: LSE holds natural logarithms; otherwise those to base 2.
    """
    if cp_group.world_size == 1 or o.dim() != 3:
        return False
    tokens, heads, head_dim = o.shape
    group, base = cp_group.device_group, "e" if base_on_e else "2"
    possible = o.dtype in DTYPES and (output == "replicated" or heads % cp_group.world_size == 0)

    def ranges(world: World) -> Ranges:
        if not possible:
            return []
        options: dict[str, Any] = {"output": output, "base": base, "most": MOST_TOKENS, "world": world}
        return merge_ranges(heads, head_dim, DTYPES[o.dtype], cp_group.world_size, **options)

    key = heads, head_dim, o.dtype, o.device, output, base
    of_group, name = modules_of(cp_group), f"merges of {heads} heads of {head_dim}"
    make = partial(prepare, cp_group, heads, head_dim, MOST_TOKENS, o.dtype, o.device, output=output, base=base)
    merge, reason = tuned(of_group.get(key), tokens, group, o.device, ("merge", *key), name, ranges, make)
    count_of("decode merge", f"({heads} heads of {head_dim})", "autotax" if merge else TORCH, reason).calls += 1
    return merge is not None


def prepare(
    cp_group: Any, heads: int, head_dim: int, max_tokens: int = MOST_TOKENS, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None, *, output: str = "head_scatter", base: str = "e", **more: Any,
) -> DecodeMerge:  # fmt: skip
    """Makes the module for later calls of this shape. Collective over the group; `more` goes to DecodeMerge."""
    group = cp_group.device_group
    options = {"output": output, "base": base, "device": device, "masked": True} | more
    merge = DecodeMerge(heads, head_dim, max_tokens, group, dtype, **options)
    of_group = modules_of(cp_group)
    key = heads, head_dim, dtype, merge._device, output, base
    if before := of_group.pop(key, None):
        before.close()
    of_group[key] = merge
    return merge


def modules_of(cp_group: Any) -> dict[Key, DecodeMerge]:
    return _merges.setdefault(cp_group.device_group, {})


def forget(cp_group: Any) -> None:
    """Closes all modules of a group. Collective; graphs that were captured before must not be replayed afterwards."""
    for merge in _merges.pop(cp_group.device_group, {}).values():
        merge.close()


def merged(
    o: Tensor, lse: Tensor, cp_group: Any, *, output: str, base_on_e: bool, seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The merge of O [tokens, heads, head_dim] and LSE [tokens, heads] of all ranks, float32 its LSE. One rank gets back its own.

    For `seq_lens` and `query_start_loc` see DecodeMerge.
    """
    if (ranks := cp_group.world_size) == 1:
        return o, lse
    tokens, heads, head_dim = o.shape
    if output == "head_scatter" and heads % ranks:
        raise ValueError(f"cp_attn_out has {heads} heads on {ranks} ranks; they must be a multiple of these: give as many")
    held = _both(seq_lens, query_start_loc)
    lse = lse if lse.dtype is torch.float32 else lse.float()
    base = "e" if base_on_e else "2"
    merge = modules_of(cp_group).get((heads, head_dim, o.dtype, o.device, output, base))
    if merge is None and o.dtype in DTYPES and not capturing(o.device) and 0 < tokens <= MOST_TOKENS:
        merge = prepare(cp_group, heads, head_dim, MOST_TOKENS, o.dtype, o.device, output=output, base=base)
    if merge is not None and tokens <= merge.choices[-1].problem.batch:  # type: ignore[attr-defined]
        return merge.run(o, lse, None, None, *(held or ()))
    own = heads // ranks if output == "head_scatter" else heads
    result, sums = o.new_empty(tokens, own, head_dim), lse.new_empty(tokens, own)
    if tokens:
        PlainMerge(world_of(cp_group.device_group, o.device), scatter=output == "head_scatter", base=base)(
            plain("cp_attn_out", o).contiguous(), plain("cp_attn_lse", lse), sums, result, held
        )
    return result, sums


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
