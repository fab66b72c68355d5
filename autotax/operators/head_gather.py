"""Head gather: every rank gets the heads of all ranks. Decoding needs it first where each rank attends with all heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from autotax.core.problem import Problem, dtype, ranks, require_countable, require_divided, size
from autotax.hardware import Hardware, links_us
from autotax.operators.declaration import Operator, Rates

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw


@dataclass(frozen=True)
class HeadGather(Problem):
    """Each rank has H = heads / world_size heads of q as [batch, H, head_dim]; rank r has heads r*H ... r*H + H - 1. Every rank
    gets an exact copy of all heads, [batch, heads, head_dim]. `batch` counts query tokens.
    """

    batch: int = size("query tokens", most=65535, varying=True)
    heads: int = size("heads of all ranks", most=4096)
    head_dim: int = size("elements of a head", most=1024)
    dtype: str = dtype()
    world_size: int = ranks()

    op: ClassVar[str] = "head-gather"

    def check(self) -> None:
        require_divided(self, "heads")
        require_countable(self)

    @property
    def nbytes(self) -> int:
        return self.batch * (self.heads + self.own_heads) * self.head_dim * self.item_size

    @cached_property
    def own_heads(self) -> int:
        """Number of heads that a rank contributes."""
        return self.heads // self.world_size

    def brief(self) -> str:
        """`B 16, 128 heads of 576`"""
        return self.with_unusual(f"B {self.batch}, {self.heads} heads of {self.head_dim}", "dtype")


operator = Operator(HeadGather)
operator.example(on_gpu=HeadGather(16, 128, 576), on_cpu=HeadGather(3, 12, 20, "fp32"))


@operator.inputs
def draw(problem: HeadGather, draw: Draw) -> Call:
    """The rank's heads of q -> all heads."""
    from autotax.operators.inputs import Call

    q = draw.normal(problem.batch, problem.own_heads, problem.head_dim, tensor=3)
    if draw.extreme:
        flat = q.view(-1)
        for place, odd in ((draw.seed, math.inf), (7 * draw.seed, math.nan), (11 * draw.seed, -0.0)):
            flat[place % len(flat)] = odd
    return Call((q,), draw.empty(problem.batch, problem.heads, problem.head_dim))


@operator.reference
def reference(problem: HeadGather, calls: Sequence[Call], rank: int) -> Tensor:  # noqa: ARG001
    """All heads, side by side."""
    import torch

    return torch.cat([call.tensors[0].float() for call in calls], dim=1)


@operator.bound(links="the links at full rate")
def bound(problem: HeadGather, hardware: Hardware, _: Rates) -> dict[str, float]:
    """The time to receive the heads of the peers."""
    peers = problem.world_size - 1
    return links_us(peers * problem.batch * problem.own_heads * problem.head_dim * problem.item_size, peers, hardware)


_KERNELS, _SPACES = "autotax.kernels.head_gather", "autotax.spaces.head_gather"

operator.variant("bsp", f"{_KERNELS}:Bsp", role="baseline")
operator.variant("push", f"{_KERNELS}:Push", f"{_SPACES}:push")
operator.variant("words", f"{_KERNELS}:Words", f"{_SPACES}:words")
