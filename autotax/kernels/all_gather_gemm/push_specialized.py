"""push_specialized: `push` with warps that have roles, see `specialized`: a warp of every program sends, no program does only that.

Who waits for whom: the polling warp of a program waits for the chunks of rows of its tiles, K group by K group, and thereby for the
sending warps of all programs of a peer. Those wait for nobody but the clock. The inbox has two slots, see `push`.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.config import Config
from autotax.kernels.all_gather_gemm.by_words import NOTHING
from autotax.kernels.all_gather_gemm.specialized import gather_tiles
from autotax.kernels.context import Context
from autotax.kernels.operator import Operator
from autotax.kernels.primitives import EPOCH, leave
from autotax.problem import AllGatherGemm, ceil_div
from autotax.spaces.sides import BLOCK_K, GROUP_ROWS, MOST_RANKS, parts_of, sides, x_is_a_block_of_b

T = TypeVar("T")

MOST_REGISTERS = {1: 168, 2: 168, 3: 128}
"""Registers a thread at the launch, by groups that multiply: what a processor has, over all warps. They are dealt out anew then."""
GLUON_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
MOST_PARTS, MOST_PEERS = 3, MOST_RANKS - 1


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
        (a, stride, shard, landing, words, landings, room, received, control),
        counts, bases, flags, control, rank, epoch, rows, cols, n, chunks,
        WORLD, CHUNK, BY_WORDS, K_GROUPS, BOXES, PACE, INTERLEAVED, GROUP_M, ACROSS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0))


class PushSpecialized(Operator[AllGatherGemm]):
    rows: int
    inbox: Tensor
    landed: TensorDescriptor
    peers: list[TensorDescriptor | None]

    def __init__(self, problem: AllGatherGemm, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
        x_is_b = x_is_a_block_of_b(config["block_m"], config["block_n"])
        x, y = sides(config["block_m"], config["block_n"])
        parts = parts_of(y)
        box_x, boxes_y = [GROUP_ROWS, BLOCK_K], [[part, BLOCK_K] for part in parts]
        self.box_a, self.boxes_b = (boxes_y[0], [box_x]) if x_is_b else (box_x, boxes_y)
        self.boxes_out = [[1, part, GROUP_ROWS] if x_is_b else [1, GROUP_ROWS, part] for part in parts]
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
            "X_IS_B": x_is_b,
            "GROUPS": x // GROUP_ROWS,
            **{f"Y{number}": part for number, part in enumerate(padded(parts, MOST_PARTS, 0), 1)},
            "STAGES": config["num_stages"],
            "num_warps": 4,
            "maxnreg": MOST_REGISTERS[x // GROUP_ROWS],
        }

    def landing(self, inbox: Tensor, rows: int) -> dict[str, Any]:
        """What calls of `rows` rows a rank have of their own: where shards land, `inbox` [2 * world size * rows, cols], and views of it."""
        context, world = self.context, self.problem.world_size
        inboxes = [context.heap.peer(inbox, (context.rank + hop) % world) for hop in range(1, world)]
        peers = padded([self.view(peer, self.box_sent) for peer in inboxes], MOST_PEERS, None)
        return {"inbox": inbox, "rows": rows, "landed": self.view(inbox, self.box_a), "peers": peers}

    def view(self, matrix: Tensor, box: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.problem.dtype))

    def views(self, matrix: Tensor, boxes: list[list[int]]) -> list[TensorDescriptor | None]:
        return padded([self.view(matrix, box) for box in boxes], MOST_PARTS, None)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem, context = self.problem, self.context
        context.launch(
            push_specialized_kernel,
            (context.processors,),
            self.view(a, self.box_a), self.landed, *self.views(b, self.boxes_b),
            *self.views(out.view(problem.world_size, problem.shard_rows, problem.n), self.boxes_out),
            self.view(a, self.box_sent), *self.peers,
            a, a.stride(0), len(a), self.inbox, self.words, self.landings, self.room, self.received,
            self.counts, context.heap.bases, self.flags, self.control, context.rank, self.rows, problem.shard_cols,
            problem.n, self.chunks,
            **self.constants,
        )  # fmt: skip


@functools.cache
def layout_of(block: tuple[int, ...], dtype: str) -> gl.NVMMASharedLayout:
    """Of a block in shared memory. Kept: eager calls ask for several each time."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])


def padded(items: list[T], length: int, missing: T) -> list[T]:
    """As long as the kernel's arguments of a kind: a launch takes no descriptors in a tuple."""
    return items + [missing] * (length - len(items))
