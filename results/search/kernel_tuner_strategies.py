"""Strategies of Kernel Tuner (`pip install kernel_tuner`, 1.5.0) on the landscapes of replays.py, to whose raw file it adds.

    python results/search/kernel_tuner_strategies.py RAW SEEDS [KIND ...]

Kernel Tuner wants all configs of a space in a list. On recorded points these are the points; on a surrogate seeds and 300 valid
configs of each variant, as the model draws them, so its searches have an easier space there. A parameter's value is the number of
its choice; what a variant lacks is 0. Strategies begin at random, as they do; configs asked for twice count once.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import replays
from kernel_tuner import util
from kernel_tuner.interface import Options
from kernel_tuner.runners.runner import Runner
from kernel_tuner.searchspace import Searchspace

from autotax.core.config import Config
from results.search import replay

STRATEGIES = {
    "Kernel Tuner: random sampling": "random_sample",
    "Kernel Tuner: simulated annealing": "simulated_annealing",
    "Kernel Tuner: genetic algorithm": "genetic_algorithm",
    "Kernel Tuner: HybridVNDX": "gen_hybrid_vndx",
}
DRAWN = 300
STUCK = 200
"""Configs in a row that were measured before, after which a strategy is ended: some would go on for ever. Differential evolution
is left out, whose population is larger than some of the spaces, and greedy ILS, which fails at points without neighbours.
"""


class PointRunner(Runner):
    """Measures configs by looking them up, and keeps what it told, in order."""

    def __init__(self, on: replay.Landscape, configs: dict[tuple[int, ...], Config], seed: int) -> None:
        super().__init__()
        self.on, self.configs = on, configs
        self.noise = replay.NOISE if on.kind != replay.RECORDED else 0.0
        self.source = random.Random(f"{seed}/{on.problem.key}")
        self.times_us: dict[tuple[int, ...], float] = {}
        self.losses: list[float] = []
        self.again = 0

    def get_device_info(self) -> Any:
        return None

    def get_environment(self, tuning_options: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def run(self, parameter_space: Any, tuning_options: Any) -> list[dict[str, Any] | None]:
        results: list[dict[str, Any] | None] = []
        for element in parameter_space:
            point = tuple(int(value) for value in element)
            if tuning_options.budget.is_done():
                results.append(None)
                continue
            self.again = self.again + 1 if point in self.times_us else 0
            known = len(self.losses) >= replay.LOSSES[-1] and min(self.losses) <= 1 + replay.SHARES[0]
            if known or self.again > STUCK:  # as close as is counted, or stuck: nothing new comes
                tuning_options.budget.num_fevals = tuning_options.budget.max_fevals
            if point not in self.times_us:
                us = self.on.us(self.configs[point])
                self.losses.append(us / self.on.best_us)
                self.times_us[point] = us * float(np.exp(self.source.gauss(0.0, self.noise)))
                tuning_options.budget.add_evaluations(1)
            results.append(dict(zip(tuning_options.tune_params, point, strict=True)) | {"time": self.times_us[point]})
        return results


def space_of(on: replay.Landscape, seed: int) -> tuple[dict[str, list[int]], dict[tuple[int, ...], Config]]:
    """The parameters of all variants, and the configs by their values."""
    source = random.Random(seed)
    drawn = [config for variant in on.space.variants.values() for config in variant.some(DRAWN, source)]
    configs = list(dict.fromkeys([*on.space.seeds(), *drawn]))
    names = sorted({name for config in configs for name in config.values})
    choices = {name: sorted({config.values[name] for config in configs if name in config.values}, key=str) for name in names}
    for name, values in choices.items():
        if all(isinstance(value, int) for value in values):
            choices[name] = sorted(values, key=int)
    variants = list(on.space.variants)

    def point(config: Config) -> tuple[int, ...]:
        return variants.index(config.variant), *(
            choices[name].index(config.values[name]) + 1 if name in config.values else 0 for name in names
        )

    points = {point(config): config for config in configs}
    used = [sorted({coordinates[at] for coordinates in points}) for at in range(len(names) + 1)]
    return dict(zip(["variant", *names], used, strict=True)), points


def search(on: replay.Landscape, strategy: str, seed: int) -> dict[str, Any]:
    began = time.process_time()
    parameters, points = space_of(on, seed)
    space = Searchspace(parameters, [], 10**9, defer_construction=True)
    space.list = list(points)
    space.size = len(points)
    space._Searchspace__dict = {point: at for at, point in enumerate(points)}
    space._Searchspace__numpy = None
    space.num_params, space.indices = len(parameters), np.arange(len(points))
    runner = PointRunner(on, points, seed)
    most = min(replays.TRIALS, len(points))
    options = Options(
        strategy_options=Options(max_fevals=most), tune_params=parameters, objective=["time"], objective_higher_is_better=[False],
        verbose=False, budget=util.TuningBudget(max_fevals=most), restrictions=[], max_fevals=most,
    )  # fmt: skip
    random.seed(seed)
    np.random.seed(seed)
    module = importlib.import_module(f"kernel_tuner.strategies.{strategy}")
    module.tune(space, runner, options)
    played = replay.Played(tuple(runner.losses), tuple(runner.losses))
    row: dict[str, Any] = {"s": round(time.process_time() - began, 3), "trials": len(runner.losses)}
    row |= {f"within {share:g}": played.within(share) for share in replay.SHARES}
    return row | {f"loss {after}": round(played.best_after(after) - 1, 5) for after in replay.LOSSES}


def main(raw: Path, seeds: int, kinds: list[str]) -> None:
    done = {replays.identity(row) for row in replays.rows(raw)}
    with raw.open("a") as out:
        for seed in range(seeds):
            for kind in kinds:
                for op in replays.OPERATORS:
                    for name, strategy in STRATEGIES.items():
                        for ground in replays.grounds(kind, op):
                            who = {"kind": kind, "strategy": name, "seed": seed, "problem": ground.problem.key}
                            if replays.identity(who) not in done:
                                print(json.dumps(who | search(ground, strategy, seed)), file=out, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or [replay.RECORDED])
