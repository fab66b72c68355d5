"""bsp: the collective library's all-gather, then a copy that puts the heads of each token side by side."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators.head_gather import HeadGather


class Bsp(Kernel[HeadGather]):
    def __init__(self, problem: HeadGather, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        shape = problem.world_size, problem.batch, problem.own_heads, problem.head_dim
        self.gathered = context.empty(shape, context.dtype(problem))

    def __call__(self, q: Tensor, out: Tensor) -> None:
        problem = self.problem
        self.context.all_gather(self.gathered, q)
        whole = out.view(problem.batch, problem.world_size, problem.own_heads, problem.head_dim)
        self.context.copy(whole, self.gathered.transpose(0, 1))

    def changes_for(self, smaller: HeadGather) -> dict[str, Any]:
        """Any number of tokens: the collective is called with the sizes of the call."""
        shape = smaller.world_size, smaller.batch, smaller.own_heads, smaller.head_dim
        flat = self.gathered.view(-1)[: smaller.batch * smaller.heads * smaller.head_dim]
        return {"gathered": flat.view(shape)}
