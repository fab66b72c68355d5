"""What real tensors have and normal numbers have not: outlier channels, large and tiny magnitudes, infinities and NaNs.

Magnitudes are powers of two that a tensor is multiplied by, so the numbers drawn lose nothing. Where two tensors are multiplied,
channels of one are scaled up as those of the other are scaled down: each product still counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class Spread:
    """Exponents of two that a type has room for, among tensors whose normal numbers reach 6 and whose sums reach 2^20 of them."""

    channel: Range
    """Of channels that are summed over: one tensor gets it, the other its inverse."""
    row: Range
    column: Range
    """Of rows of A and rows of B, which are columns of C."""
    head: Range
    value: Range
    """Of V: KV heads, and channels within them."""


WIDE = Spread(channel=(-15, 15), row=(-60, 60), column=(-40, 40), head=(-100, 84), value=(-8, 15))
SPREADS = {
    "bf16": WIDE,
    "fp32": WIDE,
    "fp16": Spread((-6, 6), (-4, 2), (-4, 2), (-4, 2), (-4, 10)),
    # Of a KV cache, the magnitudes of whose heads are in its scales.
    "8 bits": Spread(channel=(-3, 5), row=(0, 0), column=(0, 0), head=(0, 0), value=(-3, 5)),
}
SHARE = 1 / 16
"""Of rows or channels that are scaled, besides the first two: by the greatest and the least power."""


def powers(shape: Sequence[int], reach: Range, *seed: int) -> Tensor:
    """Powers of two, float32 on the CPU: some of `reach`, most of them 1. Equal for equal seeds."""
    generator = torch.Generator().manual_seed(sum(part * 1_000_003**i for i, part in enumerate(seed)) % 2**63)
    exponents = torch.randint(reach[0], reach[1] + 1, tuple(shape), generator=generator)
    exponents[torch.rand(exponents.shape, generator=generator) >= SHARE] = 0
    flat = exponents.view(-1)
    if len(flat) > 2:  # with one or two everything would be scaled
        places = torch.randperm(len(flat), generator=generator)[:2]
        flat[places[0]], flat[places[1]] = reach[1], reach[0]
    return torch.exp2(exponents.float())


def scale(tensor: Tensor, factors: Tensor) -> None:
    """Multiplies in place."""
    tensor.mul_(factors.to(tensor.device, tensor.dtype))
