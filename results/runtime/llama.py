"""A Llama-style stack of layers on autotax.nn against the same on NCCL: one script, one process a rank.

    python results/runtime/llama.py --world-size 4 --layers 4 --db winners.db --json llama.json

Prefill of one sequence, and decode steps of several batches over a KV cache that is spread over the ranks along the sequence;
both editions with the same random weights, each captured in CUDA graphs, their outputs compared, their replays timed in turn.
Without GPUs (`--backend cpu`, with small sizes) the same runs eagerly, and its times say nothing.

Simplified: no rotary embedding, no embedding, no head; a decode step attends to a full cache and does not append the new token;
the all-gather of the queries, reduce-scatters, all-reduces and what attends in prefill are the same in both editions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankFailure, on_ranks
from rich.console import Console
from rich.table import Table
from stack import Cache, Sizes, Stack, Weights, draw_cache, nccl_stack, tuned_stack
from torch import Tensor

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import Store
from autotax.db.lookup import lookup
from autotax.errors import UsageError
from autotax.hardware import Hardware, check_world_size, detect, environment
from autotax.heap import World
from autotax.nn import AllGatherLinear
from autotax.problem import AllGatherGemm, FlashDecode, Problem
from autotax.report.wording import CPU_NOTE, interval, microseconds, parameters, times
from autotax.spaces import space_for
from autotax.tuner.choices import baseline_for, trials_here
from autotax.tuner.statistics import speedup

TOLERANCE = {"bf16": 2e-2, "fp32": 1e-4}
"""Greatest ||ours - theirs|| / ||theirs|| of the last layer: both round to the dtype several times a layer, in other places."""
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


# On the ranks


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


# What is asked for, and what came of it


def problems(plan: Plan) -> dict[str, list[Problem]]:
    """What each module asks the look-up."""
    sizes = plan.sizes
    mlp = sizes.ffn_columns * (1 if plan.halves else 2)

    def gemm(columns: int) -> list[Problem]:
        return [AllGatherGemm(m, columns, sizes.hidden, plan.dtype, "m", sizes.world_size) for m in plan.gathered]

    return {
        "QKV": gemm(sizes.qkv_columns),
        "gate, up" if plan.halves else "gate and up": gemm(mlp),
        "attention": [_attention(sizes, batch, plan.dtype) for batch in plan.decode],
    }


def _attention(sizes: Sizes, batch: int, dtype: str) -> FlashDecode:
    return FlashDecode(batch, sizes.q_heads, sizes.kv_heads, sizes.head_dim, sizes.kv_len, dtype, sizes.world_size)


def best_bsp(problem: FlashDecode, hardware: Hardware, db: str | None) -> Config:
    """The best bulk-synchronous config that the database knows, else the default."""
    conditions, space = Conditions.usual(hardware.on_gpu), space_for(problem, hardware)
    answer = lookup(problem, hardware=hardware, db=db)
    with Store.open(db, create=False) as store:
        return baseline_for(answer, store, trials_here(store, space, conditions), space, conditions).config


def reduce(name: str, found: Sequence[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """One scenario of all ranks: the time of a round is the maximum over them, a latency the median over the rounds."""
    ours, theirs = ([max(at) for at in zip(*(rank["samples"][which] for rank in found), strict=True)] for which in (0, 1))
    ratio, ends = speedup(theirs, ours)
    error = max(error for rank in found for error in rank["errors"])
    return {
        "name": name,
        "rows": found[0]["rows"],
        "spread": found[0]["spread"],
        "autotax_us": statistics.median(ours),
        "nccl_us": statistics.median(theirs),
        "speedup": ratio,
        "interval": list(ends),
        "relative_error": error if math.isfinite(error) else None,
        "tolerance": TOLERANCE[dtype],
        "equal": error <= TOLERANCE[dtype],
        "rounds_us": {"autotax": [round(us, 2) for us in ours], "nccl": [round(us, 2) for us in theirs]},
    }


def document(plan: Plan, hardware: Hardware, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    asked = [(module, problem) for module, of in problems(plan).items() for problem in of]
    reduced = [
        reduce(each["name"], [rank["scenarios"][i] for rank in found], plan.dtype) for i, each in enumerate(found[0]["scenarios"])
    ]
    return {
        "hardware": hardware.to_dict(),
        "software": environment(hardware.backend).to_dict(),
        "sizes": asdict(plan.sizes),
        "dtype": plan.dtype,
        "captured": hardware.on_gpu,
        "modules": [
            {
                "module": module,
                "problem": problem.to_dict(),
                "takes": found[0]["taken"][problem.key],
                "match": (answer := lookup(problem, hardware=hardware, db=plan.db)).match,
                "reason": answer.reason,
            }
            for module, problem in asked
        ],
        "baseline": {f"batch {batch}": str(config) for batch, config in plan.bsp.items()},
        "scenarios": reduced,
        "warnings": found[0]["warnings"],
        "failures": [failure for rank in found for failure in rank["failures"]],
    }


def show(told: dict[str, Any], console: Console, note: str) -> None:
    modules = Table(title="what each module takes, and why", title_justify="left")
    for column in ("module", "problem", "takes", "look-up", "reason"):
        modules.add_column(column, overflow="fold")
    for each in told["modules"]:
        sizes = parameters(Config.of("", each["problem"]))
        modules.add_row(each["module"], sizes, each["takes"], each["match"], each["reason"])
    console.print(modules)
    if all(each["match"] == "fallback" for each in told["modules"]):
        console.print("nothing is tuned here: every module is bulk-synchronous, so there is nothing to win")
    ends = Table(title="end to end", title_justify="left", caption=note, caption_justify="left")
    for column in ("scenario", "NCCL us", "autotax us", "speed-up [95 %]", "relative difference", "outputs"):
        ends.add_column(column, justify="left" if column == "scenario" else "right")
    for each in told["scenarios"]:
        error = "not finite" if each["relative_error"] is None else f"{each['relative_error']:.1e}"
        figures = microseconds(each["nccl_us"]), microseconds(each["autotax_us"])
        gain = f"{times(each['speedup'])} {interval(tuple(each['interval']))}"
        equal = f"{'equal' if each['equal'] else 'DIFFER'} (within {each['tolerance']:g})"
        ends.add_row(each["name"], *figures, gain, error, equal)
    console.print(ends)
    for line in (*told["warnings"], *told["failures"]):
        console.print(f"notice: {line}", markup=False)


def planned(given: argparse.Namespace, hardware: Hardware) -> Plan:
    """Raises UsageError for sizes that the ranks cannot share."""
    ranks = given.world_size or hardware.default_world_size
    check_world_size(hardware, ranks)
    for name in ("hidden", "head_dim", "layers", "kv_len", "rounds"):
        if getattr(given, name) < 1:
            raise UsageError(f"{name} is {getattr(given, name)}; it must be at least 1: give another --{name.replace('_', '-')}")
    shared = {name: [getattr(given, name)] for name in ("q_heads", "kv_heads", "ffn")} | {"prefill": given.prefill}
    for name, values in shared.items():
        if wrong := [value for value in values if value < 1 or value % ranks]:
            raise UsageError(f"{name} is {wrong[0]}; {ranks} ranks share it: give a multiple as --{name.replace('_', '-')}")
    sizes = Sizes(given.hidden, given.q_heads, given.kv_heads, given.head_dim, given.ffn, given.layers, given.kv_len, ranks)
    dtype = "bf16" if hardware.on_gpu else "fp32"
    bsp = {batch: best_bsp(_attention(sizes, batch, dtype), hardware, given.db) for batch in given.decode}
    return Plan(sizes, dtype, tuple(given.prefill), tuple(given.decode), given.db, given.gate_up == "two", bsp, given.rounds)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="a Llama-style stack on autotax.nn against the same on NCCL")
    numbers = {"hidden": 8192, "q-heads": 64, "kv-heads": 8, "head-dim": 128, "ffn": 28672, "layers": 4, "kv-len": 32768}
    for name, default in (numbers | {"rounds": 60}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048], help="tokens of a sequence, over all ranks")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16], help="batches")
    parser.add_argument("--gate-up", choices=("one", "two"), default="two", help="gate and up: layers of AllGatherLinear")
    parser.add_argument("--world-size", type=int, help="default: the GPUs present, or 2 CPU ranks")
    parser.add_argument("--backend", choices=("cuda", "rocm", "cpu"))
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document, with every sample")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds after which all ranks are killed; default 400")
    return parser


def main() -> int:
    given = arguments().parse_args()
    try:
        hardware = detect(given.backend)
        plan = planned(given, hardware)
        found = on_ranks(work, plan.sizes.world_size, hardware.backend, plan, timeout_s=given.timeout)
    except UsageError as error:
        print(f"llama.py: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"llama.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    told = document(plan, hardware, found)
    show(told, Console(width=None if sys.stdout.isatty() else 160), str(hardware) if hardware.on_gpu else CPU_NOTE)
    if given.json:
        given.json.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(each["equal"] for each in told["scenarios"]) and not told["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
