"""The host side shared by the Flash Decode variants: compile-time constants, grids and the softmax scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context, threads_of
from autotax.kernels.kernel import Kernel
from autotax.operators.flash_decode import FlashDecode


@dataclass(frozen=True)
class Shapes:
    items: int
    """(sequence, KV head) pairs of the problem. With the core `by_head` an item has as many KV heads as warps."""
    kv_heads: int
    """Items per sequence."""
    rows: int
    """(sequence, query head, query token) triples of the problem."""
    arriving: int
    """Rows of which a rank computes the output. It receives the partial results of these rows from every rank."""
    scale: float
    """1 / sqrt(head_dim), times log2(e) because the kernels use exp2."""
    attend: dict[str, Any]
    """Constexprs of `attend` and the compile options of its kernel."""
    heads: int
    """Rows that one merging program handles; a divisor of the group."""
    merge: dict[str, Any]
    """Constexprs of `merge` for blocks of `heads` rows."""

    @classmethod
    def of(cls, problem: FlashDecode, config: Config, target: str) -> Shapes:
        head_dim, attend, num_warps = problem.head_dim, config["attend"], config["num_warps"]
        together = num_warps if attend == "by_head" else 1
        group = problem.group * together
        # Heads are rows of the matrix products in `by_block` and columns in `by_warp`, where NVIDIA allows fewer. `by_head`
        # returns no padding.
        least = {"by_block": 16, "by_warp": 16 if target == "hip" else 8, "by_head": 1}[attend]
        heads = config.values.get("heads", group)
        assert isinstance(heads, int)
        block_d = max(16, power_of_two(head_dim))
        attend = {
            "GROUP": group, "QUERIES": problem.queries, "HEAD_DIM": head_dim, "SPLITS": config["splits"],
            "SPLIT_FIRST": config["order"] == "split_first", "CHIPLETS": config["chiplets"],
            "BLOCK_G": max(least, power_of_two(group)), "BLOCK_D": block_d, "BLOCK_S": config["block_s"], "PAGE": problem.page,
            "WARPS": {"by_block": 0, "by_warp": num_warps, "by_head": -num_warps}[attend],
            "SHARE": problem.out_heads * problem.queries if problem.output == "head_scatter" else 0,
            "num_warps": config["num_warps"], "num_stages": config["num_stages"],
        }  # fmt: skip
        merge = {"GROUP": heads, "HEAD_DIM": head_dim, "BLOCK_G": power_of_two(heads), "BLOCK_D": block_d}
        return cls(
            items=problem.batch * problem.kv_heads // together, kv_heads=problem.kv_heads // together, rows=problem.rows,
            arriving=problem.out_rows, scale=math.log2(math.e) / math.sqrt(head_dim), attend=attend, heads=heads, merge=merge,
        )  # fmt: skip

    @property
    def scatter(self) -> bool:
        """Whether each row goes to one rank only."""
        return self.attend["SHARE"] > 0

    @property
    def part(self) -> int:
        """Float32 elements of the library's message between two ranks: results of the arriving rows, then their log-sum-exps.

        Messages are contiguous, so each must begin at a multiple of 16 bytes.
        """
        return self.arriving * self.merge["HEAD_DIM"] + (ceil_div(self.arriving, 4) * 4 if self.scatter else self.arriving)

    def bulk(self, config: Config) -> dict[str, Any]:
        """Constexprs and compile options of the bulk push."""
        head_dim = self.merge["HEAD_DIM"]
        return {"SENDERS": config["senders"], "SCATTER": self.scatter, "HEAD_DIM": head_dim, "BLOCK": 4096, "ALIGNED": math.gcd(head_dim, 4), "num_warps": 8}


class DecodeBase(Kernel[FlashDecode]):
    """Converts the tensors of a call to kernel arguments."""

    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        # Only rank 0 gets the sinks, so that each is counted once.
        elsewhere = problem.sinks == "learned" and context.rank > 0
        self.no_sinks = context.empty((problem.q_heads,), torch.float32).fill_(-math.inf) if elsewhere else None

    def inputs_of(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], Tensor]:
        """q, k, v, lengths, and block table, starts, scales and sinks or None; the output."""
        problem = self.problem
        *inputs, out = tensors
        more = iter(inputs[4:])
        features = (problem.page > 0, problem.window > 0, problem.kv_dtype != "same", problem.sinks == "learned")
        optional = [next(more) if present else None for present in features]
        if self.no_sinks is not None:
            optional[-1] = self.no_sinks
        return [*inputs[:4], *optional], out


class DecodeKernel(DecodeBase):
    """A variant whose workspaces depend on the batch, and not on the capacity for tokens."""

    def changes_for(self, smaller: FlashDecode) -> dict[str, Any] | None:
        """Fewer tokens but not fewer sequences: every call must raise all flags and, because LL tags repeat, write all words."""
        return {} if smaller.batch == self.problem.batch else None


# The host side of the exchange: the memory in which results of other ranks arrive, and the kernel constants that describe it.

ELEMENTS = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
MOST_WORDS = 32
"""Most words that a thread polls at once."""


@dataclass(frozen=True)
class Inbox:
    o: Tensor
    """[2, world, arriving, head_dim] of float32 or the payload's type, or int64 [2, world, arriving, words] with LL."""
    lse: Tensor | None
    """[2, world, arriving] float32; None with LL, whose words carry it."""
    push: dict[str, Any]
    """Constexprs of `push_result`."""
    receive: dict[str, Any]
    """Constexprs of `receive_result`."""

    @classmethod
    def of(cls, problem: FlashDecode, config: Config, context: Context, shapes: Shapes, warps: int = 4) -> Inbox:
        """Collective. `warps` is the number of warps of a receiving program."""
        world, rows, dim = problem.world_size, shapes.arriving, problem.head_dim
        words_used = config.values.get("protocol") == "ll"
        packed = config.values.get("payload") == "packed"
        element = context.dtype(problem) if packed else torch.float32
        payload = ELEMENTS[problem.dtype if packed else "fp32"]
        if words_used:
            # Zeros carry the tag of call 0. Calls start at 1, so they never match.
            o = context.heap.zeros((2, world, rows, (dim + 1) // 2 if element.itemsize == 2 else dim), torch.int64)
            lse = None
        else:
            o = context.heap.alloc((2, world, rows, dim), element)
            lse = context.heap.alloc((2, world, rows), torch.float32)
        way = {"LL": words_used, "PAYLOAD": payload}
        width = shapes.merge["BLOCK_D"] // (2 if element.itemsize == 2 else 1)
        receive = way | {"CHUNK": chunk_of(world, shapes.heads, width, threads_of(context, warps))}
        return cls(o, lse, way | {"SCATTER": shapes.scatter}, receive)


def chunk_of(pieces: int, heads: int, width: int, threads: int) -> int:
    """How many of `pieces` results `merge_words` polls together, in rows of `width` words: one to MOST_WORDS words a thread."""
    words = power_of_two(heads) * width
    return max(1, ceil_div(threads, words), min(power_of_two(pieces), MOST_WORDS * threads // words))
