"""The finalists pass a soak. A finalist that fails is dropped, and the next best takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.runner import Candidate, Effort, Measurement, Overlap
from tests.tuner.shared import CPU, DECODE, GEMM, Ear, gemm_landscape, run
from tests.tuner.synthetic import Landscape, SyntheticRunner

pytestmark = pytest.mark.usefixtures("without_syncing")


class Soaking(SyntheticRunner):
    """`races` gives the status of configs that fail the soak; `soaked` lists the configs that passed it."""

    def __init__(self, races: Callable[[Config], str | None], landscape: Landscape = gemm_landscape) -> None:
        super().__init__(landscape)
        self.races = races
        self.soaks: list[int] = []
        self.soaked: set[Config] = set()
        self.tried: list[Config] = []
        self.jobs: list[set[Config]] = []

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        measurements = super().measure(problem, candidates, effort)
        self.soaks.append(effort.soak)
        self.jobs.append({candidate.config for candidate in candidates})
        return [self.soak(measurement) if effort.soak else measurement for measurement in measurements]

    def soak(self, measurement: Measurement) -> Measurement:
        self.tried.append(measurement.config)
        if measurement.status == "ok" and (fate := self.races(measurement.config)):
            return Measurement(measurement.candidate, fate, f"soak: made to be {fate}")
        self.soaked.add(measurement.config)
        return measurement


def fine(_: Config) -> None:
    return None


def finalists(store: Store) -> dict[Config, str]:
    return {t.config: t.status for t in store.trials() if t.conditions.get("stage") == "finalists"}


def test_all_finalists_are_soaked_once_and_the_search_is_not(store: Store) -> None:
    runner = Soaking(fine)
    verdict = run(store, runner, trials=20, soak=300)
    assert runner.soaks.count(300) == 1 and runner.soaks.index(300) == 20
    assert verdict.soak == 300 and {s.measurement.config for s in verdict.standings} == runner.soaked


@pytest.mark.parametrize("fate", ["wrong_result", *(pytest.param(fate, marks=pytest.mark.volume) for fate in ("hang", "crash"))])
def test_the_best_that_passes_wins_though_all_better_ones_race(store: Store, fate: str) -> None:
    def landscape(config: Config) -> float | str:
        return 300.0 if config.variant == "bsp" else gemm_landscape(config)

    runner = Soaking(lambda config: fate if config.variant == "push" else None, landscape)
    verdict = run(store, runner, trials=40)
    searched = {t.config: t.latency_us or 0.0 for t in store.trials(GEMM, status="ok") if "stage" not in t.conditions}
    assert verdict.winner and verdict.winner.measurement.config in runner.soaked
    assert verdict.winner.measurement.config.variant == "copy_engine", "which is the best that is left"
    faster = {config for config, us in searched.items() if us < 0.95 * searched[verdict.winner.measurement.config]}
    assert len(faster) > 5, "more than there are places among the finalists"
    assert all(finalists(store)[config] == fate for config in faster)
    assert not any(status == "ok" and config.variant == "push" for config, status in finalists(store).items())
    assert len(runner.tried) == len(set(runner.tried)), "nobody is soaked twice"


def test_who_takes_a_place_is_measured_together_with_the_others(store: Store) -> None:
    first: list[Config] = []

    def first_races(config: Config) -> str | None:
        if config.variant == "push" and not first:
            first.append(config)
        return "wrong_result" if config in first else None

    runner = Soaking(first_races)
    verdict = run(store, runner, trials=30)
    standing = {s.measurement.config for s in verdict.standings}
    assert verdict.winner and first[0] not in standing
    assert standing in runner.jobs, "their samples are those of one job"
    assert len(verdict.standings) == 7, "one BSP, and six that challenge it"


def test_what_raced_is_not_among_the_finalists_of_the_next_run(store: Store) -> None:
    run(store, Soaking(lambda config: "hang" if config.variant == "push" else None), trials=30)
    second = Soaking(fine)
    verdict = run(store, second, trials=30)
    assert verdict.winner and not any(config.variant == "push" for config in second.tried)


def test_without_bsp_left_after_the_soak_nobody_wins(store: Store) -> None:
    verdict = run(store, Soaking(lambda config: "wrong_result" if config.variant == "bsp" else None), trials=20)
    assert verdict.winner is None and not store.winners()


def test_a_soak_may_be_left_out_and_that_is_said(store: Store) -> None:
    ear, runner = Ear(), Soaking(fine)
    verdict = run(store, runner, trials=12, soak=0, listener=ear)
    assert verdict.winner and set(runner.soaks) == {0}
    assert len(ear.notices) == 1 and "not soaked" in ear.notices[0] and verdict.notices == tuple(ear.notices)
    assert store.runs()[-1].notices == verdict.notices


def test_newcomers_who_cannot_be_measured_with_the_others_do_not_win(store: Store) -> None:
    """Measurements of a separate job are no comparison: the machine may have been faster then."""

    class Drifting(Soaking):
        rounds = 0

        def measure(
            self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
        ) -> list[Measurement]:  # fmt: skip
            if effort.samples == Effort().samples:
                return super().measure(problem, candidates, effort)
            self.rounds += 1
            if self.rounds > 2:
                return [Measurement(candidate, "crash", "lost") for candidate in candidates]
            measurements = super().measure(problem, candidates, effort)
            if self.rounds == 1:
                return measurements
            return [replace(m, samples=tuple(tuple(us / 2 for us in rank) for rank in m.samples)) for m in measurements]

    runner = Drifting(fine)
    runner.races = lambda config: "wrong_result" if config.variant == "push" and runner.rounds == 1 else None
    verdict = run(store, runner, trials=30)
    assert runner.rounds > 2 and verdict.winner
    assert min(s.measurement.latency_us or 0.0 for s in verdict.standings) > 75.0


def test_a_stored_winner_that_is_found_wrong_is_withdrawn(store: Store) -> None:
    champion = run(store, Soaking(fine), trials=20).winner
    assert champion
    config = champion.measurement.config
    everybody = Soaking(lambda other: "wrong_result" if other.variant == "bsp" or other == config else None)
    verdict = run(store, everybody, trials=20)
    assert verdict.winner is None and not store.winners()
    assert any("was withdrawn" in notice for notice in verdict.notices)


def test_the_usual_soak_of_a_machine(store: Store) -> None:
    assert run(store, Soaking(fine), trials=6).soak == 2000
    assert run(store, Soaking(fine, lambda _: 10.0), DECODE, CPU, trials=6).soak == 20


def test_a_group_that_is_lost_with_all_finalists_is_nobodys_fault(store: Store) -> None:
    class Struck(Soaking):
        """The first job of several candidates is lost with all of them."""

        strikes = 1

        def measure(
            self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
        ) -> list[Measurement]:  # fmt: skip
            if len(candidates) > 1 and self.strikes:
                self.strikes -= 1
                return [Measurement(candidate, "crash", "lost only when measured together") for candidate in candidates]
            return super().measure(problem, candidates, effort)

    assert run(store, Struck(fine), trials=20).winner
    assert set(finalists(store).values()) == {"ok"}
    hopeless = Struck(fine)
    hopeless.strikes = 1000
    assert run(store, hopeless, trials=20, resume=False).winner is None
    assert run(store, Struck(fine), trials=20).winner, "and the next run has them among its finalists again"


def test_bsp_whose_trial_something_else_ended_is_the_baseline_all_the_same(store: Store) -> None:
    class Struck(SyntheticRunner):
        def measure(
            self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
        ) -> list[Measurement]:  # fmt: skip
            measurements = super().measure(problem, candidates, effort)
            first = len(self.searched) == 1 and len(measurements) == 1
            return [Measurement(candidates[0], "crash", "rank 1 was killed")] if first else measurements

    verdict = run(store, Struck(gemm_landscape), trials=12)
    assert verdict.trials["crash"] == 1 and verdict.winner and verdict.baseline and verdict.baseline.config == Config("bsp")
