"""push: tiles of the partial sum are stored in the inbox of the rank that owns their rows. The owner adds them up.

Waits: programs first compute and send without waiting. Then they add up pieces of this rank's rows. Each piece waits
for the flags of all ranks for its tile. With a replicated output they finally wait for the sums of the other ranks,
which depend only on tiles. So every wait ends. The last `adders` programs compute no tiles and add up from the start.
See `product` and `reduction`.
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
    # The interpreter runs programs one after another, so there only the last program does the work that waits.
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
        self.patient = context.control(patience=2)  # waits for sums last longer than waits for tiles, so tiles are reported first

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
        """Supports any number of rows: slots and flags keep the places they have for the most rows, and a flag is
        raised to the number of the call.
        """
        return {}

    def failure(self) -> str | None:
        """See Kernel.failure."""
        return super().failure() or note_of(self.patient, self.context.rank)
