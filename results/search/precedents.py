"""The search with and without what won before, on the landscapes of simulate.py: nothing is measured here.

    pip install scikit-learn; python results/search/precedents.py > results/search/precedents.txt

Precedents are the winners shipped with the package, which the trials of the landscapes led to: `all`, as after an upgrade, or
`others`, those of other problems alone, as for a shape that nobody has tuned.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

from simulate import SIZES, Landscape

from autotax.core.config import Config
from autotax.db import Store, shipped
from autotax.operators import problem_from_dict
from tests.tuner.shared import H200, run
from tests.tuner.synthetic import SyntheticRunner

POINTS = (8, 16, 24, 36, 60)
KINDS = ("none", "others", "all")


def simulate(op: str, kind: str) -> dict[str, list[float]]:
    """For each problem, the latency of the best config after so many trials as POINTS says."""
    landscape, winners = Landscape(op), shipped.known_winners()
    latencies: dict[str, list[float]] = {}
    for key, fields in landscape.problems.items():
        memory: dict[Config, float] = {}

        def us(config: Config, key: str = key, memory: dict[Config, float] = memory) -> float:
            if config not in memory:
                memory[config] = landscape.us(key, config)
            return memory[config]

        known = [winner for winner in winners if kind == "all" or (kind == "others" and winner.problem_key != key)]
        runner = SyntheticRunner(us, noise=0.003)
        runner.look_ahead = 8
        with (
            tempfile.TemporaryDirectory() as folder,
            Store.open(f"sqlite:///{folder}/t.db") as store,
            mock.patch.object(shipped, "known_winners", lambda known=known: known),
        ):
            run(store, runner, problem_from_dict(fields), H200, trials=POINTS[-1], soak=0)
        latencies[key] = [min(us(config) for config in runner.searched[:point]) for point in POINTS]
    return latencies


def main() -> None:
    cases = [(op, kind) for kind in KINDS for op in SIZES]
    with ProcessPoolExecutor(2) as pool:
        results = dict(zip(cases, pool.map(simulate, *zip(*cases, strict=True)), strict=True))
    for op in SIZES:
        for kind in KINDS[1:]:
            print(f"{op}: best without over best with {kind}, {len(results[op, kind])} problems")
            for i, point in enumerate(POINTS):
                ratios = [results[op, "none"][key][i] / results[op, kind][key][i] for key in results[op, kind]]
                better, worse = sum(r > 1.0005 for r in ratios), sum(r < 0.9995 for r in ratios)
                mean = math.exp(statistics.mean(map(math.log, ratios)))
                span = f"{mean:.4f} [{min(ratios):.3f}, {max(ratios):.3f}]"
                print(f"  after {point} trials: {span}, better in {better}, worse in {worse} of {len(ratios)}")


if __name__ == "__main__":
    main()
