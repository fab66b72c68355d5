"""C = gather(A) @ B.T as a few products by the vendor's library, each as soon as the shards it reads have arrived.

How many is a balance: few are large and fast, many begin early. `products` is one of
- `one`: everything at once, when A is complete;
- `two`: the own shard first, then what lies below and above its rows (on the first and last rank these are one);
- `each`: shard by shard, as they arrive.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from autotax.config import Config
from autotax.kernels.all_gather_gemm.gather import await_shards
from autotax.kernels.context import Context
from autotax.kernels.operator import Operator
from autotax.problem import AllGatherGemm
from autotax.spaces.order import later_products


class Products(Operator[AllGatherGemm]):
    """What the variants with the vendor's products share: an inbox of two slots, and the products. They differ in who sends."""

    signals = 1
    """Signals that a shard is worth."""

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.inbox = context.heap.alloc((2, world * rows, cols), context.dtype(problem))
        self.arrived = context.flags(world)
        self.begun = context.flags(world)
        self.whole = config["products"] == "one"
        self.later = [] if self.whole else later_products(context.rank, world, config["products"] == "each")
        self.calls = 0

    @abstractmethod
    def send(self, a: Tensor, slot: int) -> Callable[[], None]:
        """Enqueues the sending of the own shard; what is returned makes the current stream wait until it has been sent."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        slot = self.calls % 2
        self.calls += not self.context.dry
        rejoin = self.send(a, slot)
        if self.whole:
            rejoin()
            shape = (self.problem.m, self.problem.k) if self.problem.shard == "k" else (-1, self.problem.k)
            self.context.matmul(self.inbox[slot].view(shape)[: self.problem.m], b, out)
            return
        rows = self.problem.shard_rows
        self.multiply(a, self.context.rank * rows, b, out)
        for index, (hops, sources) in enumerate(self.later):
            self.await_shards(*hops, last=index == len(self.later) - 1)
            self.multiply(self.inbox[slot, sources[0] * rows : sources[1] * rows], sources[0] * rows, b, out)
        rejoin()

    def multiply(self, a: Tensor, row: int, b: Tensor, out: Tensor) -> None:
        """The rows of C from `row` on that some rows of A make; rows beyond m are padding."""
        rows = min(len(a), self.problem.m - row)
        if rows > 0:
            self.context.matmul(a[:rows], b, out[row : row + rows])

    def await_shards(self, first: int, end: int, *, last: bool) -> None:
        context, world = self.context, self.problem.world_size
        context.launch(
            await_shards, (1,), self.arrived, self.control, context.rank, first, end, self.signals,
            LAST=last, WORLD=world, num_warps=1,
        )  # fmt: skip
