"""The search with and without neighbours of the best, on landscapes fitted to all trials in results/: nothing is measured here.

    pip install scikit-learn; python results/search/simulate.py > results/search/simulate.txt

A landscape is extremely randomised trees over a problem's sizes and a config's parameters, fitted to the latency over that of
BSP, one model a variant. It is smoother than the truth: what it tells is which search gets lower on it, not by how much on GPUs.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from sklearn.ensemble import ExtraTreesRegressor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autotax.core.config import Config  # noqa: E402
from autotax.core.problem import Problem  # noqa: E402
from autotax.db import Store, shipped  # noqa: E402
from autotax.operators import problem_from_dict  # noqa: E402
from autotax.tuner.search import Search  # noqa: E402
from results.search import landscapes  # noqa: E402
from tests.tuner.shared import H200, run  # noqa: E402
from tests.tuner.synthetic import SyntheticRunner  # noqa: E402

SEEDS, TRIALS, POINTS = (0,), 90, (45, 60, 75, 90)
SIZES = {"flash-decode": ("batch", "q_heads", "kv_len", "world_size"), "all-gather-gemm": ("m", "n", "k", "world_size")}


def number(value: Any) -> float:
    return math.log2(value + 1) if isinstance(value, int) else float(sum(map(ord, value)) % 97)


class Landscape:
    def __init__(self, op: str) -> None:
        self.op = op
        trials = [trial for path in sorted((ROOT / "results").glob("h200x?/landscapes.json.gz")) for trial in read(path, op)]
        self.bsp: dict[str, float] = {}
        for key, _, variant, _, us in trials:
            if variant == "bsp":
                self.bsp[key] = min(us, self.bsp.get(key, math.inf))
        self.problems = {key: problem for key, problem, *_ in trials if problem["world_size"] == 4 and key in self.bsp}
        self.names = sorted({name for *_, values, _ in trials for name in values})
        points: dict[str, tuple[list[list[float]], list[float]]] = defaultdict(lambda: ([], []))
        for key, problem, variant, values, us in trials:
            if key in self.bsp:
                points[variant][0].append(self.features(problem, values))
                points[variant][1].append(math.log(us / self.bsp[key]))
        self.models = {name: ExtraTreesRegressor(60, random_state=0).fit(x, y) for name, (x, y) in points.items()}

    def features(self, problem: dict[str, Any], values: dict[str, Any]) -> list[float]:
        sizes = [math.log2(problem[name]) for name in SIZES[self.op]]
        return sizes + [number(values[name]) if name in values else -1.0 for name in self.names]

    def us(self, key: str, config: Config) -> float:
        if config.variant not in self.models:
            return 1e4
        (log_ratio,) = self.models[config.variant].predict([self.features(self.problems[key], dict(config.values))])
        return math.exp(log_ratio) * self.bsp[key]


def read(path: Path, op: str) -> list[tuple[str, dict[str, Any], str, dict[str, Any], float]]:
    """(problem's key, problem, variant, parameters, us) of all trials of the search with a latency."""
    file = landscapes.read(path)
    return [
        (run.problem, problem, result.config.variant, result.config.values, result.latency_us)
        for run, result in file.of_runs()
        if (problem := file.problems[run.problem])["op"] == op and not result.final and result.latency_us is not None
    ]


def simulate(op: str, neighbours: bool) -> dict[str, list[list[float]]]:
    """For each problem and seed, the latency of the best config after so many trials as POINTS says."""
    landscape = Landscape(op)
    latencies: dict[str, list[list[float]]] = defaultdict(list)
    for key, fields in landscape.problems.items():
        problem: Problem = problem_from_dict(fields)
        memory: dict[Config, float] = {}

        def us(config: Config, key: str = key, memory: dict[Config, float] = memory) -> float:
            if config not in memory:
                memory[config] = landscape.us(key, config)
            return memory[config]

        for seed in SEEDS:
            runner = SyntheticRunner(us, noise=0.003)
            runner.look_ahead = 8
            without = mock.patch.object(Search, "_neighbour", lambda *_: None) if not neighbours else mock.MagicMock()
            nothing = mock.patch.object(shipped, "known_winners", list)  # what won before is the subject of precedents.py
            with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/t.db") as store, without, nothing:
                run(store, runner, problem, H200, trials=TRIALS, seed=seed, soak=0)
            latencies[key].append([min(us(config) for config in runner.searched[:point]) for point in POINTS])
    return latencies


if __name__ == "__main__":
    cases = [(op, neighbours) for op in SIZES for neighbours in (True, False)]
    with ProcessPoolExecutor(2) as pool:
        results = dict(zip(cases, pool.map(simulate, *zip(*cases, strict=True)), strict=True))
    for op in SIZES:
        print(f"{op}: best without neighbours over best with them, {len(results[op, True])} problems, {len(SEEDS)} seed each")
        for i, point in enumerate(POINTS):
            pairs = zip(results[op, False].values(), results[op, True].values(), strict=True)
            ratios = [a[i] / b[i] for without, with_ in pairs for a, b in zip(without, with_, strict=True)]
            better, worse = sum(r > 1.0005 for r in ratios), sum(r < 0.9995 for r in ratios)
            mean = math.exp(statistics.mean(map(math.log, ratios)))
            span = f"{mean:.4f} [{min(ratios):.3f}, {max(ratios):.3f}]"
            print(f"  after {point} trials: {span}, better in {better}, worse in {worse} of {len(ratios)}")
