"""What an eager call of the modules costs the host above the bare launches:

    python results/runtime/overhead.py --world-size 4 --db winners.db --json overhead.json

Each way of making the same call is timed on the host alone, all ways in turn, so that differences are within one round: the
module, the module with `out` given, the same as an operator of torch.ops, and the bare operator that the module chose, called
with the same tensors. Beside them what a program without autotax would launch. On GPUs the device is waited for between rounds,
outside the times. Without GPUs one process stands for a group of one; its modules are plain torch, whose time is alike in every
way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import RankFailure, on_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autotax.errors import UsageError
from autotax.hardware import check_world_size, detect, environment
from autotax.heap import World
from autotax.nn import AllGatherLinear, FlashDecode

BUDGET_US = 15.0
WARM_ROUNDS = 50
LINEAR = {"gpu": (512, 7168, 8192), "cpu": (16, 16, 16)}
"""m over all ranks, n, k."""
DECODE = {"gpu": (1, 64, 8, 128, 32768), "cpu": (1, 4, 2, 16, 16)}
"""batch, query heads, KV heads, head dim, KV length over all ranks."""

Ways = dict[str, Callable[[], Any]]
BARE = "bare operator"


def ways_of_linear(world: World | None, device: torch.device, db: str | None) -> tuple[str, Ways]:
    """What the layer chose, and the ways of calling it."""
    ranks, (m, n, k) = world.size if world else 1, LINEAR["gpu" if device.type == "cuda" else "cpu"]
    rows, dtype = m // ranks, torch.bfloat16 if device.type == "cuda" else torch.float32
    weight, x = torch.randn(n, k, device=device, dtype=dtype), torch.randn(rows, k, device=device, dtype=dtype)
    layer = AllGatherLinear(weight, None, m, db=db, sizes=[m])
    out, gathered = torch.empty(m, n, device=device, dtype=dtype), torch.empty(m, k, device=device, dtype=dtype)
    layer(x, out)
    operator = layer._calls[rows]

    def plain() -> Tensor:
        if world is None:
            return torch.mm(x, weight.t(), out=out)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x)
        return torch.mm(gathered, weight.t(), out=out)

    return str(layer.choices[0].config or "bulk-synchronous"), {
        "module": lambda: layer(x),
        "module, out given": lambda: layer(x, out),
        "torch.ops": lambda: torch.ops.autotax.all_gather_linear(x, weight, layer.handle),
        BARE: lambda: operator(x, weight, out),
        "torch.mm" if world is None else "NCCL and torch.mm": plain,
    }


def ways_of_decode(world: World | None, device: torch.device, db: str | None) -> tuple[str, Ways]:
    ranks, (batch, q_heads, kv_heads, dim, kv_len) = world.size if world else 1, DECODE["gpu" if device.type == "cuda" else "cpu"]
    dtype, tokens = torch.bfloat16 if device.type == "cuda" else torch.float32, kv_len // ranks
    q = torch.randn(batch, q_heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, tokens, dim, device=device, dtype=dtype) for _ in range(2))
    lengths, out = torch.full((batch,), tokens, dtype=torch.int32, device=device), torch.empty_like(q)
    attend = FlashDecode(kv_heads, q_heads, dim, batch, kv_len, None, dtype, device=device, db=db, sizes=[batch])
    attend(q, k, v, lengths, out=out)
    operator = attend._calls[batch, tokens]
    return str(attend.choices[0].config or "bulk-synchronous"), {
        "module": lambda: attend(q, k, v, lengths),
        "module, out given": lambda: attend(q, k, v, lengths, out=out),
        "torch.ops": lambda: torch.ops.autotax.flash_decode(q, k, v, lengths, attend.handle),
        BARE: lambda: operator(q, k, v, lengths, out),
    }


def measure(world: World | None, rounds: int, db: str | None) -> list[dict[str, Any]]:
    """For each module what it took, and for each way the microseconds of every round on this rank."""
    device = world.device if world else torch.device("cpu")
    told = []
    with torch.no_grad():
        for name, prepare in (("AllGatherLinear", ways_of_linear), ("FlashDecode", ways_of_decode)):
            taken, ways = prepare(world, device, db)
            times: dict[str, list[float]] = {way: [] for way in ways}
            names = list(ways)
            for number in range(WARM_ROUNDS + rounds):
                for way in names[number % len(names) :] + names[: number % len(names)]:
                    call = ways[way]
                    start = time.perf_counter_ns()
                    call()
                    spent = (time.perf_counter_ns() - start) / 1e3
                    if number >= WARM_ROUNDS:
                        times[way].append(spent)
                if world:
                    world.synchronize()
            told.append({"module": name, "takes": taken, "times": times})
    return told


def reduce(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One module of all ranks: each figure is that of the worst rank. Overheads are differences within a round."""
    rows = []
    for way in found[0]["times"]:
        above = [[spent - bare for spent, bare in zip(r["times"][way], r["times"][BARE], strict=True)] for r in found]
        rows.append(
            {
                "way": way,
                "p50_us": round(max(statistics.median(r["times"][way]) for r in found), 3),
                "p99_us": round(max(p99(r["times"][way]) for r in found), 3),
                "above_bare_p50_us": round(max(map(statistics.median, above)), 3),
                "above_bare_p99_us": round(max(map(p99, above)), 3),
            }
        )
    return {"module": found[0]["module"], "takes": found[0]["takes"], "ways": rows}


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def show(told: dict[str, Any]) -> None:
    table = Table(title=f"microseconds of the host for one eager call, {told['place']}", title_justify="left")
    for column in ("module", "takes", "way", "p50", "p99", "above bare p50", "above bare p99"):
        table.add_column(column, justify="left" if column in ("module", "takes", "way") else "right", overflow="fold")
    for each in told["modules"]:
        for row in each["ways"]:
            figures = (f"{row[name]:.1f}" for name in ("p50_us", "p99_us", "above_bare_p50_us", "above_bare_p99_us"))
            table.add_row(each["module"], each["takes"], row["way"], *figures)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="host time of eager calls of the modules above the bare launches")
    parser.add_argument("--world-size", type=int, help="default: the GPUs present; 1 without any")
    parser.add_argument("--backend", choices=("cuda", "rocm", "cpu"))
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds after which all ranks are killed")
    given = parser.parse_args()
    try:
        hardware = detect(given.backend)
        ranks = given.world_size or (hardware.count if hardware.on_gpu else 1)
        check_world_size(hardware, ranks)
        if given.rounds < 1 or ranks < 1 or (ranks != 1 and not hardware.on_gpu):
            raise UsageError(f"{given.rounds} rounds on {ranks} ranks; rounds must be 1 or more, CPU ranks 1: give others")
        if hardware.on_gpu:
            found = on_ranks(measure, ranks, hardware.backend, given.rounds, given.db, timeout_s=given.timeout)
        else:
            torch.set_num_threads(1)
            found = [measure(None, given.rounds, given.db)]
    except UsageError as error:
        print(f"overhead.py: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"overhead.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    modules = [reduce([rank[i] for rank in found]) for i in range(len(found[0]))]
    place = str(hardware) if hardware.on_gpu else f"one process on a CPU ({hardware.device})"
    worst = max(row["above_bare_p50_us"] for each in modules for row in each["ways"] if row["way"].startswith("module"))
    told = {"place": place, "software": environment(hardware.backend).to_dict(), "rounds": given.rounds, "modules": modules}
    told |= {"budget_us": BUDGET_US, "worst_above_bare_p50_us": worst, "within_budget": worst <= BUDGET_US}
    show(told)
    print(f"at most {worst:.1f} us above the bare operator (median); the budget is {BUDGET_US:g} us")
    if given.json:
        given.json.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if worst <= BUDGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
