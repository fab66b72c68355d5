"""Paired search: trials measured in one job with the incumbent are compared by ratios, which clock rates do not change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store, TrialRecord
from autotax.operators.problems import FlashDecode
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.runner.measurement import PAIRED
from autotax.tuner.run_recorder import measurement_of
from autotax.tuner.search import paired
from results.search.replay_runner import ReplayRunner
from tests.tuner.shared import GEMM, gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("without_syncing")


class Clocks(SyntheticRunner):
    """Each job runs at clocks of its own, up to a tenth faster or slower."""

    def __init__(self) -> None:
        super().__init__(gemm_landscape, noise=0.0)
        self.jobs: list[int] = []
        self.clock = random.Random(1)

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        self.jobs.append(len(candidates))
        clock = self.clock.uniform(0.9, 1.1)
        measurements = super().measure(problem, candidates, effort, overlap)
        return [replace(m, samples=tuple(tuple(clock * us for us in rank) for rank in m.samples)) for m in measurements]


def searched(store: Store) -> list[TrialRecord]:
    return [trial for trial in store.trials(GEMM, status="ok") if "stage" not in trial.conditions]


def out_of_order(trials: Sequence[TrialRecord]) -> int:
    """Pairs of configs of which the slower one scores better."""
    figures = [(gemm_landscape(trial.config), measurement_of(trial).score_us or 0.0) for trial in trials]
    return sum(a < 0.999 * b and u > v for a, u in figures for b, v in figures)  # type: ignore[operator]


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_pairs_put_configs_in_their_order_whatever_the_clocks_are(store: Store, sampler: str) -> None:
    runner = Clocks()
    run(store, runner, trials=16, sampler=sampler, paired=True, soak=0)
    assert runner.jobs[:16] == [1] + [2] * 15, "the first trial has no incumbent"
    trials = searched(store)
    pairs = [trial.conditions.get(PAIRED) for trial in trials]
    assert pairs[0] is None and all(pairs[1:]) and {pair["with"] for pair in pairs[1:]} <= {t.config.digest for t in trials}
    assert out_of_order(trials) == 0
    assert all(trial.latency_us == pytest.approx(measurement_of(trial).latency_us) for trial in trials), "samples as taken"


def test_without_pairs_clocks_disturb_the_order(store: Store) -> None:
    run(store, runner := Clocks(), trials=16, soak=0)
    assert runner.jobs[:16] == [1] * 16 and out_of_order(searched(store)) > 0


def test_a_search_that_goes_on_takes_the_figures_of_pairs(store: Store) -> None:
    run(store, Clocks(), trials=6, paired=True, soak=0)
    runner = Clocks()
    run(store, runner, trials=10, paired=True, soak=0)
    assert runner.jobs[0] == 2 and out_of_order(searched(store)) == 0
    assert store.runs()[-1].settings["paired"] is True


def test_what_fails_beside_the_incumbent_is_told_as_it_is() -> None:
    good = SyntheticRunner(lambda _: 100.0).measure(GEMM, [Candidate(Config("bsp"))], Effort())[0]
    bad = Measurement(Candidate(Config("push")), "hang", "no answer")
    assert paired(good, good, bad) is bad and paired(good, replace(bad, candidate=good.candidate), good) is good
    assert bad.score_us is None and good.score_us == good.latency_us


def test_a_replayed_runner_answers_pairs() -> None:
    configs = [Candidate(Config("bsp")), Candidate(Config.of("push", block_m=64))]
    live = SyntheticRunner(lambda config: 130.0 if config.variant == "bsp" else 100.0, noise=0.0)
    first, second = ReplayRunner((GEMM, m) for m in live.measure(GEMM, configs, Effort())).measure(GEMM, configs, Effort())
    assert paired(first, first, second).conditions[PAIRED]["ratio"] == pytest.approx(100 / 130, abs=1e-4)


@pytest.mark.volume
def test_a_paired_search_on_cpu_ranks(tmp_path: Path) -> None:
    import autotax

    problem = FlashDecode(1, 4, 2, 16, 64, "fp32", 2)
    verdict = autotax.tune(problem, trials=3, paired=True, soak=0, backend="cpu", db=tmp_path / "paired.db")
    assert verdict.winner
    with Store.open(tmp_path / "paired.db") as store:
        trials = [trial for trial in store.trials(problem, status="ok") if "stage" not in trial.conditions]
    assert [PAIRED in trial.conditions for trial in trials] == [False, *[True] * (len(trials) - 1)] and len(trials) > 1
