"""push_specialized: one kernel on two ranks. In every program one warp sends, one loads, eight attend (see `warp_attention`).

Waits: the loading warp waits for the flags of the keys and of the values of each chunk of tokens that its queries see, hence for
the sending warps of all programs of the peer. Sending warps never wait for a peer, and all programs are resident.

Each rank sends all its tokens, in boxes of 64 x 64. The inboxes have two slots, chosen by the parity of the epoch. A rank writes a
slot again two calls later. In the call in between it has taken keys of the peer, which were sent after the peer had finished the
call before. So every rank must see keys of the other: this excludes a causal mask over contiguous shards.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from autotax.core.config import Config
from autotax.kernels.all_gather_gemm.views import layout_of
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.copy_engine import BOX, REGISTERS, TILE
from autotax.kernels.gather_attention.warp_attention import attend_by_roles
from autotax.kernels.kernel import Kernel
from autotax.kernels.primitives import EPOCH, leave
from autotax.operators.gather_attention import GatherAttention


@gluon.jit(do_not_specialize=["rank", "batch", "q_heads", "kv_heads", "chunks"])
def push_by_roles_kernel(
    q, k, v, inbox_k, inbox_v, sent_k, sent_v, peer_k, peer_v, out, lse, counts, flags, bases, control,
    rank, tokens, batch, q_heads, kv_heads, chunks, scale,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_FIRST: gl.constexpr, CHUNK: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(control + EPOCH)
    attend_by_roles(
        q, k, v, inbox_k, inbox_v, (sent_k, sent_v, peer_k, peer_v, counts, bases), out, lse, flags, control, epoch, epoch & 1,
        rank, tokens, batch, q_heads, kv_heads, chunks, scale,
        WORLD, CAUSAL, CHUNKS, BLOCK_FIRST, CHUNK, BOXES, STAGES, BLOCK_N, HEAD_DIM, TARGET,
    )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class PushSpecialized(Kernel[GatherAttention]):
    KEEPS_LSE: ClassVar[bool] = True

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, rows = problem.world_size, problem.batch * problem.shard_len
        shape = 2 * world * rows, problem.kv_heads * problem.head_dim
        self.inboxes = [context.heap.alloc(shape, context.dtype(problem)) for _ in range(2)]
        self.chunks = rows // int(config["chunk"])
        self.flags = context.flags(2 * world * self.chunks)
        self.counts = context.empty((2 * self.chunks,), torch.int32).zero_()
        self.lse = context.empty((problem.batch, problem.q_heads, problem.shard_len), torch.float32)
        self.constants: dict[str, Any] = {
            "WORLD": world,
            "CAUSAL": problem.mask == "causal",
            "CHUNKS": problem.chunks,
            "BLOCK_FIRST": config["order"] == "block_first",
            "CHUNK": config["chunk"],
            "BOXES": config["boxes"],
            "STAGES": config["num_stages"],
            "BLOCK_N": config["block_n"],
            "HEAD_DIM": problem.head_dim,
            "num_warps": 4,
            "maxnreg": REGISTERS,
        }

    def view(self, tensor: Tensor, tokens: int, columns: int) -> TensorDescriptor:
        """TMA boxes of some tokens and columns of a matrix with a row for each token."""
        box = [tokens, columns]
        matrix = tensor.view(-1, math.prod(tensor.shape[2:])) if tensor.dim() > 2 else tensor
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.problem.dtype))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        problem, context, dim, block_n = self.problem, self.context, self.problem.head_dim, int(self.config["block_n"])
        items = problem.batch * problem.q_heads * (problem.shard_len // TILE)
        context.launch(
            push_by_roles_kernel, (min(items, context.processors),),
            self.view(q, BOX, dim), *(self.view(keys, block_n, dim) for keys in (k, v, *self.inboxes)),
            *(self.view(keys, BOX, BOX) for keys in (k, v, *(context.heap.peer(inbox, 1 - context.rank) for inbox in self.inboxes))),
            out, self.lse, self.counts, self.flags, context.heap.bases, self.control, context.rank,
            problem.shard_len, problem.batch, problem.q_heads, problem.kv_heads, self.chunks, math.log2(math.e) / math.sqrt(dim),
            **self.constants,
        )  # fmt: skip
