"""push: tiles of the partial sum are stored in the inbox of the rank that owns their rows, which adds them up.

Who waits for whom: programs compute and send first, and wait for nobody meanwhile. Then they add up pieces of the own rows, each
behind the flags of all ranks for its tile. With a replicated output they wait at last for the sums of the other ranks, which
these make without waiting for anything but tiles. So every wait ends. The last `adders` programs compute nothing and add up from
the start. See `product` and `reduction`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context, note_of
from autotax.kernels.gemm_reduce_scatter.addends import Adding, addends
from autotax.kernels.gemm_reduce_scatter.product import multiply_and_send
from autotax.kernels.gemm_reduce_scatter.reduction import add_up, receive_sums
from autotax.kernels.gemm_reduce_scatter.workspace import Workspace
from autotax.kernels.primitives import EPOCH, leave
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter


@triton.jit(do_not_specialize=["rank", "added"])
def push_kernel(
    a, b, out, bias, residual, added, box, sums, partials, finished, counts, told, sum_counts, sum_told, flags, sum_flags, bases, control, patient,
    rank, m, n, k, rows, room,
    WORLD: tl.constexpr, REPLICATED: tl.constexpr, PULL: tl.constexpr, KN: tl.constexpr, INTERLEAVED: tl.constexpr, ADDERS: tl.constexpr,
    LATE: tl.constexpr, FLAT: tl.constexpr, TILES: tl.constexpr, GROUP_M: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_N: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    workers = programs - ADDERS
    if program < workers:
        multiply_and_send(
            a, b, box, partials, finished, counts, told, flags, bases, rank, epoch, program, workers, m, n, k, rows, room,
            WORLD, PULL, KN, INTERLEAVED, LATE, FLAT, TILES, GROUP_M, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED_K, ALIGNED_N, TARGET,
        )  # fmt: skip
    # The interpreter runs programs one after another: there all that waits is left to the last one.
    if (TARGET != "interpreter") | (program == programs - 1):
        add_up(
            out, bias, residual, added, box, sums, sum_counts, sum_told, flags, sum_flags, bases, control, rank, epoch, m, n, rows, room,
            WORLD, PULL, REPLICATED, TILES, GROUP_M, BLOCK_M, BLOCK_N, ROWS, COLS, ALIGNED_N, TARGET,
        )  # fmt: skip
        if REPLICATED:
            first = 0 if TARGET == "interpreter" else program
            step = 1 if TARGET == "interpreter" else programs
            receive_sums(
                out, bias, residual, added, sums, sum_flags, patient, rank, epoch, epoch & 1, first, step, m, n, rows, room,
                WORLD, BLOCK_M, ROWS, COLS, ALIGNED_N, TARGET,
            )  # fmt: skip
    leave(control, epoch, programs, TARGET)


class Push(Adding):
    PULL = False

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.workspace = Workspace(problem, config, context)
        self.patient = context.control(patience=2)  # of those who wait for sums, which take a rank's tiles: these are named first

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context, workspace = self.problem, self.context, self.workspace
        context.launch(
            push_kernel,
            (context.processors,),
            workspace.tiles.view_a(a), workspace.view_of_b(b), out, *addends(out, bias, residual), *workspace.tensors(),
            context.heap.bases, self.control, self.patient, context.rank, problem.m, problem.n, problem.k, problem.shard_rows, workspace.room,
            PULL=self.PULL,
            **workspace.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Slots and flags stay where they are for the most rows, and a flag is raised to the number of the call: any rows."""
        return {}

    def failure(self) -> str | None:
        """See Kernel.failure."""
        return super().failure() or note_of(self.patient, self.context.rank)
