"""The searches of replay.py on recorded trials and on two surrogates, each problem left out of all fitting of its prior.

    python results/search/train.py results/search/models > results/search/train.txt
    python results/search/replays.py play RAW SEEDS [KIND ...] [-- STRATEGY ...]
    python results/search/replays.py table RAW > results/search/replays.txt

`play` appends a line of JSON to RAW for each search, a seed after the other; it goes on where it was stopped. KIND is `recorded`,
`boosted` or `forest`. `table` tells only seeds of which each problem was played. Nothing is measured here.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from results.search import landscapes, replay  # noqa: E402
from results.search.held_out_priors import held_out, trees_of  # noqa: E402

MODELS = Path(__file__).with_name("models")
OPERATORS = "flash-decode", "all-gather-gemm", "gemm-reduce-scatter"
KINDS = replay.RECORDED, "boosted", "forest"
AHEAD, TRIALS = 8, 60
NEW, BEFORE = "prior and GP, in turn with the queue", "queue, neighbours and TPE (before)"
WHOLE = "the end of: "
"""Before the name of a strategy: searches that are played to the end, to see where they would have ended by themselves."""
THRESHOLDS, FINALISTS = (0.003, 0.007, 0.015), (1, 4, 6)

Row = dict[str, Any]


@lru_cache(maxsize=8)
def files() -> dict[str, landscapes.Landscapes]:
    return {path.parent.name: landscapes.read(path) for path in sorted((ROOT / "results").glob("h*x[24]/landscapes.json.gz"))}


@cache
def grounds(kind: str, op: str) -> list[replay.Landscape]:
    """All problems of an operator that have enough recorded trials."""
    made = []
    for file in files().values():
        for key in (key for key in file.problems if key.startswith(f"{op}/")):
            if kind == replay.RECORDED:
                ground = replay.recorded(file, key)
            else:
                ground = replay.surrogate(file, key, kind, trees_of(MODELS, op, kind))
            if ground:
                made.append(ground)
    return made


def search(ground: replay.Landscape, name: str, seed: int) -> Row:
    """One search, as a line of the raw file."""
    whole = name.startswith(WHOLE)
    prior = held_out(MODELS, ground.problem, ground.hardware)
    began = time.process_time()
    strategy = replay.STRATEGIES[name.removeprefix(WHOLE)]
    played = replay.play(ground, strategy, TRIALS, seed, AHEAD, prior, whole=whole)
    row: Row = {"s": round(time.process_time() - began, 3)}
    row |= {f"within {share:g}": played.within(share) for share in replay.SHARES}
    row |= {f"loss {after}": round(played.best_after(after) - 1, 5) for after in replay.LOSSES}
    if whole:
        best = played.best_after(TRIALS)
        row |= {"ends": {}, "best": round(best - 1, 5)}
        row["finals"] = {count: round(played.of_finalists(count) / best - 1, 5) for count in FINALISTS}
        for threshold in THRESHOLDS:
            below = (at for at, gain in enumerate(played.gains, 1) if gain is not None and gain < threshold)
            end = next(below, len(played.losses))
            row["ends"][threshold] = [end, round(played.best_after(end) - 1, 5)]
    return row


def play(raw: Path, seeds: int, kinds: list[str], names: list[str]) -> None:
    done = {identity(row) for row in rows(raw)}
    with raw.open("a") as out:
        for seed in range(seeds):
            for kind in kinds:
                for op in OPERATORS:
                    for name in names:
                        for ground in grounds(kind, op):
                            who: Row = {"kind": kind, "strategy": name, "seed": seed, "problem": ground.problem.key}
                            if identity(who) not in done:
                                print(json.dumps(who | search(ground, name, seed)), file=out, flush=True)


def identity(row: Row) -> tuple[Any, ...]:
    return row["kind"], row["strategy"], row["seed"], row["problem"]


def rows(raw: Path) -> list[Row]:
    return [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []


def table(raw: Path) -> None:
    print("$ python results/search/replays.py play RAW SEEDS; python results/search/replays.py table RAW")
    print(f"{AHEAD} configs asked ahead, at most {TRIALS} trials; processor seconds a search at the end of a line")
    groups: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows(raw):
        groups[row["kind"], row["problem"].partition("/")[0]][row["strategy"]].append(row)
    for kind in KINDS:
        for op in OPERATORS:
            if strategies := groups.get((kind, op)):
                tell(kind, op, strategies)


def tell(kind: str, op: str, strategies: dict[str, list[Row]]) -> None:
    problems = max(len({row["problem"] for row in played}) for played in strategies.values())
    print(f"\n{op}, {kind}: {problems} problems of 2 H100, of 2 and of 4 H200")
    if kind != replay.RECORDED:
        print(f"its error on configs left out is {trees_of(MODELS, op, kind).error:.3f} of log latency")
    losses = "after 12      after 16 (median, 95 %)"
    print(f"{'trials to within 1 % and 3 % of the best':44} seeds  mean median  95 %  median  95 %   {losses}")
    for name, played in strategies.items():
        if complete := whole_seeds(played, problems):
            (ends if name.startswith(WHOLE) else line)(name, complete)


def whole_seeds(played: list[Row], problems: int) -> list[Row]:
    """The searches of seeds of which each problem was played."""
    by_seed: dict[int, list[Row]] = defaultdict(list)
    for row in played:
        by_seed[row["seed"]].append(row)
    return [row for some in by_seed.values() if len(some) == problems for row in some]


def line(name: str, played: list[Row]) -> None:
    words = []
    for share in replay.SHARES:
        within = [float(row[f"within {share:g}"] or TRIALS + 1) for row in played]
        if not words:
            words.append(f"{statistics.mean(within):5.1f}")
        words.append(f"{shown(statistics.median(within)):>6} {shown(quantile(within, 0.95)):>5} ")
    for after in replay.LOSSES:
        lost = [row[f"loss {after}"] for row in played]
        words.append(f" {statistics.median(lost):6.2%} {quantile(lost, 0.95):6.1%}")
    seconds = statistics.mean(row["s"] for row in played)
    print(f"{name:44} {len({row['seed'] for row in played}):5} {' '.join(words)}   ({seconds:.2f} s)")


def ends(name: str, played: list[Row]) -> None:
    """The loss of a run that ends by itself, if further trials could only have come from this search."""
    print(f"{name} ({len({row['seed'] for row in played})} seeds)")
    for threshold in map(str, THRESHOLDS):
        after = [float(row["ends"][threshold][0]) for row in played]
        lost = [row["ends"][threshold][1] for row in played]
        missed = [(1 + loss) / (1 + row["best"]) - 1 for loss, row in zip(lost, played, strict=True)]
        print(
            f"  where eight more should win less than {float(threshold):.1%} it ends after {statistics.median(after):g} trials "
            f"({quantile(after, 0.95):g} at 95 %)\n    {TRIALS} trials would have won {statistics.mean(missed):.2%} more "
            f"(95 %: {quantile(missed, 0.95):.1%}), no more than 1 % in {sum(x <= 0.01 for x in missed) / len(missed):.0%}; "
            f"within 1 % of the best known in {sum(x <= 0.01 for x in lost) / len(lost):.0%}"
        )
    for count in map(str, FINALISTS):
        short = [row["finals"][count] for row in played]
        summary = f"{statistics.mean(short):.3%} (95 %: {quantile(short, 0.95):.2%})"
        print(f"  the best of {count} finalists over the best measured: {summary}")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def shown(trials: float) -> str:
    return f">{TRIALS}" if trials > TRIALS else f"{trials:g}"


def main(words: list[str]) -> None:
    if words[0] == "table":
        return table(Path(words[1]))
    raw, seeds, *rest = words[1:]
    at = rest.index("--") if "--" in rest else len(rest)
    return play(Path(raw), int(seeds), rest[:at] or list(KINDS), rest[at + 1 :] or list(replay.STRATEGIES))


if __name__ == "__main__":
    main(sys.argv[1:])
