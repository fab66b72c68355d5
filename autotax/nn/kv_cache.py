"""What calls of FlashDecode bring beside the cache, made from what serving engines have: by plain torch, once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_tokens(
    lengths: Tensor, rank: int, ranks: int, *, queries: int = 1, window: int = 0, interleave: int = 1
) -> tuple[Tensor, Tensor]:
    """`kv_lens` and `kv_starts` of a rank, int32 [B], or [B, queries] for several query tokens a sequence.

    `lengths` [B] are those of whole sequences, over all ranks and with the query tokens, which are the last ones. Tokens are
    dealt out to the ranks in turn, `interleave` neighbours at a time: 1 is vLLM's default; the room that a rank has for a
    sequence gives each rank one piece. A query token sees itself and those before it, with a `window` the last so many. Where a
    sequence is shorter than its query tokens the first of them see nothing.
    """
    turn = interleave * ranks
    behind = lengths[:, None] - queries + 1 + torch.arange(queries, device=lengths.device)

    def before(place: Tensor) -> Tensor:
        """How many tokens of this rank come before a place in the sequence."""
        place = place.clamp(min=0)
        return place // turn * interleave + (place % turn - rank * interleave).clamp(0, interleave)

    ends = before(behind)
    starts = before(behind - window) if window else torch.zeros_like(ends)
    shape = (len(lengths), queries) if queries > 1 else (len(lengths),)
    return ends.to(torch.int32).view(shape), starts.to(torch.int32).view(shape)


def kv_scales(
    k_scale: Tensor | float, v_scale: Tensor | float, kv_heads: int, device: torch.device | str | None = None
) -> Tensor:
    """`kv_scales` float32 [2, kv_heads] of a layer: an element of K is its value in 8 bits times that of its head. Each is one
    number, or one for each KV head.
    """
    each = (torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(-1) for scale in (k_scale, v_scale))
    return torch.stack([scale.expand(kv_heads) for scale in each])
