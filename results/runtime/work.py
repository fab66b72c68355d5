"""What a rank does: both editions of the stack, each scenario captured, compared and timed."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from stack import Cache, Sizes, Stack, Weights, draw_cache, nccl_stack, tuned_stack
from torch import Tensor

from autotax.config import Config
from autotax.heap import World
from autotax.nn import AllGatherLinear

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_CALLS = 3
HEAD_START_CYCLES = 2_000_000


@dataclass(frozen=True)
class Plan:
    """What the ranks are to do. `bsp` is the baseline's config for each decode batch; `prefill` the tokens of each sequence."""

    sizes: Sizes
    dtype: str
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    db: str | None
    halves: bool
    bsp: dict[int, Config]
    rounds: int

    @property
    def gathered(self) -> list[int]:
        """The rows that AllGatherLinear gathers to, each once."""
        return sorted({*self.prefill, *(batch for batch in self.decode if self.sizes.spread(batch))})


class Runnable:
    """A call that is captured in a graph on GPUs; `out` is what it makes."""

    def __init__(self, call: Callable[[], Tensor], on_gpu: bool) -> None:
        self._call = call
        for _ in range(WARM_CALLS if on_gpu else 1):
            self.out = call()
        self._graph: torch.cuda.CUDAGraph | None = None
        if on_gpu:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.out = call()

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.out = self._call()


def work(world: World, plan: Plan) -> dict[str, Any]:
    """One rank: both stacks, each scenario verified and timed."""
    sizes, dtype = plan.sizes, DTYPES[plan.dtype]
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        weights = [Weights.draw(sizes, world, dtype, seed) for seed in range(sizes.layers)]
        ours = tuned_stack(sizes, world, weights, plan.gathered, plan.decode, plan.db, plan.halves)
        theirs = nccl_stack(sizes, world, weights, plan.gathered, plan.bsp)
        told = []
        for tokens in plan.prefill:
            told.append({"name": f"prefill, {tokens} tokens"} | scenario(world, plan, tokens, ours.prefill, theirs.prefill))
        for batch in plan.decode:
            caches = [draw_cache(sizes, world, batch, dtype, seed) for seed in range(sizes.layers)]
            run = [decoding(stack, caches) for stack in (ours, theirs)]
            told.append({"name": f"decode, batch {batch}, KV {sizes.kv_len}"} | scenario(world, plan, batch, *run))
    failures = [failure for module in ours.modules() if hasattr(module, "failure") and (failure := module.failure())]
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return {"scenarios": told, "taken": taken(ours), "warnings": notes, "failures": failures}


def decoding(stack: Stack, caches: Sequence[Cache]) -> Callable[[Tensor], Tensor]:
    return lambda x: stack.decode(x, caches)


def scenario(
    world: World, plan: Plan, rows: int, ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Errors of all checks, and the samples of this rank in microseconds, ours and theirs in turn."""
    on_gpu, spread = world.device.type == "cuda", plan.sizes.spread(rows)
    x = draw(world, plan, rows, 0)
    both = [Runnable(lambda: ours(x), on_gpu), Runnable(lambda: theirs(x), on_gpu)]
    before = [check(world, plan, x, both, rows, seed) for seed in (1, 2)]
    samples: list[list[float]] = [[], []]
    for number in range(plan.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            samples[which].append(timed(world, both[which]))
    after = check(world, plan, x, both, rows, 3)
    return {"rows": rows, "spread": spread, "errors": [*before, after], "samples": samples}


def draw(world: World, plan: Plan, rows: int, seed: int) -> Tensor:
    """The residual stream: this rank's rows of it, or all rows, the same on all ranks."""
    spread = plan.sizes.spread(rows)
    generator = torch.Generator(world.device).manual_seed(100 * seed + (world.rank if spread else 99))
    own = rows // plan.sizes.world_size if spread else rows
    drawn = torch.randn(own, plan.sizes.hidden, generator=generator, device=world.device, dtype=torch.float32)
    return drawn.to(DTYPES[plan.dtype])


def check(world: World, plan: Plan, x: Tensor, both: Sequence[Runnable], rows: int, seed: int) -> float:
    """The relative difference of the outputs for another input; infinite if one is not finite. Collective."""
    x.copy_(draw(world, plan, rows, seed))
    for run in both:
        run()
    mine, other = (run.out.float() for run in both)
    error = float((mine - other).norm() / other.norm())
    return error if math.isfinite(error) else math.inf


def timed(world: World, run: Runnable) -> float:
    """Microseconds of one replay behind a collective of all ranks, which lines them up within a few microseconds."""
    line = torch.zeros(1, device=world.device)
    if world.device.type == "cpu":
        dist.all_reduce(line)
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6
    torch.cuda._sleep(HEAD_START_CYCLES)  # so that all is enqueued before the device comes to it
    dist.all_reduce(line)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def taken(stack: Stack) -> dict[str, str]:
    """What runs for each prepared problem of the modules, by its key."""
    modules = [module for module in stack.modules() if isinstance(module, AllGatherLinear)]
    choices = [choice for module in (*modules, *stack.decoders.values()) for choice in module.choices]
    return {choice.problem.key: str(choice.config) if choice.config else "bulk-synchronous" for choice in choices}
