"""The work of a rank: it captures, compares and times each scenario in both editions of the stack."""

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

from autotax.core.config import Config
from autotax.heap import World
from autotax.nn.linear_base import ParallelLinear

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_CALLS = 3
HEAD_START_CYCLES = 2_000_000


@dataclass(frozen=True)
class Plan:
    """The scenarios and sizes of all ranks. `bsp`: the baseline's config of each decode batch; `prefill`, `train`: tokens of each
    sequence.
    """

    sizes: Sizes
    dtype: str
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    train: tuple[int, ...]
    db: str | None
    halves: bool
    row_parallel: bool
    keep_gathered: bool
    bsp: dict[int, Config]
    rounds: int

    @property
    def gathered(self) -> list[int]:
        """The rows that AllGatherLinear gathers to, each once."""
        return sorted({*self.prefill, *(batch for batch in self.decode if self.sizes.spread(batch))})

    @property
    def few(self) -> list[int]:
        """The batches that every rank has whole, whose products are all-reduced."""
        return [batch for batch in self.decode if not self.sizes.spread(batch)]


Tensors = tuple[Tensor, ...]


class Runnable:
    """A call that is captured in a graph on GPUs; `out` is what it makes."""

    def __init__(self, call: Callable[[], Tensors], on_gpu: bool) -> None:
        self._call = call
        for _ in range(WARM_CALLS if on_gpu else 1):
            self.out = call()
        self._graph: torch.cuda.CUDAGraph | None = None
        if on_gpu:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.out = call()
            self._graph.replay()  # a capture computes nothing

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
        ours = tuned_stack(
            sizes, world, weights, plan.gathered, plan.decode, plan.db, plan.halves, plan.row_parallel, plan.keep_gathered
        )
        theirs = nccl_stack(sizes, world, weights, plan.gathered, plan.bsp)
        records = []
        for tokens in plan.prefill:
            records.append({"name": f"prefill, {tokens} tokens"} | scenario(world, plan, tokens, ours.prefill, theirs.prefill))
        for batch in plan.decode:
            caches = [draw_cache(sizes, world, batch, dtype, seed) for seed in range(sizes.layers)]
            run = [decoding(stack, caches) for stack in (ours, theirs)]
            records.append({"name": f"decode, batch {batch}, KV {sizes.kv_len}"} | scenario(world, plan, batch, *run))
        chosen, stacks = taken(ours), [ours]
        if plan.train:
            more, how = plan.keep_gathered, plan.row_parallel
            stacks.append(tuned_stack(sizes, world, weights, plan.train, (), plan.db, False, how, more))
            baseline = nccl_stack(sizes, world, weights, plan.train, {})
            for tokens in plan.train:
                with torch.enable_grad():
                    run = [training(stack, weights, world, plan, tokens) for stack in (stacks[1], baseline)]
                    records.append({"name": f"train, {tokens} tokens"} | scenario(world, plan, tokens, *run))
            chosen |= taken(stacks[1])
    modules = [module for stack in stacks for module in stack.modules() if hasattr(module, "failure")]
    failures = [failure for module in modules if (failure := module.failure())]
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return {"scenarios": records, "taken": chosen, "warnings": notes, "failures": failures}


def decoding(stack: Stack, caches: Sequence[Cache]) -> Callable[[Tensor], Tensor]:
    return lambda x: stack.decode(x, caches)


def training(
    stack: Stack, weights: Sequence[Weights], world: World, plan: Plan, tokens: int
) -> Callable[[Tensor], Tensors]:
    """Forward and backward: the result, and the gradients of x and of all weights for some gradient of the result."""
    dy = draw(world, plan, tokens, 50)

    def step(x: Tensor) -> Tensors:
        x = x.detach().requires_grad_()
        y = stack.prefill(x)
        return (y.detach(), *torch.autograd.grad(y, [x, *(weight for layer in weights for weight in layer)], dy))

    return step


def scenario(
    world: World, plan: Plan, rows: int, ours: Callable[[Tensor], Any], theirs: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """Errors of all checks, and the samples of this rank in microseconds, ours and theirs in turn."""
    on_gpu, spread = world.device.type == "cuda", plan.sizes.spread(rows)
    x = draw(world, plan, rows, 0)
    both = [Runnable(lambda: tensors(ours(x)), on_gpu), Runnable(lambda: tensors(theirs(x)), on_gpu)]
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


def tensors(made: Tensor | Tensors) -> Tensors:
    return (made,) if isinstance(made, Tensor) else made


def check(world: World, plan: Plan, x: Tensor, both: Sequence[Runnable], rows: int, seed: int) -> float:
    """The greatest relative difference of outputs and gradients for another input; infinite if one is not finite. Collective."""
    x.copy_(draw(world, plan, rows, seed))
    for run in both:
        run()
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*(run.out for run in both), strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


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
    """The config that runs for each prepared problem of the modules, by its key."""
    modules = [module for module in stack.modules() if isinstance(module, ParallelLinear)]
    # Of layers that trained, the backward too.
    modules += [layer.gradient for layer in modules if layer._gradient is not None and layer._gradient is not layer]
    choices = [choice for module in (*modules, *stack.decoders.values()) for choice in module.choices]
    return {choice.problem.key: str(choice.config) if choice.config else "bulk-synchronous" for choice in choices}
