"""Trains the priors on all recorded trials: boosted trees on log(latency / analytical time) over the features of autotax.tuner.

    pip install lightgbm
    python results/search/train.py FOLDS > results/search/train.txt

Writes autotax/shipped/prior-OP.npz, trained on all problems, and into FOLDS what replays use: OP-I.npz, each trained without one
of ten groups of problems, so that a problem is searched with a prior that has seen none of its trials, on 2 GPUs or on 4; and two
surrogates, OP-boosted.npz and OP-forest.npz (extremely randomised), fitted to all trials. The age of a trial's kernel sources is
a feature, so that trials of old sources inform the prior of new ones.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightgbm as lgb
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autotax.core.config import Config  # noqa: E402
from autotax.core.problem import Problem  # noqa: E402
from autotax.hardware import Hardware  # noqa: E402
from autotax.operators.problem_files import problem_of  # noqa: E402
from autotax.tuner import model as prior  # noqa: E402
from results.search import landscapes  # noqa: E402
from results.search.held_out_priors import group_of  # noqa: E402

OPERATORS = ("flash-decode", "all-gather-gemm", "gemm-reduce-scatter")
FOLDS, TREES = 10, 250
AGE = "age"
"""Later sources of the same variant that were recorded; -1, which is younger than all, where the feature is not told."""
SETTINGS = {
    "objective": "regression_l2", "learning_rate": 0.06, "num_leaves": 24, "max_depth": 8, "min_data_in_leaf": 6,
    "lambda_l2": 1.0, "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1, "verbose": -1, "seed": 0,
    "deterministic": True, "num_threads": 1, "force_col_wise": True,
}  # fmt: skip

SURROGATES = {
    "boosted": SETTINGS,
    "forest": SETTINGS | {
        "boosting": "rf", "extra_trees": True, "bagging_fraction": 0.63, "feature_fraction": 0.9, "num_leaves": 250,
        "max_depth": 16, "min_data_in_leaf": 2, "lambda_l2": 0.0, "seed": 7,
    },
}  # fmt: skip
FOREST = 60
"""Trees of the forest."""


@dataclass(frozen=True)
class Trial:
    problem: Problem
    hardware: Hardware
    config: Config
    age: int
    us: float


def trials_of(op: str) -> list[Trial]:
    """All timed trials of graphs with a cold L2; of several of a config and sources the median."""
    latencies: dict[tuple[str, str, Config, str], list[float]] = defaultdict(list)
    problems, machines, digests = {}, {}, defaultdict(dict)
    for path in sorted((ROOT / "results").glob("h*x[24]/landscapes.json.gz")):
        file = landscapes.read(path)
        for run, result in file.of_runs():
            conditions = file.conditions[result.conditions]
            usual = conditions.get("mode") == "graph" and conditions.get("l2") == "cold" and not conditions.get("skew_us")
            if run.problem.startswith(op) and result.latency_us and usual and not run.imported:
                problems[run.problem] = problem_of(file.problems[run.problem])
                machines[run.hardware] = Hardware(**file.hardware[run.hardware])
                digests[result.config.variant][result.kernel_digest] = max(
                    result.timestamp, digests[result.config.variant].get(result.kernel_digest, "")
                )
                latencies[run.problem, run.hardware, result.config, result.kernel_digest].append(result.latency_us)
    ages = {
        (variant, digest): age
        for variant, seen in digests.items()
        for age, digest in enumerate(sorted(seen, key=seen.__getitem__, reverse=True))
    }
    made = []
    for (problem, hardware, config, digest), us in latencies.items():
        try:
            prior.named(problems[problem], machines[hardware], config)
        except KeyError:  # of a variant that had other parameters then
            continue
        age = ages[config.variant, digest]
        made.append(Trial(problems[problem], machines[hardware], config, age, float(np.median(us))))
    return made


def table(trials: Sequence[Trial]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, features [trials, names] and log(latency / analytical time) of each."""
    rows = [prior.named(t.problem, t.hardware, t.config) | {AGE: float(t.age)} for t in trials]
    names = sorted({name for row in rows for name in row})
    absent = [0.0 if "=" in name else -1.0 for name in names]
    x = np.array([[row.get(name, empty) for name, empty in zip(names, absent, strict=True)] for row in rows], np.float32)
    return names, x, np.array([math.log(t.us) - prior.log_base(t.problem) for t in trials])


def fitted(
    names: list[str], x: np.ndarray, y: np.ndarray, error: float = 0.0, kind: str = "boosted", devices: Iterable[str] = ()
) -> prior.Trees:
    settings, average = SURROGATES[kind], kind == "forest"
    booster = lgb.train(settings, lgb.Dataset(x, y), num_boost_round=FOREST if average else TREES)
    made = [arrays_of(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]]
    nodes = max(len(tree) for tree in made)
    whole = np.zeros((len(made), nodes, 5))
    for at, tree in enumerate(made):
        whole[at, : len(tree)] = tree
    feature, threshold, left, right, value = np.moveaxis(whole, 2, 0)
    value = value / len(made) if average else value
    kinds = (np.int16, np.float32, np.int16, np.int16, np.float32)
    arrays = [a.astype(kind) for a, kind in zip((feature, threshold, left, right, value), kinds, strict=True)]
    return prior.Trees(tuple(names), tuple(sorted(set(devices))), *arrays, depth=settings["max_depth"], error=error)


def arrays_of(structure: dict[str, object]) -> list[list[float]]:
    """[feature, threshold, left, right, value] of each node, the root first."""
    rows: list[list[float]] = []

    def add(node: dict) -> int:
        at = len(rows)
        rows.append([])
        if "leaf_value" in node:
            rows[at] = [0, 0.0, at, at, node["leaf_value"]]
        else:
            low, high = add(node["left_child"]), add(node["right_child"])
            rows[at] = [node["split_feature"], node["threshold"], low, high, 0.0]
        return at

    add(structure)
    return rows


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print("$ python results/search/train.py FOLDS")
    for op in OPERATORS:
        trials = trials_of(op)
        names, x, y = table(trials)
        groups = [group_of(trial.problem) for trial in trials]
        numbers = {group: at % FOLDS for at, group in enumerate(dict.fromkeys(groups))}
        fold = np.array([numbers[group] for group in groups])
        (folder / f"{op}.json").write_text(json.dumps(numbers))
        predicted, without = np.zeros(len(y)), []
        for number in range(FOLDS):
            inside, outside = fold != number, fold == number
            trees = fitted(names, x[inside], y[inside], devices=(trial.hardware.device for trial in trials))
            without.append(trees)
            predicted[outside] = trees.predict(x[outside])
        error = y - predicted
        close = report(op, trials, error, y)
        for number, trees in enumerate(without):
            replace(trees, error=close).save(folder / f"{op}-{number}.npz")
        devices = [trial.hardware.device for trial in trials]
        trees = fitted(names, x, y, close, devices=devices)
        path = prior.FOLDER / f"prior-{op}.npz"
        trees.save(path)
        print(f"  shipped: {len(trees.value)} trees, {path.stat().st_size / 1024:.0f} KiB, error on its own trials "
              f"{np.std(y - trees.predict(x)):.3f}")  # fmt: skip
        for kind in SURROGATES:
            part = np.random.default_rng(0).integers(0, 5, len(y))
            missed = np.zeros(len(y))
            for number in range(5):
                trees = fitted(names, x[part != number], y[part != number], kind=kind)
                missed[part == number] = y[part == number] - trees.predict(x[part == number])
            error = float(np.sqrt(np.mean(missed**2)))
            fitted(names, x, y, error, kind, devices).save(folder / f"{op}-{kind}.npz")
            print(f"  surrogate {kind}: error {error:.3f}, median {np.median(abs(missed)):.3f} on one config in five, left out; "
                  f"{np.mean(abs(missed) < 2 * error):.1%} within two errors")  # fmt: skip


def _place(trial: Trial) -> tuple[str, str, str]:
    return trial.problem.key, trial.hardware.device, trial.config.variant


def report(op: str, trials: Sequence[Trial], error: np.ndarray, y: np.ndarray) -> float:
    youngest: dict[tuple[str, str, str], int] = {}
    for trial in trials:
        youngest[_place(trial)] = min(trial.age, youngest.get(_place(trial), trial.age))
    by_problem = defaultdict(list)
    for at, trial in enumerate(trials):
        if trial.age == youngest[_place(trial)]:
            by_problem[_place(trial)[:2]].append(at)
    print(f"{op}: {len(trials)} configs of {len({t.problem.key for t in trials})} problems")
    print(f"  error of log latency on problems left out: {np.sqrt(np.mean(error**2)):.3f}, median {np.median(abs(error)):.3f}; "
          f"without trees {np.std(y):.3f}")  # fmt: skip
    close = [at for rows in by_problem.values() for at in rows if trials[at].us < 1.2 * min(trials[i].us for i in rows)]
    inside = np.concatenate([error[rows] - np.median(error[rows]) for rows in by_problem.values()])
    print(f"  of configs within 20 % of a problem's best: {np.sqrt(np.mean(error[close] ** 2)):.3f}; "
          f"within problems, their own level taken off: {np.std(inside):.3f}")  # fmt: skip
    ranks = [
        np.corrcoef(np.argsort(np.argsort(y[rows])), np.argsort(np.argsort((y - error)[rows])))[0, 1]
        for rows in by_problem.values()
        if len(rows) > 20
    ]
    of_close = float(np.sqrt(np.mean(error[close] ** 2)))
    print(f"  rank correlation within a problem: median {np.median(ranks):.2f}, least {min(ranks):.2f} of {len(ranks)}")
    return of_close


if __name__ == "__main__":
    main(Path(sys.argv[1]))
