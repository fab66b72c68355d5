"""push and pull_reduce: tiles of the partial sum are stored in an inbox or an outbox, and the owner of their rows adds them up.

Programs first compute and send, then add up pieces of this rank's rows, and last receive the sums of other ranks if the output is
replicated. The last `adders` programs compute no tiles and add up from the start. See `product` and `reduction`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.gemm import TileOptions
from autotax.kernels.context import Context, note_of
from autotax.kernels.gemm_reduce_scatter.product import multiply_and_send
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, add_up, addends, receive_sums
from autotax.kernels.primitives import EPOCH, leave
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

PIECE_ELEMENTS = 4096
"""Elements of a piece that a program adds up at a time."""
SUM_COLUMNS = 256


class Workspace:
    """The memory and constants of the kernels for a problem, or for one with fewer rows. Construction is collective."""

    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.tiles = TileOptions.of(config)
        world, self.room = problem.world_size, problem.shard_rows
        tiles, replicated = self.tiles, problem.output == "replicated"
        dtype = context.dtype(problem)
        wire = torch.float32 if config["payload"] == "fp32" else dtype
        blocks = ceil_div(self.room, tiles.block_m)
        count = world * blocks * ceil_div(ceil_div(problem.n, tiles.block_n), config["flag_tiles"])
        self.box = context.heap.alloc((2, world, self.room, problem.n), wire)
        self.sums = context.heap.alloc((2, world, self.room, problem.n) if replicated else (8,), dtype)
        self.flags, self.sum_flags = context.flags(count), context.flags(world * blocks)
        self.counts, self.raised = (context.empty((count,), torch.int32).zero_() for _ in range(2))
        self.sum_counts, self.sum_raised = (context.empty((blocks,), torch.int32).zero_() for _ in range(2))
        splits = config["splits"]
        cut = 0 if splits == 1 else context.processors - 1
        self.partials = context.empty((max(1, cut * splits), tiles.block_m, tiles.block_n), torch.float32)
        self.finished = context.empty((max(1, cut),), torch.int32).zero_()
        cols = min(tiles.block_n, SUM_COLUMNS)
        self.constants: dict[str, Any] = {
            "WORLD": world, "REPLICATED": replicated, "KN": problem.weight == "kn", "ADDERS": config["adders"],
            "LATE": config["signals"] == "late", "FLAT": config["flat"] == 1, "TILES": config["flag_tiles"],
            "ROWS": min(tiles.block_m, PIECE_ELEMENTS // cols), "COLS": cols,
            "ALIGNED_K": math.gcd(problem.k, 16), "ALIGNED_N": math.gcd(problem.n, 16), **tiles.constants,
        }  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """The arguments of a kernel, in the order of `push_kernel`."""
        return [
            self.box, self.sums, self.partials, self.finished, self.counts, self.raised, self.sum_counts, self.sum_raised,
            self.flags, self.sum_flags,
        ]  # fmt: skip

    def view_of_b(self, b: Tensor) -> Any:
        """The argument of `load_tile` for blocks of B: a TMA descriptor, or the tensor itself."""
        if not self.constants["KN"]:
            return self.tiles.view_b(b)
        return TensorDescriptor.from_tensor(b, [self.tiles.block_k, self.tiles.block_n]) if self.tiles.tma else b


@triton.jit(do_not_specialize=["rank", "added"])
def push_kernel(
    a, b, out, bias, residual, added, box, sums, partials, finished, counts, raised, sum_counts, sum_raised, flags, sum_flags, bases, control, patient,
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
            a, b, box, partials, finished, counts, raised, flags, bases, rank, epoch, program, workers, m, n, k, rows, room,
            WORLD, PULL, KN, INTERLEAVED, LATE, FLAT, TILES, GROUP_M, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K, TMA, ALIGNED_K, ALIGNED_N, TARGET,
        )  # fmt: skip
    # The interpreter runs programs one after another, so there only the last program does the work that waits.
    if (TARGET != "interpreter") | (program == programs - 1):
        add_up(
            out, bias, residual, added, box, sums, sum_counts, sum_raised, flags, sum_flags, bases, control, rank, epoch, m, n, rows, room,
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
            push_kernel, (context.processors,),
            workspace.tiles.view_a(a), workspace.view_of_b(b), out, *addends(out, bias, residual), *workspace.tensors(),
            context.heap.bases, self.control, self.patient, context.rank, problem.m, problem.n, problem.k, problem.shard_rows, workspace.room,
            PULL=self.PULL, **workspace.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:  # noqa: ARG002
        """Supports any number of rows: slots and flags keep their places, and a flag is raised to the number of the call."""
        return {}

    def failure(self) -> str | None:
        return super().failure() or note_of(self.patient, self.context.rank)


class PullReduce(Push):
    """Like `Push`, but a tile stays in an outbox of the rank that computed it, and its owner reads it from there.

    Stores and releases are then local and fast. Reading across links takes more programs than writing; `adders` provides them.
    """

    PULL = True
