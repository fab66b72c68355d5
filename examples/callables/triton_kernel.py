"""A plain `triton.jit` kernel over symmetric memory: each rank gets its part of each rank's tensor.

Run it: python examples/callables/triton_kernel.py
docs/own-kernels.md explains epoch, slots and flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import autotax
from autotax.kernels.context import Context
from autotax.kernels.primitives import EPOCH, flag_address, leave, signal, translate, wait
from autotax.operators.inputs import Call, Draw

RANKS, PART = 2, 96


def inputs(draw: Draw) -> Call:
    return Call((draw.normal(RANKS, PART, tensor=1),), draw.empty(RANKS, PART))


def reference(calls: Sequence[Call], rank: int) -> Tensor:
    return torch.stack([call.tensors[0][rank].float() for call in calls])


def baseline(context: Context) -> Callable[..., Any]:
    return lambda x, out: context.all_to_all(out, x)


@triton.jit(do_not_specialize=["rank"])
def exchange(x, out, inbox, flags, bases, control, rank, WORLD: tl.constexpr, SIZE: tl.constexpr, TARGET: tl.constexpr):
    epoch, p, programs = tl.load(control + EPOCH), tl.program_id(0), tl.num_programs(0)
    slot = inbox + (epoch & 1) * WORLD * SIZE
    for hop in range(WORLD):
        peer = (rank + hop) % WORLD
        for first in range(p * 32, SIZE, programs * 32):
            at = first + tl.arange(0, 32)
            there = translate(slot, bases, rank, peer) + rank * SIZE + at
            tl.store(there, tl.load(x + peer * SIZE + at, mask=at < SIZE), mask=at < SIZE)
        signal(flag_address(flags, rank * programs + p, bases, rank, peer), 1, TARGET, "sys")
    for source in range(WORLD):
        wait(flags + source * programs + p, epoch, source, p, control, TARGET)
        for first in range(p * 32, SIZE, programs * 32):
            at = first + tl.arange(0, 32)
            tl.store(out + source * SIZE + at, tl.load(slot + source * SIZE + at, mask=at < SIZE), mask=at < SIZE)
    leave(control, epoch, programs, TARGET)


def make(params: Mapping[str, Any], context: Context) -> Callable[..., Any]:
    world, control = context.world.size, context.control()
    inbox = context.heap.alloc((2, world, PART), torch.float32)
    flags = context.flags(world * params["programs"])

    def call(x: Tensor, out: Tensor) -> None:
        context.launch(
            exchange, (params["programs"],), x, out, inbox, flags, context.heap.bases, control, context.rank,
            WORLD=world, SIZE=PART,
        )  # fmt: skip

    return call


def main(**settings: Any) -> autotax.Verdict:
    """Tunes on the ranks of this machine. Settings are those of `autotax.tune`."""
    return autotax.tune_callable(
        make, tunables={"programs": [2, 1]}, inputs=inputs, reference=reference, baseline=baseline, name="exchange",
        world_size=RANKS, **{"dtype": "fp32", "trials": 3} | settings,
    )  # fmt: skip


if __name__ == "__main__":
    print(main())
