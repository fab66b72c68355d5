"""The host's cost of an eager call of torch's fused operators: ours, torch's own, the collective library and torch.mm.

    python results/runtime/fused_overhead.py --world-size 4 --db winners.db --json fused-overhead.json

All ways are timed in each round on the host alone, in an order drawn anew each time, the same on all ranks. On GPUs the device
is waited for between rounds, outside the times. `ours above torch.empty and the kernel` is what our operator adds to making its
result and launching the kernel that it chose. Without a winner our operator is torch's own behind a look-up in a dict; `takes`
says which it was.

Two CPU ranks run it too, to try the script: there every way waits for the other rank, and torch's own is plain collectives.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import ORDER_SEED, WARM_ROUNDS, Ways, above, p99
from stack import all_gather, reduce_scatter

import autotax.torch
from autotax.core.errors import UsageError
from autotax.hardware import check_world_size, detect
from autotax.heap import World
from autotax.runner.ranks import RankFailure, run_ranks
from autotax.software import environment
from autotax.torch import plans, symm_mem
from autotax.torch.symm_mem import GATHER, SCATTER

SIZES = {"gpu": (512, 7168, 8192), "cpu": (16, 16, 16)}
"""m over all ranks, n and k; of the row-parallel product n and k the other way round."""
OURS, THEIRS, LIBRARY, KERNEL = "ours", "torch's own", "NCCL and torch.mm", "torch.empty and the kernel"


def ways_of(operator: str, world: World) -> tuple[str, Ways]:
    """The config that our operator chose, and the ways of making its call."""
    on_gpu = world.device.type == "cuda"
    m, n, k = SIZES["gpu" if on_gpu else "cpu"]
    group = str(world.data.group_name)  # type: ignore[union-attr]
    dtype, gathers = torch.bfloat16 if on_gpu else torch.float32, operator == GATHER
    made = {"device": world.device, "dtype": dtype}
    a = torch.randn(m // world.size, k, **made) if gathers else torch.randn(m, n, **made)
    b = torch.randn(n, k, **made).t() if gathers else torch.randn(k, n, **made).t()
    arguments: tuple[Any, ...] = ([b], 0, group) if gathers else (b, "sum", 0, group)
    keywords = {"return_A": False} if gathers else {}
    ours = getattr(torch.ops.autotax, operator)
    # CPU ranks have no operator of torch's own, but what it computes.
    own = getattr(torch.ops.symm_mem, operator)
    own = own if on_gpu else symm_mem.torch_all_gather_matmul if gathers else symm_mem.torch_matmul_reduce_scatter
    whole = torch.empty(m, k, **made) if gathers else torch.empty(m // world.size, b.shape[1], **made)

    def library() -> None:
        if gathers:
            all_gather(whole, a)
            torch.mm(whole, b)
        else:
            reduce_scatter(whole, torch.mm(a, b))

    ways: Ways = {OURS: lambda: ours(a, *arguments, **keywords), THEIRS: lambda: own(a, *arguments, **keywords), LIBRARY: library}
    ours(a, *arguments, **keywords)  # collective: it prepares
    (plan,) = [plan for key, plan in plans.plans_of(group, world.device).by_key.items() if key[0] == operator]
    if plan.kernel is None:
        return f"torch's own: {plan.count.reason}", ways
    shape = (m if gathers else m // world.size, b.shape[1])
    return str(plan.kernel.config), ways | {KERNEL: lambda: plan.kernel(a, b.t(), torch.empty(shape, **made))}


def measure(world: World, rounds: int, db: str | None) -> list[dict[str, Any]]:
    """For each operator what it took, and for each way the microseconds of every round on this rank."""
    plans.use(plans.Deployment(db))
    records = []
    with torch.no_grad():
        for operator in (GATHER, SCATTER):
            taken, ways = ways_of(operator, world)
            times: dict[str, list[float]] = {way: [] for way in ways}
            order = random.Random(ORDER_SEED)
            for number in range(WARM_ROUNDS + rounds):
                for way in order.sample(list(ways), len(ways)):
                    start = time.perf_counter_ns()
                    ways[way]()
                    if number >= WARM_ROUNDS:
                        times[way].append((time.perf_counter_ns() - start) / 1e3)
                world.synchronize()
            records.append({"module": operator, "takes": taken, "times": times})
    if failures := plans.failures():
        raise RuntimeError("; ".join(failures))
    dist.barrier()
    autotax.torch.uninstall()
    return records


def reduce(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One operator of all ranks: each figure is that of the worst rank."""
    times = [rank["times"] for rank in ranks]
    rows = [
        {
            "way": way,
            "p50_us": round(max(statistics.median(rank[way]) for rank in times), 3),
            "p99_us": round(max(p99(rank[way]) for rank in times), 3),
        }
        for way in times[0]
    ]
    compared = {base: above(ranks, OURS, base) for base in (THEIRS, LIBRARY, KERNEL) if base in times[0]}
    return {"operator": ranks[0]["module"], "takes": ranks[0]["takes"], "ways": rows, "ours_above": compared}


def main() -> int:
    parser = argparse.ArgumentParser(description="host time of torch's fused operators, ours against torch's own")
    parser.add_argument("--world-size", type=int, help="default: the GPUs present, or 2 CPU ranks")
    parser.add_argument("--backend", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds after which all ranks are killed")
    options = parser.parse_args()
    try:
        hardware = detect(options.backend)
        count = options.world_size or hardware.default_world_size
        check_world_size(hardware, count)
        ranks = run_ranks(measure, count, hardware.backend, options.rounds, options.db, timeout=options.timeout)
    except UsageError as error:
        print(f"fused_overhead.py: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"fused_overhead.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    operators = [reduce([rank[i] for rank in ranks]) for i in range(len(ranks[0]))]
    print(f"microseconds of the host for one eager call, {hardware}, {options.rounds} rounds; median and 99th percentile")
    for operator in operators:
        print(f"{operator['operator']}: {operator['takes']}")
        for row in operator["ways"]:
            print(f"  {row['way']}: {row['p50_us']:.1f}, {row['p99_us']:.1f}")
        for base, row in operator["ours_above"].items():
            low, high = row["above_interval_us"]
            print(f"  ours above {base}: {row['above_p50_us']:.1f} [{low:.1f}, {high:.1f}]")
    document = {"place": str(hardware), "software": environment(hardware.backend).to_dict(), "rounds": options.rounds}
    if options.json:
        document |= {"operators": operators}
        options.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
