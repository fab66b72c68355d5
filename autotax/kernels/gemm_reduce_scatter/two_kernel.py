"""two_kernel: the vendor's GEMM, then one kernel that sends the partial sums and adds up.

The GEMM stores in memory of this rank alone. So the second kernel chooses the slot of the inbox by the number of the call, and no
kernel has to free a slot before the GEMM. Each program of the second kernel sends its slice of every peer's rows, with a flag
after each of `parts` parts. Then it adds up the same slice of this rank's rows, in float32 and in the order of the ranks, and
waits only for the programs with its number. With a replicated output a rank sends all rows to every peer.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter.product import rounded
from autotax.kernels.gemm_reduce_scatter.reduction import Adding, addends
from autotax.kernels.gemm_reduce_scatter.scaled_sums import Scaled
from autotax.kernels.primitives import EPOCH, copy, flag_address, leave, signal, translate, wait
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

GRAIN = tl.constexpr(256)
"""Slices are multiples of this many elements."""
WARP_ELEMENTS = 1024
"""Elements that a warp moves at a time: 64 bytes a thread of 16-bit elements."""


@triton.jit(do_not_specialize=["rank", "added"])
def send_and_add(
    out, bias, residual, added, partial, box, flags, bases, control, rank, rows, m, n, room,
    WORLD: tl.constexpr, REPLICATED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """`partial` [m, n] is this rank's product, `box` [slot, source, room, n] the inbox; flags are [part, program, source]."""
    epoch = tl.load(control + EPOCH)
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    size = rows * n
    step = tl.cdiv(tl.cdiv(size, programs * PARTS), GRAIN) * GRAIN
    slots = (epoch & 1) * WORLD
    for part in tl.range(0, PARTS, num_stages=1):
        start = (part * programs + program) * step
        for hop in tl.range(1, WORLD, num_stages=1):
            owner = (rank + hop) % WORLD
            first = 0 if REPLICATED else owner * rows
            end = tl.minimum(start + step, tl.maximum(tl.minimum(rows, m - first), 0) * n)
            landing = box + tl.cast(slots + rank, tl.int64) * room * n
            copy(translate(landing, bases, rank, owner), partial + tl.cast(first, tl.int64) * n, start, end, BLOCK, ALIGNED)
            signal(flag_address(flags, (part * programs + program) * WORLD + rank, bases, rank, owner), 1, TARGET, "sys")
    first = 0 if REPLICATED else rank * rows
    own = tl.maximum(tl.minimum(rows, m - first), 0) * n
    lanes = tl.arange(0, BLOCK)
    width: tl.constexpr = ALIGNED * (box.dtype.element_ty.primitive_bitwidth // 8)
    for part in tl.range(0, PARTS, num_stages=1):
        start = (part * programs + program) * step
        for hop in tl.range(1, WORLD, num_stages=1):
            source = (rank + WORLD - hop) % WORLD
            index = (part * programs + program) * WORLD + source
            wait(flags + index, epoch, source, index, control, TARGET)
        for at in range(start, tl.minimum(start + step, size), BLOCK):
            here = tl.multiple_of(at, ALIGNED) + lanes
            inside = here < tl.minimum(start + step, own)
            total = tl.zeros([BLOCK], tl.float32)
            for source in tl.static_range(WORLD):
                # Two loads, one of which is off: AMD's compiler cannot choose between pointers.
                sent = tl.multiple_of(box + tl.cast(slots + source, tl.int64) * room * n + here, width)
                kept = tl.multiple_of(partial + tl.cast(first, tl.int64) * n + here, width)
                total += tl.load(sent, mask=inside & (source != rank), other=0.0).to(tl.float32)
                total += tl.load(kept, mask=inside & (source == rank), other=0.0).to(tl.float32)
            if added is not None:
                if REPLICATED:
                    total = rounded(total, out.dtype.element_ty, TARGET).to(tl.float32)
                total += tl.load(bias + here % n, mask=inside & (added % 2 == 1), other=0.0).to(tl.float32)
                total += tl.load(residual + here, mask=inside & (added >= 2), other=0.0).to(tl.float32)
            stored = here < tl.minimum(start + step, size)
            tl.store(tl.multiple_of(out + here, width), rounded(total, out.dtype.element_ty, TARGET), mask=stored)
    leave(control, epoch, programs, TARGET)


class TwoKernel(Adding):
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        world, n, self.room = problem.world_size, problem.n, problem.out_rows
        self.programs = config["waves"] * context.processors
        self.box = context.heap.alloc((2, world, self.room, n), context.dtype(problem))
        self.flags = context.flags(config["parts"] * self.programs * world)
        self.partial = context.empty((problem.m, n), context.dtype(problem))
        self.constants: dict[str, Any] = {
            "WORLD": world, "REPLICATED": problem.output == "replicated", "PARTS": config["parts"],
            "BLOCK": config["num_warps"] * WARP_ELEMENTS, "ALIGNED": math.gcd(n, 16), "num_warps": config["num_warps"],
        }  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        problem, context = self.problem, self.context
        context.matmul(a, b if problem.weight == "nk" else b.t(), self.partial)
        context.launch(
            send_and_add, (self.programs,),
            out, *addends(out, bias, residual), self.partial, self.box, self.flags, context.heap.bases, self.control,
            context.rank, problem.out_rows, problem.m, problem.n, self.room, **self.constants,
        )  # fmt: skip

    def changes_for(self, smaller: GemmReduceScatter) -> dict[str, Any]:
        """Supports any number of rows: slots keep their places, and every call raises every flag."""
        return {"partial": self.partial[: smaller.m]}


class ScaledTwoKernel(Scaled, TwoKernel):
    """`two_kernel` with a product of e4m3."""
