"""The host side of the exchange: the memory in which results of other ranks arrive, and what kernels must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.shapes import Shapes
from autotax.kernels.residency import threads_of
from autotax.operators.flash_decode import FlashDecode

ELEMENTS = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
MOST_WORDS = 32
"""Words that a thread polls at once."""


@dataclass(frozen=True)
class Inbox:
    o: Tensor
    """[2, world, arriving, head_dim] of float32 or the payload's type, or int64 [2, world, arriving, words] with LL."""
    lse: Tensor | None
    """[2, world, arriving] float32; None with LL, whose words bring it."""
    push: dict[str, Any]
    """Constexprs of `push_result`."""
    receive: dict[str, Any]
    """Constexprs of `receive_result`."""

    @classmethod
    def of(cls, problem: FlashDecode, config: Config, context: Context, shapes: Shapes, warps: int = 4) -> Inbox:
        """Collective. `warps` has the program that receives."""
        world, rows, dim = problem.world_size, shapes.arriving, problem.head_dim
        words_used = config.values.get("protocol") == "ll"
        packed = config.values.get("payload") == "packed"
        element = context.dtype(problem) if packed else torch.float32
        payload = ELEMENTS[problem.dtype if packed else "fp32"]
        if words_used:
            # Zeros are words of call 0, which is none.
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
    """How many of `pieces` partial results `merge_words` polls at a time, in rows of `width` words; a power of two.

    So many that a program has no more `threads` than words (see `ll_packets`), and no thread more than MOST_WORDS.
    """
    words = power_of_two(heads) * width
    return max(1, ceil_div(threads, words), min(power_of_two(pieces), MOST_WORDS * threads // words))
