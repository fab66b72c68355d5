"""push_specialized: like `push`, but warp-specialized (see `warp_gemm`). One warp of every program sends; no program
only sends.

Waits: the polling warp of a program waits for the chunks of rows of its tiles, K group by K group. Thereby it waits
for the sending warps of all programs of a peer. Sending warps wait only for the clock that paces them. The inbox has
two slots, see `push`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.kernels.all_gather_gemm.by_words import NOTHING
from autotax.kernels.all_gather_gemm.views import Views, padded
from autotax.kernels.all_gather_gemm.warp_gemm import gather_tiles
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel, around_the_border
from autotax.kernels.primitives import EPOCH, leave
from autotax.kernels.tiling import BLOCK_K, GROUP_ROWS, MOST_RANKS
from autotax.operators.all_gather_gemm import AllGatherGemm

MOST_REGISTERS = {1: 168, 2: 168, 3: 128}
"""Registers per thread at the launch, by the number of multiplying groups. It is all that a processor has, divided
over all warps. The kernel then redistributes them among the warps.
"""
MOST_PEERS = MOST_RANKS - 1


@gluon.jit(do_not_specialize=["rank", "shard"])
def push_specialized_kernel(
    own, inbox, b1, b2, b3, out1, out2, out3, sent, peer1, peer2, peer3, peer4, peer5, peer6, peer7,
    a, stride, shard, landing, words, landings, room, received, counts, bases, flags, control, rank, rows, cols, n, chunks,
    WORLD: gl.constexpr, CHUNK: gl.constexpr, BY_WORDS: gl.constexpr, K_GROUPS: gl.constexpr, BOXES: gl.constexpr, PACE: gl.constexpr, INTERLEAVED: gl.constexpr,
    GROUP_M: gl.constexpr, ACROSS: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
    TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    gather_tiles(
        own, inbox, (b1, b2, b3), (out1, out2, out3), sent, (peer1, peer2, peer3, peer4, peer5, peer6, peer7),
        (a, stride, shard, landing + gl.cast((epoch & 1) * WORLD * rows, gl.int64) * cols, words, landings, room, received, control),
        counts, bases, flags, control, rank, epoch, rows, cols, n, chunks,
        WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushSpecialized(Kernel[AllGatherGemm]):
    rows: int
    inbox: Tensor
    landed: TensorDescriptor
    peers: list[TensorDescriptor | None]

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        self.views = Views(config, problem.dtype)
        self.box_sent = [GROUP_ROWS, BLOCK_K]
        self.chunks = ceil_div(rows, config["chunk_rows"])
        self.flags = context.flags(world * self.chunks * config["k_groups"])
        self.counts = context.empty((self.chunks * config["k_groups"],), torch.int32).zero_()
        columns = config["by_words"]
        self.room = rows * columns // 8
        self.words = context.heap.alloc((2 * world * max(self.room, 1), 2), torch.int64).fill_(NOTHING)
        self.received = context.empty((1,), torch.int32).zero_()
        places = [context.heap.peer(self.words, (context.rank + hop) % world).data_ptr() for hop in range(1, world)]
        self.landings = torch.tensor(places or [0], dtype=torch.int64, device=self.words.device)
        vars(self).update(self.landing(context.heap.alloc((2 * world * rows, cols), context.dtype(problem)), rows))
        self.constants = {
            "WORLD": world,
            "CHUNK": config["chunk_rows"],
            "BY_WORDS": columns,
            "K_GROUPS": config["k_groups"],
            "BOXES": config["boxes"],
            "PACE": config["pace"],
            "INTERLEAVED": config["order"] == "interleaved",
            "GROUP_M": config["group_m"],
            "ACROSS": rows % config["block_m"] != 0,
            **self.views.constants,
            "maxnreg": MOST_REGISTERS[self.views.groups],
        }

    def landing(self, inbox: Tensor, rows: int) -> dict[str, Any]:
        """Returns the attributes that depend on `rows` rows per rank: the inbox [2 * world size * rows, cols], where
        shards arrive, and its views.
        """
        context, world = self.context, self.problem.world_size
        inboxes = [context.heap.peer(inbox, (context.rank + hop) % world) for hop in range(1, world)]
        peers = padded([self.views.of(peer, self.box_sent) for peer in inboxes], MOST_PEERS, None)
        return {"inbox": inbox, "rows": rows, "landed": self.views.of_a(inbox), "peers": peers}

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context = self.problem, self.context
        context.launch(
            push_specialized_kernel,
            (context.processors,),
            self.views.of_a(a), self.landed, *self.views.of_b(b),
            *self.views.of_out(out.view(problem.world_size, problem.shard_rows, problem.n)),
            self.views.of(a, self.box_sent), *self.peers,
            a, a.stride(0), len(a), self.inbox, self.words, self.landings, self.room, self.received,
            self.counts, context.heap.bases, self.flags, self.control, context.rank, self.rows, problem.shard_cols,
            problem.n, self.chunks,
            **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: AllGatherGemm) -> dict[str, Any] | None:
        """Supports any number of rows: flags hold the epoch, and each flag belongs to one source for any number of
        rows. Boxes have 64 rows; rows that a shard lacks are zeros whose results are not stored.
        """
        world, cols, block = smaller.world_size, smaller.shard_cols, self.config["block_m"]
        rows = ceil_div(smaller.shard_rows, GROUP_ROWS) * GROUP_ROWS
        if (rows if self.constants["X_IS_B"] else world * rows) % block:
            return None
        inbox = around_the_border(self.inbox, world * rows * cols)
        if inbox is None:
            return None
        # ACROSS wherever it is allowed, so that one kernel serves all numbers of rows.
        constants = self.constants | {"ACROSS": not self.constants["X_IS_B"] and block > GROUP_ROWS}
        return self.landing(inbox.view(2 * world * rows, cols), rows) | {"constants": constants}
