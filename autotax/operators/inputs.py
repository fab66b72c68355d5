"""Inputs drawn from a seed. Every rank can draw those of all ranks, so a reference needs no collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


@dataclass(frozen=True)
class Call:
    """The inputs and the output of one call on one rank. `written` are places of further outputs among the tensors."""

    tensors: tuple[Tensor, ...]
    out: Tensor
    written: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """All outputs; `out` is the first."""
        return (self.out, *(self.tensors[place] for place in self.written))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.tensors, self.out))

    def poison(self) -> None:
        """Fills the outputs with NaN, so that elements that are never written are detected."""
        for output in self.outputs:
            output.fill_(math.nan)


@dataclass(frozen=True)
class Draw:
    """The source of one rank's inputs for one seed, on a device.

    Even seeds are timed: normal numbers, full sizes. Odd seeds are ragged and imitate real tensors: outlier channels, large and
    tiny magnitudes, infinities and NaNs.
    """

    dtype: torch.dtype
    seed: int
    rank: int
    device: torch.device

    @property
    def ragged(self) -> bool:
        """Whether data-dependent sizes, such as lengths, should differ between ranks and rows."""
        return self.seed % 2 == 1

    @property
    def extreme(self) -> bool:
        """Whether magnitudes should imitate real tensors. False on the device `meta`, where tensors have no memory."""
        return self.seed % 2 == 1 and self.device.type != "meta"

    def of(self, rank: int) -> Draw:
        """The same source for another rank."""
        return replace(self, rank=rank)

    def normal(self, *shape: int, tensor: int, shared: bool = False) -> Tensor:
        """Normal numbers of the problem's dtype. `tensor` numbers the inputs; a `shared` one is the same on all ranks."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device)
        # One random stream per (seed, tensor, rank): a small injective mixing is enough.
        parts = (self.seed, tensor, -1 if shared else self.rank)
        generator.manual_seed(sum((part + 1) * 1_000_003**i for i, part in enumerate(parts)) % 2**63)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32).to(self.dtype)

    def empty(self, *shape: int) -> Tensor:
        """A buffer for an output of the problem's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def generator(self, tensor: int) -> torch.Generator:
        """A generator on the CPU, for lengths, tables and the like."""
        return torch.Generator().manual_seed(self.seed * 131 + self.rank + 7919 * tensor)


# Features of real tensors that normal numbers lack: outlier channels, large and tiny magnitudes, infinities and NaNs.

Range = tuple[int, int]


@dataclass(frozen=True)
class Spread:
    """Ranges of exponents of two that keep a type in range, if normal numbers reach 6 and sums have up to 2^20 terms."""

    channel: Range
    """For channels that are summed over: one tensor is scaled by the power, the other by its inverse."""
    row: Range
    column: Range
    """`row` scales rows of A. `column` scales rows of B, which are columns of C."""
    head: Range
    value: Range
    """For V: KV heads, and channels within them."""


WIDE = Spread(channel=(-15, 15), row=(-60, 60), column=(-40, 40), head=(-100, 84), value=(-8, 15))
SPREADS = {
    "bf16": WIDE,
    "fp32": WIDE,
    "fp16": Spread((-6, 6), (-4, 2), (-4, 2), (-4, 2), (-4, 10)),
    # For a KV cache whose scales hold the magnitudes of the heads.
    "8 bits": Spread(channel=(-3, 5), row=(0, 0), column=(0, 0), head=(0, 0), value=(-3, 5)),
}
SHARE = 1 / 16
"""Share of the rows or channels that get a random power. Two more get the largest and the smallest power."""


def powers(shape: Sequence[int], reach: Range, *seed: int) -> Tensor:
    """Powers of two, float32 on the CPU: some with exponents in `reach`, most of them 1. Equal for equal seeds."""
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
