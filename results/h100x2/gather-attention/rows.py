"""Times variants, chosen configs and alternatives of gather + attention side by side; each is verified first.

    PYTHONPATH=. python results/h100x2/gather-attention/rows.py KEY[,KEY...] [variant ...] [push:name=value,name=value ...]

KEY is heads/kv_heads:tokens:layout, for instance 64/8:8K:zigzag; the layout `none` is no mask. Each row is a graph of calls;
rounds visit all rows in turn. Figures are medians of the slower rank, back to back, in microseconds a call.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels import prepare
from autotax.kernels.kernel import Kernel
from autotax.kernels.offline import fix_cache_keys
from autotax.nn.prepare import bytes_needed
from autotax.operators import named
from autotax.operators.calls import make_inputs, reference
from autotax.operators.problems import GatherAttention
from autotax.operators.verification import relative_error
from autotax.runner.rank_worker import open_context
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for

ROUNDS, SAMPLE_US, MOST_VERIFIED = 15, 4000.0, 32768


def problem_of(key: str) -> GatherAttention:
    heads, tokens, layout = key.split(":")
    q_heads, kv_heads = map(int, heads.split("/"))
    length = int(tokens.removesuffix("K")) * 1024
    mask = "none" if layout == "none" else "causal"
    return GatherAttention(1, q_heads, kv_heads, 128, length, "bf16", 2, mask, "zigzag" if layout == "zigzag" else "contiguous")


def rows_of(problem: GatherAttention, asked: list[str]) -> dict[str, Config]:
    space, operator = space_for(problem, detect("cuda")), named("gather-attention")
    rows: dict[str, Config] = {}
    for what in asked:
        variant, _, values = what.partition(":")
        if variant in space.variants:
            default = space.default(variant).values
            given = dict(pair.split("=") for pair in values.split(",") if pair)
            rows[what] = Config.of(variant, default | {n: int(v) if v.isdigit() else v for n, v in given.items()})
        elif variant in operator.peers:
            rows[what] = Config.of(variant)
    return rows


def measure(world: World, problem: GatherAttention, rows: dict[str, Config]) -> dict[str, Any]:
    """The median microseconds of each row on the slower rank, its error and its number of samples; or what went wrong."""
    told: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    graphs, contexts = {}, []
    fix_cache_keys()
    call = make_inputs(problem, 0, world.rank, world.device)
    odd = make_inputs(problem, 1, world.rank, world.device)
    verified = problem.seq_len <= MOST_VERIFIED
    right = [reference(problem, seed, world.rank, world.device) for seed in (0, 1)] if verified else []
    tick = torch.zeros(1, device=world.device)
    for name, config in rows.items():
        try:
            context = open_context(world, detect("cuda"), max(1 << 20, bytes_needed(world, detect("cuda"), problem, config)))
            contexts.append(context)
            kernel = prepare(problem, config, context)
            context.heap.check()
            with context.rehearsal():
                kernel(*call.tensors, call.out)
            world.barrier()
            errors = []
            for drawn, expected in zip((call, odd), right, strict=False):
                out = _run(kernel, drawn)
                world.synchronize()
                errors.append(relative_error(out, expected, drawn))
            started = time.perf_counter()
            for _ in range(2):
                _run(kernel, call)
            world.synchronize()
            each = (time.perf_counter() - started) / 2 * 1e6
            count = torch.tensor([max(2, min(20, int(SAMPLE_US / each)))], device=world.device)
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=world.data)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(int(count)):
                    _run(kernel, call)
            graphs[name] = graph, int(count), kernel
            told[name] = {"error": max(errors, default=-1.0), "us": []}
        except Exception as error:
            told[name] = f"{type(error).__name__}: {str(error)[:200]}"
    rounds = ROUNDS if problem.seq_len <= MOST_VERIFIED else 4
    for turn in range(rounds + 1):
        for name, (graph, count, _) in graphs.items():
            dist.all_reduce(tick, group=world.data)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            world.synchronize()
            if turn:
                told[name]["us"].append(begin.elapsed_time(end) * 1e3 / count)
    for name, (_, _, kernel) in graphs.items():
        told[name] |= {"us": statistics.median(told[name]["us"]), "note": kernel.failure()}
    world.barrier()
    graphs.clear()
    for context in contexts:
        context.heap.close()
    return told


def _run(kernel: Kernel[Any], call: Any) -> torch.Tensor:
    result = kernel(*call.tensors, call.out)
    return call.out if result is None else result


def main() -> None:
    keys, *asked = sys.argv[1:]
    with Ranks(2, "cuda") as ranks:
        for key in keys.split(","):
            problem = problem_of(key)
            rows = rows_of(problem, asked)
            try:
                both = ranks.run(measure, problem, rows, timeout=45)
            except Exception as error:
                print(key, "FAILED", str(error)[-1500:], flush=True)
                continue
            print(f"# {key} {problem.key} on {both[0]['device']}", flush=True)
            for name in rows:
                mine = [told.get(name) for told in both]
                if all(isinstance(told, dict) for told in mine):
                    us, error = (max(told[what] for told in mine) for what in ("us", "error"))
                    notes = [told["note"] for told in mine if told["note"]]
                    print(f"{us:10.1f} us  error {error:.2e}  {name} {notes or ''}", flush=True)
                else:
                    print(f"    FAILED {mine} {name}", flush=True)


if __name__ == "__main__":
    main()
