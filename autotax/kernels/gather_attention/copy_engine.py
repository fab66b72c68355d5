"""copy_engine: the copy engines send K and V to the other ranks; one kernel attends to keys as they arrive, by warps with roles.

The loading warp of a program waits for the flag of each other rank whose keys its queries see (see `copies` and `warp_attention`). No
program waits for another program of its kernel, so the grid may be of any size. A rank that sees no keys of another does not
wait for it here; `open_slot` of a later call does. For Hopper, for sequences whose chunks are whole blocks.
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
from autotax.kernels.gather_attention.copies import CopiedKeys
from autotax.kernels.gather_attention.warp_attention import attend_by_roles
from autotax.operators.gather_attention import GatherAttention

REGISTERS = 168
"""Registers per thread at the launch: all of a processor's, over twelve warps. The kernel then redistributes them."""
TILE, BOX = 128, 64
"""Queries of a tile, and of a group of warps."""


ALL = gl.constexpr(1 << 30)
"""Rows that share a flag: all of a source's."""


@gluon.jit(do_not_specialize=["rank", "slot", "batch", "q_heads", "kv_heads"])
def attend_kernel(
    q, k, v, inbox, out, lse, flags, ticket, control, slot, rank, tokens, batch, q_heads, kv_heads, scale,
    WORLD: gl.constexpr, CAUSAL: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_FIRST: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    epoch = gl.load(ticket)
    attend_by_roles(
        q, k, v, inbox, inbox, None, out, lse, flags, control, epoch, slot, rank, tokens, batch, q_heads, kv_heads, 1, scale,
        WORLD, CAUSAL, CHUNKS, BLOCK_FIRST, ALL, 0, STAGES, BLOCK_N, HEAD_DIM, TARGET,
    )  # fmt: skip


class CopyEngine(CopiedKeys):
    KEEPS_LSE: ClassVar[bool] = True

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.lse = context.empty((problem.batch, problem.q_heads, problem.shard_len), torch.float32)
        self.constants: dict[str, Any] = {
            "WORLD": problem.world_size,
            "CAUSAL": problem.mask == "causal",
            "CHUNKS": problem.chunks,
            "BLOCK_FIRST": config["order"] == "block_first",
            "STAGES": config["num_stages"],
            "BLOCK_N": config["block_n"],
            "HEAD_DIM": problem.head_dim,
            "num_warps": 4,
            "maxnreg": REGISTERS,
        }

    def view(self, tensor: Tensor, tokens: int) -> TensorDescriptor:
        """TMA boxes of some tokens of one head."""
        box = [tokens, self.problem.head_dim]
        matrix = tensor.view(-1, math.prod(tensor.shape[-2:]))
        return TensorDescriptor.from_tensor(matrix, box, layout_of(tuple(box), self.problem.dtype))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        problem, context, block_n = self.problem, self.context, int(self.config["block_n"])
        slot = self.send_all(k, v)
        items = problem.batch * problem.q_heads * (problem.shard_len // TILE)
        context.launch(
            attend_kernel, (items if self.config["grid"] == "tiles" else min(items, context.processors),),
            self.view(q, BOX), self.view(k, block_n), self.view(v, block_n), self.view(self.inbox, block_n),
            out, self.lse, self.arrived, self.ticket, self.control, slot, context.rank,
            problem.shard_len, problem.batch, problem.q_heads, problem.kv_heads, math.log2(math.e) / math.sqrt(problem.head_dim),
            **self.constants,
        )  # fmt: skip
        context.rejoin(self.beside)

    def changes_for(self, smaller: GatherAttention) -> dict[str, Any] | None:
        """Any number of sequences, and of tokens where chunks are whole tiles."""
        changed = super().changes_for(smaller)
        if changed is None or smaller.chunk_len % TILE:
            return None
        shape = smaller.batch, smaller.q_heads, smaller.shard_len
        return changed | {"lse": self.lse.view(-1)[: math.prod(shape)].view(shape)}
