"""Times variants, chosen configs and alternatives of gather + attention side by side; each is verified first.

    PYTHONPATH=. python results/h200x2/gather-attention/rows.py [--late N] KEY[,KEY...] ROW ...

KEY is heads/kv_heads:tokens:layout, for instance 64/8:8K:zigzag; the layout `none` is no mask. ROW is a variant, an alternative,
or a variant with values: push:block_n=64,num_stages=3. A row is a graph of calls, and rounds visit all rows in turn. Figures are
microseconds a call on the slower rank: the median, back to back. Errors are those of the worse of two input sets, the second with
outlier channels; they must be at most 5e-3.

--late N: for the first key, N replays of one call with ranks that are up to 0.1 ms late and two input sets in turn, every output
compared.

On CPU ranks it runs small sizes without graphs: a test of this script.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.offline import fix_cache_keys
from autotax.operators import named
from autotax.operators.problems import GatherAttention
from autotax.operators.verification import make_inputs, reference, relative_error
from autotax.runner.precompile import CompileAhead
from autotax.runner.rank_worker import open_context
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for

ROUNDS, SAMPLE_US, MOST_VERIFIED, HEAP_BYTES, COMPILERS = 12, 3000.0, 32768, 7 << 30, 16
LATEST_CYCLES = 200_000
_contexts: dict[str, Context] = {}
"""The context of this rank, which all problems use in turn."""


def problem_of(key: str, on_gpu: bool) -> GatherAttention:
    heads, tokens, layout = key.split(":")
    q_heads, kv_heads = map(int, heads.split("/"))
    length = int(tokens.removesuffix("K")) * (1024 if on_gpu else 32)
    mask, layout = ("none", "contiguous") if layout == "none" else ("causal", layout)
    return GatherAttention(1, q_heads, kv_heads, 128 if on_gpu else 16, length, "bf16", 2, mask, layout)


def rows_of(problem: GatherAttention, asked: list[str], backend: str) -> dict[str, Config]:
    """The config of each row that applies to the problem."""
    space, operator = space_for(problem, detect(backend)), named("gather-attention")
    rows: dict[str, Config] = {}
    for row in asked:
        variant, _, values = row.partition(":")
        given = dict(pair.split("=") for pair in values.split(",") if pair)
        if variant in space.variants:
            default = space.default(variant).values
            rows[row] = Config.of(variant, default | {n: int(v) if v.isdigit() else v for n, v in given.items()})
        elif variant in operator.peers and backend == "cuda":
            rows[row] = Config.of(variant)
    return rows


class Row:
    """A config made ready on this rank."""

    def __init__(self, world: World, problem: GatherAttention, config: Config, context: Context, calls: list[Any]) -> None:
        self.world, self.call = world, make_inputs(problem, 0, world.rank, world.device)
        self.kernel = prepare(problem, config, context)
        context.heap.check()
        with context.rehearsal():
            self.kernel(*self.call.tensors, self.call.out)
        world.barrier()
        self.outs = []
        for drawn in calls:
            self.load(drawn)
            self.outs.append(self.run().clone())
            world.synchronize()
        self.load(calls[0])

    def load(self, drawn: Any) -> None:
        for tensor, values in zip(self.call.tensors, drawn.tensors, strict=True):
            tensor.copy_(values)

    def run(self) -> torch.Tensor:
        result = self.kernel(*self.call.tensors, self.call.out)
        return self.call.out if result is None else result

    def captured(self, count: int) -> Callable[[], torch.Tensor]:
        """A function that runs `count` calls and returns the output of the last."""
        if self.world.device.type == "cpu":
            return lambda: [self.run() for _ in range(count)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the library's watchdog asks for events
            out = [self.run() for _ in range(count)][-1]

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def count(self) -> int:
        """How many calls take about SAMPLE_US, the same on all ranks."""
        started = time.perf_counter()
        for _ in range(2):
            self.run()
        self.world.synchronize()
        latency_us = (time.perf_counter() - started) / 2 * 1e6
        mine = max(2, min(20, int(SAMPLE_US / latency_us)))
        return max(self.world.gather(mine, int))

    def late(self, replays: int, calls: list[Any]) -> int:
        """The number of elements that ever differed, over replays with late ranks and inputs in turn."""
        replay = self.captured(1)
        wrong = torch.zeros((), dtype=torch.int64, device=self.world.device)
        delays = random.Random(self.world.rank)
        for number in range(replays):
            which = number % len(calls)
            self.load(calls[which])
            if self.world.device.type == "cuda":
                torch.cuda._sleep(delays.randrange(LATEST_CYCLES))
            out, right = replay(), self.outs[which]
            wrong += ((out != right) & ~(out.isnan() & right.isnan())).sum()
        self.world.synchronize()
        return int(wrong)


def measure(world: World, problem: GatherAttention, rows: dict[str, Config], late: int) -> dict[str, Any]:
    """What there is to say of each row on this rank: microseconds, errors and notes, or what went wrong."""
    on_gpu = world.device.type == "cuda"
    if "context" not in _contexts:
        if on_gpu:
            fix_cache_keys()
        _contexts["context"] = open_context(world, detect(world.backend), HEAP_BYTES if on_gpu else 1 << 26)
    context = _contexts["context"]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "CPU ranks"}
    calls = [make_inputs(problem, seed, world.rank, world.device) for seed in (0, 1)]
    verified = problem.seq_len <= MOST_VERIFIED
    right = [reference(problem, seed, world.rank, world.device) for seed in (0, 1)] if verified else []
    operator = named("gather-attention")
    ready: dict[str, tuple[Row, Callable[[], torch.Tensor], int]] = {}
    for name, config in rows.items():
        try:
            row = Row(world, problem, config, context, calls)
            compared = zip(row.outs, right, calls, strict=False)
            if name in operator.peers and operator.peers[name].part:  # it gathers the keys of its first call only
                compared = zip(row.outs[:1], right[:1], calls[:1], strict=False)
            error = max((relative_error(*case) for case in compared), default=-1.0)
            count = row.count()
            ready[name] = row, row.captured(count), count
            report[name] = {"error": error, "us": []}
        except Exception as problem_with_it:
            report[name] = f"{type(problem_with_it).__name__}: {str(problem_with_it)[:160]}"
    tick = torch.zeros(1, device=world.device)
    for turn in range(1 + (ROUNDS if verified else 3)):
        for name, (_, replay, count) in ready.items():
            dist.all_reduce(tick, group=world.data)
            us = _timed(world, replay) / count
            if turn:
                report[name]["us"].append(us)
    for name, (row, _, _) in ready.items():
        report[name] |= {"us": statistics.median(report[name]["us"])}
        if late and name not in operator.peers:
            report[name]["wrong"] = row.late(late, calls)
        report[name]["note"] = row.kernel.failure()
    ready.clear()
    context.heap.reset()
    return report


def _timed(world: World, replay: Callable[[], torch.Tensor]) -> float:
    """Microseconds of a replay on this rank."""
    if world.device.type == "cpu":
        started = time.perf_counter()
        replay()
        return (time.perf_counter() - started) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    replay()
    end.record()
    world.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def show(key: str, both: list[dict[str, Any]], rows: dict[str, Config]) -> None:
    print(f"# {key} on {both[0]['device']}", flush=True)
    for name in rows:
        if failed := [report[name] for report in both if isinstance(report[name], str)]:
            print(f"    FAILED {failed[0]} {name}", flush=True)
            continue
        mine = [report[name] for report in both]
        us, error = (max(report[what] for report in mine) for what in ("us", "error"))
        wrong = "" if "wrong" not in mine[0] else f"  late: {sum(report['wrong'] for report in mine)} wrong"
        notes = [report["note"] for report in mine if report["note"]]
        print(f"{us:10.1f} us  error {error:.2e}  {name}{wrong}  {notes or ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("keys")
    parser.add_argument("rows", nargs="+")
    asked = parser.parse_args()
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    problems = {key: problem_of(key, backend == "cuda") for key in asked.keys.split(",")}
    rows = {key: rows_of(problem, asked.rows, backend) for key, problem in problems.items()}
    if backend == "cuda":
        compilers = CompileAhead(detect(backend), COMPILERS)
        ours = [(problems[key], config) for key, of_key in rows.items() for config in of_key.values() if config.params]
        for problem, config in ours:
            compilers.expect(problem, [config])
        for problem, config in ours:
            compilers.outcome(problem, config)
        compilers.close()
    with Ranks(2, backend) as ranks:
        for key, problem in problems.items():
            try:
                both = ranks.run(measure, problem, rows[key], asked.late if key == next(iter(problems)) else 0, timeout=60)
            except Exception as failed:
                print(key, "FAILED", str(failed)[-1500:], flush=True)
                continue
            show(key, both, rows[key])


if __name__ == "__main__":
    main()
