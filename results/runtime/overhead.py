"""The host time of an eager call of the modules, above that of the bare launches:

    python results/runtime/overhead.py --world-size 4 --db winners.db --json overhead.json

Ways of making the same call are timed on the host alone, all of them in each round, in an order drawn anew each time, the same
on all ranks. Ways are compared within a round: the median difference with its 95 % interval. The budget is judged on three.

- The module with `out` given, above the bare operator that it chose, called with the same tensors.
- The module that makes its result, above the same operator with its output made by torch.empty: whoever launches by hand and
  wants a new tensor has to make one too.
- The same through torch.ops, as compiled code calls it, above that too.

Beside them what of it is torch's own: torch.empty, and a torch.nn.Module and an operator of torch.ops that do nothing; and what a
program without autotax would launch. On GPUs the device is waited for between rounds, outside the times. In a group of one, and
without GPUs, where one process stands for such a group, modules are plain torch, whose time is alike in every way.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.hardware import check_world_size, detect
from autotax.heap import World
from autotax.nn import AllGatherLinear, FlashDecode
from autotax.runner.ranks import RankFailure, run_ranks
from autotax.software import environment
from autotax.tuner.finalists import median_interval

BUDGET_US = 15.0
WARM_ROUNDS = 50
ORDER_SEED = 0
LINEAR = {"gpu": (512, 7168, 8192), "cpu": (16, 16, 16)}
"""m over all ranks, n, k."""
DECODE = {"gpu": (1, 64, 8, 128, 32768), "cpu": (1, 4, 2, 16, 16)}
"""batch, query heads, KV heads, head dim, KV length over all ranks."""

Ways = dict[str, Callable[[], Any]]
BARE = "bare operator"
BARE_MADE = "bare operator, output made"
JUDGED = {"module, out given": BARE, "module": BARE_MADE, "torch.ops": BARE_MADE}
"""The ways that the budget is for, and what each is held against."""

_library = torch.library.Library("autotax_overhead", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, int module) -> ()")
_library.define("decode(Tensor q, Tensor k, Tensor v, Tensor kv_lens, int module) -> ()")
for _name in ("linear", "decode"):
    _library.impl(_name, lambda *_: None, "CompositeExplicitAutograd")


class Empty(torch.nn.Module):
    def forward(self, *_: Any, **__: Any) -> None:
        """Nothing."""


def ways_of_linear(ranks: int, device: torch.device, db: str | None) -> tuple[str, Ways]:
    """The config that the layer chose, and the ways of calling it."""
    m, n, k = LINEAR["gpu" if device.type == "cuda" else "cpu"]
    rows, dtype = m // ranks, torch.bfloat16 if device.type == "cuda" else torch.float32
    weight, x = torch.randn(n, k, device=device, dtype=dtype), torch.randn(rows, k, device=device, dtype=dtype)
    layer = AllGatherLinear(weight, None, m, db=db, sizes=[m])
    out, gathered = torch.empty(m, n, device=device, dtype=dtype), torch.empty(m, k, device=device, dtype=dtype)
    layer(x, out)
    operator, *_ = layer._known[x.shape]
    empty = Empty()

    def make() -> Tensor:
        return torch.empty(m, n, device=device, dtype=dtype)

    def by_hand() -> Tensor:
        made = torch.empty(m, n, device=device, dtype=dtype)
        operator(x, weight, made)
        return made

    def plain() -> Tensor:
        if ranks == 1:
            return torch.mm(x, weight.t(), out=out)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x)
        return torch.mm(gathered, weight.t(), out=out)

    return str(layer.choices[0].config or "bulk-synchronous"), {
        BARE: lambda: operator(x, weight, out),
        "module, out given": lambda: layer(x, out),
        BARE_MADE: by_hand,
        "module": lambda: layer(x),
        "torch.ops": lambda: torch.ops.autotax.all_gather_linear(x, weight, layer.handle),
        "torch.empty": make,
        "empty torch.nn.Module": lambda: empty(x, out),
        "empty operator of torch.ops": lambda: torch.ops.autotax_overhead.linear(x, weight, 0),
        "torch.mm" if ranks == 1 else "NCCL and torch.mm": plain,
    }


def ways_of_decode(ranks: int, device: torch.device, db: str | None) -> tuple[str, Ways]:
    batch, q_heads, kv_heads, dim, kv_len = DECODE["gpu" if device.type == "cuda" else "cpu"]
    dtype, tokens = torch.bfloat16 if device.type == "cuda" else torch.float32, kv_len // ranks
    q = torch.randn(batch, q_heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, tokens, dim, device=device, dtype=dtype) for _ in range(2))
    lengths, out = torch.full((batch,), tokens, dtype=torch.int32, device=device), torch.empty_like(q)
    attend = FlashDecode(kv_heads, q_heads, dim, batch, kv_len, None, dtype, device=device, db=db, sizes=[batch])
    attend(q, k, v, lengths, out=out)
    operator, *_ = attend._known[q.shape, k.shape]
    empty = Empty()

    def make() -> Tensor:
        return torch.empty(batch, q_heads, dim, device=device, dtype=dtype)

    def by_hand() -> Tensor:
        made = torch.empty(batch, q_heads, dim, device=device, dtype=dtype)
        operator(q, k, v, lengths, made)
        return made

    return str(attend.choices[0].config or "bulk-synchronous"), {
        BARE: lambda: operator(q, k, v, lengths, out),
        "module, out given": lambda: attend(q, k, v, lengths, out=out),
        BARE_MADE: by_hand,
        "module": lambda: attend(q, k, v, lengths),
        "torch.ops": lambda: torch.ops.autotax.flash_decode(q, k, v, lengths, attend.handle),
        "torch.empty": make,
        "empty torch.nn.Module": lambda: empty(q, k, v, lengths, out=out),
        "empty operator of torch.ops": lambda: torch.ops.autotax_overhead.decode(q, k, v, lengths, 0),
    }


def measure(world: World | None, rounds: int, db: str | None) -> list[dict[str, Any]]:
    """For each module what it took, and for each way the microseconds of every round on this rank."""
    ranks, device = (world.size, world.device) if world else (1, torch.device("cpu"))
    records = []
    with torch.no_grad():
        for name, prepare in (("AllGatherLinear", ways_of_linear), ("FlashDecode", ways_of_decode)):
            taken, ways = prepare(ranks, device, db)
            times: dict[str, list[float]] = {way: [] for way in ways}
            order = random.Random(ORDER_SEED)  # ranks must make the same calls in the same order
            for number in range(WARM_ROUNDS + rounds):
                for way in order.sample(list(ways), len(ways)):
                    call = ways[way]
                    start = time.perf_counter_ns()
                    call()
                    spent = (time.perf_counter_ns() - start) / 1e3
                    if number >= WARM_ROUNDS:
                        times[way].append(spent)
                if world:
                    world.synchronize()
            records.append({"module": name, "takes": taken, "times": times})
    return records


def reduce(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One module of all ranks: each figure is that of the worst rank."""
    rows = []
    for way in ranks[0]["times"]:
        row: dict[str, Any] = {
            "way": way,
            "p50_us": round(max(statistics.median(rank["times"][way]) for rank in ranks), 3),
            "p99_us": round(max(p99(rank["times"][way]) for rank in ranks), 3),
        }
        rows.append(row | above(ranks, way, JUDGED[way]) if way in JUDGED else row)
    return {"module": ranks[0]["module"], "takes": ranks[0]["takes"], "ways": rows}


def above(ranks: list[dict[str, Any]], way: str, base: str) -> dict[str, Any]:
    """By how much a way is slower than another on the rank where that is most. Differences are taken within a round."""
    per_rank = [[one - other for one, other in zip(rank["times"][way], rank["times"][base], strict=True)] for rank in ranks]
    worst = max(per_rank, key=statistics.median)
    return {
        "above": base,
        "above_p50_us": round(statistics.median(worst), 3),
        "above_interval_us": [round(end, 3) for end in median_interval(worst)],
        "above_p99_us": round(max(map(p99, per_rank)), 3),
    }


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def show(document: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"microseconds of the host for one eager call, {document['place']}, {document['rounds']} rounds")
    for module in document["modules"]:
        table = Table(title=f"{module['module']}: {module['takes']}", title_justify="left")
        for column in ("way", "p50", "p99", "above", "by p50 [95 %]", "by p99"):
            table.add_column(column, justify="left" if column in ("way", "above") else "right")
        for row in module["ways"]:
            figures = [row["way"], f"{row['p50_us']:.1f}", f"{row['p99_us']:.1f}"]
            if "above" in row:
                low, high = row["above_interval_us"]
                figures += [row["above"], f"{row['above_p50_us']:.1f} [{low:.1f}, {high:.1f}]", f"{row['above_p99_us']:.1f}"]
            table.add_row(*figures)
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="host time of eager calls of the modules above the bare launches")
    parser.add_argument("--world-size", type=int, help="default: the GPUs present; 1 without any")
    parser.add_argument("--backend", choices=("cuda", "rocm", "cpu"))
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds after which all ranks are killed")
    options = parser.parse_args()
    try:
        hardware = detect(options.backend)
        count = options.world_size or (hardware.count if hardware.on_gpu else 1)
        check_world_size(hardware, count)
        if options.rounds < 1 or count < 1 or (count != 1 and not hardware.on_gpu):
            raise UsageError(f"{options.rounds} rounds on {count} ranks; rounds must be 1 or more, CPU ranks 1: give others")
        if hardware.on_gpu:
            ranks = run_ranks(measure, count, hardware.backend, options.rounds, options.db, timeout=options.timeout)
        else:
            torch.set_num_threads(1)
            ranks = [measure(None, options.rounds, options.db)]
    except UsageError as error:
        print(f"overhead.py: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"overhead.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    modules = [reduce([rank[i] for rank in ranks]) for i in range(len(ranks[0]))]
    place = str(hardware) if hardware.on_gpu else f"one process on a CPU ({hardware.device})"
    worst = max(row["above_p50_us"] for module in modules for row in module["ways"] if row["way"] in JUDGED)
    document = {"place": place, "software": environment(hardware.backend).to_dict(), "rounds": options.rounds, "modules": modules}
    document |= {"budget_us": BUDGET_US, "worst_above_p50_us": worst, "within_budget": worst <= BUDGET_US}
    show(document)
    print(f"at most {worst:.1f} us above (median); the budget is {BUDGET_US:g} us")
    if options.json:
        options.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if worst <= BUDGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
