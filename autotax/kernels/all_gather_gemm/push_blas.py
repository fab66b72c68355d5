"""push_blas: a kernel of `comm` programs writes the own shard into every peer's inbox, the vendor's library multiplies.

Who waits for whom: see `gather`. With one product the sending kernel itself ends when all shards have arrived; otherwise it runs
beside the products, and a kernel of one program waits before each product that reads what others sent.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from autotax.config import Config
from autotax.kernels.all_gather_gemm.gather import push_gather
from autotax.kernels.all_gather_gemm.products import Products
from autotax.kernels.all_gather_gemm.tiles import element_alignment
from autotax.kernels.context import Context
from autotax.problem import AllGatherGemm, power_of_two


class PushBlas(Products):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.signals = config["comm"]
        self.beside = [] if self.whole else context.streams(1, urgent=True)

    def send(self, a: Tensor, slot: int) -> Callable[[], None]:
        for stream in self.beside:
            with self.context.beside(stream):
                self.push(a, slot)
        if not self.beside:
            self.push(a, slot)
        return lambda: self.context.rejoin(self.beside)

    def push(self, a: Tensor, slot: int) -> None:
        problem, context, comm = self.problem, self.context, self.config["comm"]
        context.launch(
            push_gather,
            (comm + self.whole,),
            a, self.inbox[slot], context.heap.bases, self.arrived, self.begun, self.control,
            context.rank, slot, problem.shard_rows, problem.shard_cols,
            WORLD=problem.world_size,
            SHARD_K=problem.shard == "k",
            WHOLE=self.whole,
            COMM=comm,
            COPY_COLS=min(1024, power_of_two(problem.shard_cols)),
            ALIGNED=element_alignment(problem),
            num_warps=4 if context.interpreted else 16,
        )  # fmt: skip
