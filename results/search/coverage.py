"""How often an independent job lands inside the interval that a winner is stored with, on recorded repeats.

    python results/search/coverage.py collect   # results/search/repeats.json.gz, from databases in the history of the repository
    python results/search/coverage.py > results/search/coverage.txt

A repeat is a finalist round or a comparison of the same config and the same bulk-synchronous config, of the same sources, on the
same machine, in another run: other processes, at another time. `before` is the interval that winners were stored with until then.

Live: the winners of 2 H100, each with its two jobs, and the comparison of another command, which these intervals had not seen.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import math
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autotax.core.config import Config  # noqa: E402
from autotax.tuner import finalists as ours  # noqa: E402

COMMIT = "c0913ff"
FILE = Path(__file__).with_name("repeats.json.gz")
LIVE, ROUNDS = ROOT / "results/h100x2", 50
"""A folder of results, and the rounds of each of its jobs."""
BEFORE = 1 - 0.05 / 16
"""Confidence of an interval of the median, as before."""
Job = tuple[dict[str, Any], dict[str, list[float]]]


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


def config(document: Any) -> str:
    return json.dumps({"variant": document["variant"], "params": document["params"]}, sort_keys=True)


def collect() -> None:
    groups: dict[str, dict[float, list[float]]] = defaultdict(dict)
    at: dict[tuple[str, str, float], str] = {}
    names = git("ls-tree", "-r", "--name-only", COMMIT, "--", "results").decode().split()
    for name in (name for name in names if name.endswith(".db")):
        for place, rounds in finalists(name):
            for one, (digest, base) in rounds.items():
                for other, (digest_other, us) in rounds.items():
                    if json.loads(one)["variant"] == "bsp" and one != other:
                        key = json.dumps([*place, one, digest, other, digest_other])
                        ratios = [b / c for b, c in zip(base, us, strict=True)]
                        groups[key][middle := round(statistics.median(ratios), 9)] = ratios
                        at[place[0], other, middle] = key
    winners = {round(w[0], 9): w for name in names if name.endswith(".db") for w in crowned(name)}
    for name in (name for name in names if "/compare" in name and name.endswith(".json")):
        document = json.loads(git("show", f"{COMMIT}:{name}"))
        for comparison in document if isinstance(document, list) else [document]:
            rows = {row["name"]: row for row in comparison.get("rows", []) if row["verified"] and "rounds_us" in row}
            if {"autotax", "bsp-graph"} <= rows.keys() and comparison["match"] == "exact":
                tuned, base = rows["autotax"], rows["bsp-graph"]
                mine = config({"variant": tuned["variant"], "params": tuned["config"]})
                theirs = config({"variant": "bsp", "params": base["config"]})
                for speedup, (_, key, low, high, winner, baseline) in winners.items():
                    same = winner == mine and baseline == theirs and f"[{low:.2f}, {high:.2f}]" in comparison["reason"]
                    if same and (key, mine, speedup) in at and sizes(comparison["problem"]) == sizes(key):
                        ratios = [b / c for b, c in zip(base["rounds_us"], tuned["rounds_us"], strict=True)]
                        groups[at[key, mine, speedup]][round(statistics.median(ratios), 9)] = ratios
                        break
    repeats = {key: [[round(r, 5) for r in job] for job in jobs.values()] for key, jobs in groups.items() if len(jobs) > 1}
    FILE.write_bytes(gzip.compress(json.dumps(repeats).encode(), 9, mtime=0))


def sizes(problem: Any) -> set[str]:
    """What a key has of sizes, as `m=512`."""
    if isinstance(problem, str):
        return {word for word in problem.partition("/")[2].split(",") if word.partition("=")[2].isdecimal()}
    return {f"{name}={value}" for name, value in problem.items() if isinstance(value, int) and (name, value) != ("page", 0)}


def opened(name: str) -> Iterator[sqlite3.Connection]:
    with tempfile.NamedTemporaryFile(suffix=".db") as file:
        Path(file.name).write_bytes(git("show", f"{COMMIT}:{name}"))
        database = sqlite3.connect(f"file:{file.name}?mode=ro&immutable=1", uri=True)
        database.row_factory = sqlite3.Row
        yield database
        database.close()


def finalists(name: str) -> Iterator[tuple[tuple[str, ...], dict[str, tuple[str, list[float]]]]]:
    """Of each finalist round where it was, and the rounds of each config."""
    runs: dict[int, dict[str, tuple[str, list[float]]]] = defaultdict(dict)
    where: dict[int, tuple[str, ...]] = {}
    for database in opened(name):
        rows = database.execute("select * from autotax_trial t join autotax_run r on t.run_id = r.id where t.status = 'ok'")
        for row in rows:
            conditions = json.loads(row["conditions"])
            if conditions.get("stage") == "finalists" and row["samples"] and "imported_from" not in row["settings"]:
                deployed = [conditions.get(word) for word in ("mode", "l2", "skew_us")]
                digest = row["kernel_digest"] if "kernel_digest" in row.keys() else ""  # noqa: SIM118
                rounds = [max(sample) for sample in zip(*json.loads(row["samples"]), strict=True)]
                runs[row["run_id"]][config(json.loads(row["config"]))] = digest, rounds
                where[row["run_id"]] = (row["problem_key"], row["hardware_digest"], json.dumps(deployed))
    for run, rounds_of in runs.items():
        if len({len(rounds) for _, rounds in rounds_of.values()}) == 1:
            yield where[run], rounds_of


def crowned(name: str) -> Iterator[tuple[float, str, float, float, str, str]]:
    for database in opened(name):
        for row in database.execute("select * from autotax_winner"):
            ends = row["interval_low"], row["interval_high"]
            yield row["speedup"], row["problem_key"], *ends, *(config(json.loads(row[n])) for n in ("config", "baseline"))


Case = tuple[str, str, list[list[float]], float, float]
"""Operator, hardware, the jobs of a winner, the median of another one, weight."""


def cases(groups: dict[str, list[list[float]]], jobs: int) -> list[Case]:
    """Every choice of so many jobs and of another one; a group counts once."""
    choices = []
    for key, repeats in groups.items():
        problem, hardware, *_ = json.loads(key)
        chosen = [
            (list(some), other)
            for some in itertools.combinations(range(len(repeats)), jobs)
            for other in range(len(repeats))
            if other not in some
        ]
        for some, other in chosen:
            median = statistics.median(repeats[other])
            choices.append((problem.partition("/")[0], hardware, [repeats[i] for i in some], median, 1 / len(chosen)))
    return choices


def live() -> Iterator[tuple[str, list[list[float]], float, tuple[float, float]]]:
    """Of each winner its operator, its jobs, what the comparison found, and the interval that it was stored with."""
    stored = {
        (json.dumps(winner["problem"], sort_keys=True), config(winner["config"])): winner
        for winner in json.loads(lzma.decompress((LIVE / "winners.json.xz").read_bytes()))["winners"]
    }
    for path in sorted(LIVE.glob("*/compare*.json.xz")):
        for comparison in json.loads(lzma.decompress(path.read_bytes()))["results"]:
            row = comparison["rows"][0]
            mine = config({"variant": row["variant"], "params": row["config"]})
            if won := stored.get((json.dumps(comparison["problem"], sort_keys=True), mine)):
                base, us = (rounds_of(won, side) for side in ("baseline", "config"))
                ratios = [b / c for b, c in zip(base, us, strict=True)]
                jobs = [ratios[at : at + ROUNDS] for at in range(0, len(ratios), ROUNDS)]
                yield comparison["problem"]["op"], jobs, row["speedup_vs_bsp"], tuple(won["interval"])


def rounds_of(won: Any, side: str) -> list[float]:
    """The rounds of the slowest rank, in microseconds."""
    ranks = won["samples"][Config.of(won[side]["variant"], won[side]["params"]).digest]
    return [max(sample) for sample in zip(*ranks, strict=True)]


def share(held: list[tuple[bool, float]]) -> float:
    return sum(weight for inside, weight in held if inside) / sum(weight for _, weight in held)


def interval(jobs: list[list[float]]) -> tuple[float, float]:
    return ours.estimate(jobs, [[1.0] * len(job) for job in jobs]).another_job


def before(jobs: list[list[float]]) -> tuple[float, float]:
    return ours.median_interval([ratio for job in jobs for ratio in job], BEFORE)


def row_of(name: str, how: Any, some: list[Case]) -> str:
    ends = [(how(jobs), median, weight) for _, _, jobs, median, weight in some]
    inside = share([(low <= median <= high, weight) for (low, high), median, weight in ends])
    half = sum(weight * math.log(high / low) / 2 for (low, high), _, weight in ends) / sum(w for *_, w in ends)
    return f"{name:42} {inside:6.1%} of {len(some):5} cases, half width {half:.2%}"


def main() -> None:
    groups = json.loads(gzip.decompress(FILE.read_bytes()))
    repeats = sum(map(len, groups.values()))
    print("$ python results/search/coverage.py")
    print(f"{len(groups)} pairs of a config and a bulk-synchronous one, {repeats} independent jobs (recorded on 2 and 4 H200)")
    for op in ("flash-decode", "all-gather-gemm"):
        print(f"\n{op}: another job lands inside the interval of")
        for jobs, name, how in ((1, "one job, as before", before), (2, "two jobs, as before", before),
                                (1, "one job, across jobs", interval), (2, "two jobs, across jobs", interval),
                                (3, "three jobs, across jobs", interval)):  # fmt: skip
            print("  " + row_of(name, how, [case for case in cases(groups, jobs) if case[0] == op]))
    print("\nWinners of 2 H100: the comparison of another command lies inside the interval of two jobs")
    winners = list(live())
    for op in dict.fromkeys(winner[0] for winner in winners):
        some = [(jobs, median, low <= median <= high) for o, jobs, median, (low, high) in winners if o == op]
        subset: list[Case] = [(op, "", jobs, median, 1.0) for jobs, median, _ in some]
        print(f"  {row_of(op, interval, subset)}; as stored: {sum(inside for *_, inside in some)}")
    print("  " + row_of("all", interval, [(op, "", jobs, median, 1.0) for op, jobs, median, _ in winners]))
    kept = sum(interval(jobs)[0] <= median for _, jobs, median, _ in winners)
    print(f"  at least the lower bound                    {kept / len(winners):5.1%} of {len(winners):5} cases")
    print("\nConstants fitted on one machine (the narrowest of a grid with 95 %), coverage of two jobs on the other")
    machines = sorted({json.loads(key)[1] for key in groups}, key=lambda m: sum(json.loads(k)[1] == m for k in groups))[-2:]
    for here, there in (machines, machines[::-1]):
        fitted, test = ([case for case in cases(groups, 2) if case[1] == machine] for machine in (here, there))
        best = min(
            (
                (row_of("", interval, fitted), floor, part)
                for floor, part in itertools.product((0.002, 0.003, 0.004, 0.006, 0.009), (0.3, 0.5, 0.7, 0.9))
                if set_constants(floor, part) and coverage(fitted) >= 0.95
            ),
            key=lambda candidate: float(candidate[0].rpartition(" ")[2].rstrip("%")),
        )
        set_constants(*best[1:])
        print("  " + row_of(f"floor {best[1]}, share {best[2]}", interval, test))


def set_constants(floor: float, part: float) -> bool:
    ours.JOB_FLOOR, ours.JOB_SHARE = floor, part
    return True


def coverage(some: list[Case]) -> float:
    return share([(low <= median <= high, weight) for _, _, jobs, median, weight in some for low, high in [interval(jobs)]])


if __name__ == "__main__":
    collect() if sys.argv[1:] == ["collect"] else main()
