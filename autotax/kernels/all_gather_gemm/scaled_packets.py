"""scaled_packets: `push_packets` for e4m3. Bytes and scales of a shard travel as words that carry the number of their call.

Between sending and receiving, `warm` MiB of B are loaded into the L2: nothing else uses the memory while words are under way.
`push_packets` says why every wait ends and no word is mistaken for one of another call. With `per_processor` 2 two programs share a
processor; the space allows that only where both fit, so that all are resident. The scales have boxes of their own, behind
those of the bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.push_gather import warm
from autotax.kernels.all_gather_gemm.push_packets import PATIENCE, WORD_BYTES, receive_packets, send_packets
from autotax.kernels.all_gather_gemm.scaled_gather import codes_of
from autotax.kernels.all_gather_gemm.scaled_shards import Scaled
from autotax.kernels.context import Context, note_of
from autotax.kernels.primitives import EPOCH, leave, signal, wait
from autotax.kernels.scaled_product import Tile, scaled_item
from autotax.operators.all_gather_gemm import AllGatherGemm

PIECE = 1024
"""Words that are polled together: at least one per thread, since Triton may load a smaller tile twice."""
WARM_ROWS, WARM_WORDS = tl.constexpr(8), tl.constexpr(1024)


@triton.jit(do_not_specialize=["rank"])
def scaled_packets_kernel(
    a, of_a, dense, dense_scales, words, scale_words, view, scales_a, stride_m, stride_g, b, b_words, scales_b, out, partials, finished,
    bases, received, control, patient, rank, m, n, k, items, rows, width, groups, room, scale_room, warm_words,
    WORLD: tl.constexpr, PIECE: tl.constexpr, SCALES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, ALIGNED: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`a` and `of_a` are this rank's bytes and scales as int32, `dense` and `dense_scales` those of all ranks. `view` and `scales_a`
    are the latter as the product reads them. `width` are words of a row, `groups` scales of a row that travel.
    """
    epoch = tl.load(control + EPOCH)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    send_packets(a, dense, words, bases, epoch, rank, rows * width, width, room, WORLD, False, PIECE, TARGET)
    if groups > 0:
        send_packets(
            of_a, dense_scales, scale_words, bases, epoch, rank, rows * groups, rows, scale_room, WORLD, True, PIECE, TARGET
        )
    if warm_words > 0:
        warm(b_words, n, warm_words, k // 4, program, programs, WARM_ROWS, WARM_WORDS)
    # The interpreter runs programs one after another, so there only the last program does the work that waits.
    last = program == programs - 1
    first = 0 if TARGET == "interpreter" else program
    step = 1 if TARGET == "interpreter" else programs
    if (TARGET != "interpreter") | last:
        receive_packets(dense, words, control, epoch, rank, rows * width, width, room, first, step, WORLD, False, PIECE, TARGET)
        if groups > 0:
            receive_packets(
                dense_scales, scale_words, control, epoch, rank, rows * groups, rows, scale_room, first, step, WORLD, True, PIECE, TARGET
            )
    signal(received, 1, TARGET, "gpu")  # only this rank reads the copy of A
    if (TARGET != "interpreter") | last:
        wait(received, epoch * programs, rank, 0, patient, TARGET)
        for item in tl.range(first, items, step):
            scaled_item(
                item, view, scales_a, stride_m, stride_g, b, scales_b, out, partials, finished, m, n, k,
                SCALES, SPLITS, BLOCK_M, BLOCK_N, TMA, ALIGNED, TARGET,
            )  # fmt: skip
    leave(control, epoch, programs, TARGET)


class ScaledPackets(Scaled):
    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world = problem.world_size
        self.tile = Tile(config, context)
        # Rounded up to 16 words: every box begins at a multiple of 128 bytes. Zeros are words of call 0, which does not exist.
        self.room, self.scale_room = (
            ceil_div(max(1, size), 16) * 16 for size in (self.rows * problem.k // WORD_BYTES, self.rows * self.groups)
        )
        self.words = context.heap.zeros((2, world, self.room), torch.int64)
        self.scale_words = context.heap.zeros((2, world, self.scale_room), torch.int64)
        self.received = context.flags(1)
        self.patient = context.control(patience=PATIENCE)
        self.whole = context.empty((world * self.rows, problem.k), codes_of(problem))
        self.scales = context.empty((max(1, self.groups) * world * self.rows,), torch.float32)
        self.partials, self.finished = self.tile.parts(problem.m, problem.n, context)
        words = min(problem.k // WORD_BYTES, config["warm"] * 2**20 // (problem.n * WORD_BYTES))
        self.warm_words = words // WARM_WORDS.value * WARM_WORDS.value

    def run(self, a: Tensor, scales_a: Tensor | None, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        problem, context, tile, world = self.problem, self.context, self.tile, self.problem.world_size
        codes, scales = self.quantised(a, scales_a)
        ordered = self.scales[: max(1, self.groups) * world * self.rows].view(-1, world * self.rows)
        of_all = self.whole_scales(ordered[:, : problem.m], scales)
        strides = of_all.stride() if of_all.dim() == 2 else (0, 0)
        context.launch(
            scaled_packets_kernel,
            (context.processors * self.config["per_processor"],),
            codes.view(-1).view(torch.int32), scales.t().view(torch.int32) if self.groups else self.scales.view(torch.int32),
            self.whole.view(-1).view(torch.int32), self.scales.view(torch.int32), self.words, self.scale_words,
            tile.view(self.whole[: problem.m], tile.rows), of_all, *strides, tile.view(b, tile.columns), b.view(torch.int32), scales_b, out,
            self.partials, self.finished, context.heap.bases, self.received, self.control, self.patient,
            context.rank, problem.m, problem.n, problem.k, tile.items(problem.m, problem.n), self.rows, problem.k // WORD_BYTES, self.groups,
            self.room, self.scale_room, self.warm_words,
            WORLD=world, PIECE=PIECE, **tile.constants(problem),
        )  # fmt: skip

    def gathered_codes(self, a: Tensor, scales_a: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """A [m, k] and its scales as the last call has gathered them, in workspaces."""
        ordered = self.scales[: max(1, self.groups) * self.problem.world_size * self.rows].view(max(1, self.groups), -1)
        return self.whole[: self.problem.m], self.whole_scales(ordered[:, : self.problem.m], scales_a)

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any]:
        """Supports any number of rows: boxes keep the places they have for the most rows, and a word carries the number of its call."""
        return {"rows": smaller.shard_rows, "whole": self.whole[: smaller.world_size * smaller.shard_rows]}

    def failure(self) -> str | None:
        """See Kernel.failure."""
        return super().failure() or note_of(self.patient, self.context.rank)
