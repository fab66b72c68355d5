"""Tunes, proves and compares the published problems of every operator on the GPUs of this host, in calls of bounded time:

    PYTHONPATH=. python results/tables.py FOLDER [--gpus 4] [--seconds 540] [--short] [--only all-gather-gemm,decode-merge]

A call goes on where the last one ended: problems in FOLDER/comparisons.jsonl are done, and trials of others count. Each problem
is tuned for `--each` seconds, its winner soaked, then compared in place with every alternative, all in one pool of ranks. One
whose finals do not end in time is left for later calls.
FOLDER/tuned.db has the winners and FOLDER/tables.md the tables. Operators take turns, and an operator's problems come in steps
through its list, so that an early end leaves a cross-section.
With `--served` nothing is tuned: what look-ups answer, shipped winners too, is compared. With `--refresh` winners, shipped ones
too, are proven again, as `autotax refresh --all` does, and nothing is compared. With `--variants` a search has more trials for
what is in doubt; comparisons still have all alternatives.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from autotax import api
from autotax.core.errors import UsageError
from autotax.core.problem import Problem, with_world_size
from autotax.core.settings import Settings, as_deployed
from autotax.db import Store
from autotax.hardware import Hardware, check_problems, detect
from autotax.operators import registry
from autotax.operators.problem_files import read_shapes
from autotax.report import documents
from autotax.report.formatting import microseconds
from autotax.runner.local_runner import LiveRunner
from autotax.spaces import space_for
from autotax.tuner import Verdict, comparison, finalists, tuning
from autotax.tuner.progress import Silence
from autotax.tuner.tuning import TimeLimit

RESULTS = Path(__file__).parent
SHAPES = (
    "h200x4/all-gather-gemm/shapes.toml",
    "shapes/gemm-reduce-scatter.toml",
    "shapes/gemm-all-reduce.toml",
    "h200x4/flash-decode/shapes.toml",
    "shapes/decode-merge.toml",
    "h100x2/all-reduce-norm/shapes.toml",
    "shapes/fp8.toml",
    "shapes/fp8-fast.toml",
    "shapes/fp8-all-reduce.toml",
    "h200x2/gather-attention/shapes.toml",
)
"""Sizes are those of one rank, for any number of ranks."""
GOLDEN = (math.sqrt(5) - 1) / 2


def problems(files: Sequence[Path], world_size: int, only: Sequence[str] | None) -> list[Problem]:
    """The problems of all files by turns, those of the operators `only` if given. Any beginning is a cross-section."""
    lists = [spread([with_world_size(problem, world_size) for problem in read_shapes(file, world_size)]) for file in files]
    turns = [problem for turn in zip_longest(*lists) for problem in turn if problem is not None]
    return [problem for problem in dict.fromkeys(turns) if not only or problem.op in only]


def spread(problems: Sequence[Problem]) -> list[Problem]:
    """The problems in steps of the golden ratio through their sequence."""
    return [problems[i] for i in sorted(range(len(problems)), key=lambda i: i * GOLDEN % 1)]


def fits(problem: Problem, hardware: Hardware) -> bool:
    """Whether the machine can run the problem, for instance whether its heads divide by the ranks."""
    try:
        check_problems([problem], hardware)
    except UsageError as error:
        print(f"{problem.op} {problem.brief()} is left out: {error}", flush=True)
        return False
    return True


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: each problem with the tuned config, BSP and the best alternative; then geometric means by operator."""
    lines = ["| problem | ours, us | BSP, us | over BSP | best alternative | over it |", "|---|---|---|---|---|---|"]
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        ours = next((entry for entry in row["rows"] if entry["name"] == "autotax"), None)
        if not ours or not ours["speedup_vs_bsp"]:
            lines.append(f"| {row['key']} | - | - | - | {row['error'] or 'nothing was measured'} | - |")
            continue
        bsp, peer = float(ours["speedup_vs_bsp"]), float(row["speedup_vs_best_peer"] or ours["speedup_vs_bsp"])
        ratios[row["problem"]["op"]].append((bsp, peer))
        ours_us, bsp_us = f"{ours['variant']} {microseconds(ours['latency_us'])}", microseconds(ours["latency_us"] * bsp)
        lines.append(f"| {row['key']} | {ours_us} | {bsp_us} | {bsp:.2f}x | {row['best_peer'] or 'BSP'} | {peer:.2f}x |")
    lines += ["", "| operator | problems | over BSP | least | over the best alternative | least |", "|---|---|---|---|---|---|"]
    for op, pairs in ratios.items():
        bsps, peers = zip(*pairs, strict=True)
        means = [f"{geometric_mean(some):.2f}x | {min(some):.2f}x" for some in (bsps, peers)]
        lines.append(f"| {op} | {len(pairs)} | {' | '.join(means)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, help="ranks; by default all GPUs")
    parser.add_argument("--seconds", type=float, default=540, help="begin no problem after which less than one's time is left")
    parser.add_argument("--each", type=float, default=20, help="seconds of tuning for a problem")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--soak", type=int, default=500)
    parser.add_argument("--short", action="store_true", help="finals of one baseline and two challengers, 0.25 s a job")
    parser.add_argument("--served", action="store_true", help="compare what is tuned already")
    parser.add_argument("--refresh", action="store_true", help="prove again what is tuned already")
    parser.add_argument("--only", type=lambda text: text.split(","), help="operators")
    parser.add_argument("--variants", type=lambda text: text.split(","), help="search these alone, where a problem has them")
    parser.add_argument("--load", action="append", default=[], help="a module or .py file with variants")
    parser.add_argument("--shapes", type=Path, nargs="+", default=[RESULTS / name for name in SHAPES])
    options = parser.parse_args()
    if options.short:
        for module in (finalists, tuning):  # one imports these names from the other
            module.BASELINES, module.CHALLENGERS = 1, 2
        finalists.ROUND_EFFORT = replace(finalists.ROUND_EFFORT, seconds=0.25)
        comparison.EFFORT = replace(comparison.EFFORT, seconds=0.4)
    for module in options.load:
        registry.load(module)
    ends, hardware = time.monotonic() + options.seconds, detect()
    options.folder.mkdir(parents=True, exist_ok=True)
    log, db = options.folder / "comparisons.jsonl", options.folder / "tuned.db"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {row["key"] for row in rows}
    settings = Settings(trials=options.trials, timeout_s=options.each, soak=options.soak)
    coming = problems(options.shapes, options.gpus or hardware.default_world_size, options.only)

    def searched(problem: Problem) -> Settings:
        """The settings with those of `--variants` that the problem has, and BSP."""
        has = space_for(problem, hardware).variants
        chosen = tuple(name for name in has if name == "bsp" or name in (options.variants or ()))
        return replace(settings, variants=chosen) if len(chosen) > 1 else settings

    jobs = [(problem, searched(problem)) for problem in coming if problem.key not in done and fits(problem, hardware)]
    print(f"{len(done)} problems are done, {len(jobs)} to come", flush=True)

    def compare(problem: Problem, runner: LiveRunner) -> None:
        compared = api.compare_on(runner, problem, hardware, as_deployed(None, hardware), db, every_variant=False)
        rows.append({"key": problem.key, **documents.of_comparison(compared)})
        with log.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print("\n".join(table(rows[-1:])[2:3]), flush=True)

    def tuned(verdict: Verdict, runner: LiveRunner) -> None:
        if verdict.late:  # a look-up would answer BSP, and later calls would take the problem for done
            print(f"{verdict.problem.key} is undecided: {verdict.notices[-1]}", flush=True)
        else:
            compare(verdict.problem, runner)

    def served() -> Iterator[None]:
        with api.ranks(hardware, coming[0].world_size) as runner:
            for problem, _ in jobs:
                yield compare(problem, runner)

    def refreshed(store: Store) -> Iterator[None]:
        proven = {winner.problem for winner in store.winners(with_samples=False)}
        winners = api.stale_here(store, hardware, [one for one in coming if one not in proven], None, everything=True)
        winners.sort(key=lambda stale: coming.index(stale.problem))
        limit = TimeLimit(options.seconds)
        for one in api.refresh_on(
            winners, hardware, store, lambda *_: nullcontext(Silence()), soak=options.soak, limit=limit, each_s=options.each
        ):
            won = one.verdict.winner
            print(f"{one.verdict.problem.brief()}: {one.outcome}, {won.speedup if won else math.nan:.2f}x", flush=True)
            yield

    with Store.open(db, create=True) as store:
        longest, began = 0.0 if options.served else options.each, time.monotonic()
        if options.refresh:
            work: Iterator[object] = refreshed(store)
        elif options.served:
            work = served()
        else:
            work = api.tune_jobs(jobs, hardware, store, lambda *_: nullcontext(Silence()), then=tuned)
        for _ in work:
            # A slow one, such as the first with a library that compiles, counts for less with each that follows.
            longest, began = max(0.7 * longest, time.monotonic() - began), time.monotonic()
            if began + longest > ends:
                break
    (options.folder / "tables.md").write_text("\n".join(table(rows)) + "\n")
    print(f"{len(rows)} problems are done; the tables are in {options.folder / 'tables.md'}")


if __name__ == "__main__":
    main()
