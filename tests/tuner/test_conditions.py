"""Conditions of calls: winners for one set of conditions say nothing about another."""

from __future__ import annotations

from dataclasses import replace

import optuna
import pytest

from autotax.core.conditions import EAGER, ON_CPU, Conditions
from autotax.core.errors import UsageError
from autotax.db import Store
from autotax.operators.problems import AllGatherGemm
from autotax.runner import Candidate, Measurement
from autotax.spaces import space_for
from autotax.tuner import Settings, compare
from autotax.tuner.comparison import Choice
from tests.tuner.shared import CPU, GEMM, H200, gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("without_syncing")

USUAL = Conditions.usual(on_gpu=True)
WARM = Conditions("graph", "warm", 20.0)


@pytest.mark.usefixtures("optunas_tables")
def test_each_conditions_are_searched_and_won_by_themselves(store: Store) -> None:
    first = run(store, SyntheticRunner(gemm_landscape), trials=10)
    second = SyntheticRunner(gemm_landscape)
    verdict = run(store, second, trials=10, conditions=WARM)
    assert len(second.searched) == 10, "trials of other conditions do not count"
    assert (first.conditions, verdict.conditions) == (USUAL, WARM)
    assert {winner.conditions for winner in store.winners()} == {USUAL, WARM}
    again = SyntheticRunner(gemm_landscape)
    run(store, again, trials=10, conditions=WARM)
    assert again.searched == [], "its own do"
    studies = [study.study_name for study in optuna.get_all_study_summaries(store.url)]
    assert len(studies) == 2 and sum(WARM.key in name for name in studies) == 1


def test_a_winner_of_other_conditions_is_no_champion(store: Store) -> None:
    first = run(store, SyntheticRunner(gemm_landscape), trials=40)
    runner = SyntheticRunner(gemm_landscape)
    run(store, runner, trials=3, conditions=WARM, variants=("pull",))
    assert first.winner and first.winner.measurement.config.variant == "push"
    assert first.winner.measurement.config.digest not in runner.asked


def test_every_trial_and_the_run_say_their_conditions(store: Store) -> None:
    run(store, SyntheticRunner(lambda c: "crash" if c.variant == "push" else 100.0), trials=8, conditions=WARM)
    assert {t.status for t in store.trials()} >= {"ok", "crash"}
    assert all(Conditions.from_dict(t.conditions) == WARM and "mode" in t.conditions for t in store.trials())
    assert Conditions.from_dict(store.runs()[0].settings["conditions"]) == WARM


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (Conditions("graph", "warm"), "mode is 'graph'; CPU ranks have eager calls and in-place"),
        (EAGER, "l2 is 'cold'; CPU ranks have no L2"),
    ],
)
def test_cpu_ranks_refuse_what_they_do_not_know(store: Store, conditions: Conditions, words: str) -> None:
    problem = AllGatherGemm(64, 64, 64, "fp32", "m", 2)
    runner = SyntheticRunner(gemm_landscape)
    with pytest.raises(UsageError, match=words) as refusal:
        run(store, runner, problem, CPU, conditions=conditions)
    assert "\n" not in str(refusal.value) and store.counts()["runs"] == 0 and not runner.asked
    assert Settings(conditions=Conditions("eager", "warm", 50.0)).on(CPU).conditions == Conditions("eager", "warm", 50.0)


def test_a_comparison_is_made_under_the_conditions_given() -> None:
    bsp, push = (Choice(space_for(GEMM, H200).default(variant), "default") for variant in ("bsp", "push"))

    def rows(conditions: Conditions | None) -> dict[str, Conditions]:
        comparison = compare(
            GEMM, hardware=H200, runner=SyntheticRunner(lambda _: 100.0), tuned=push, baseline=bsp, conditions=conditions
        )
        return {row.name: row.measurement.candidate.conditions for row in comparison.rows}

    usual = rows(None)
    others = ["torch-graph", "torch-eager", "torch_pipeline-graph", "nccl_ll-graph", "nccl_ll128-graph", "cublas"]
    assert list(usual) == ["autotax", "bsp-graph", "bsp-eager", *others]
    assert usual["autotax"] == usual["bsp-graph"] == USUAL and usual["bsp-eager"] == EAGER
    skewed = rows(Conditions("eager", "warm", 30.0))
    assert skewed["autotax"] == skewed["bsp-eager"] == Conditions("eager", "warm", 30.0)
    assert skewed["bsp-graph"] == skewed["torch-graph"] == Conditions("graph", "warm", 30.0)
    small = AllGatherGemm(64, 64, 64, "fp32", "m", 2)
    on_cpu = compare(small, hardware=CPU, runner=SyntheticRunner(lambda _: 100.0), tuned=push, baseline=bsp)
    assert {row.name: row.measurement.candidate.conditions for row in on_cpu.rows} == {"autotax": ON_CPU, "bsp-eager": ON_CPU}


def test_a_search_is_back_to_back_and_its_finalists_in_place(store: Store) -> None:
    run(store, SyntheticRunner(gemm_landscape), trials=10)
    final = {trial.conditions.get("stage") == "finalists": set[str]() for trial in store.trials()}
    for trial in store.trials():
        final[trial.conditions.get("stage") == "finalists"].add(Conditions.from_dict(trial.conditions).key)
    assert final == {False: {"graph/cold/0"}, True: {"in-place/cold/0"}}
    again = SyntheticRunner(gemm_landscape)
    run(store, again, trials=10, conditions=Conditions("graph"))
    assert again.searched == [], "a search serves both"
    assert {winner.conditions for winner in store.winners()} == {USUAL, Conditions("graph")}


def test_a_winner_proven_back_to_back_is_proven_anew_in_place(store: Store) -> None:
    before = run(store, SyntheticRunner(gemm_landscape), trials=40, conditions=Conditions("graph"))
    assert before.winner
    config = before.winner.measurement.config
    runner = SyntheticRunner(gemm_landscape)
    after = run(store, runner, trials=1, resume=False, variants=("pull",))
    assert config in [standing.measurement.config for standing in after.standings], "it stands until somebody beats it"
    assert after.winner and after.winner.measurement.config == config
    assert after.winner.measurement.candidate.conditions == USUAL


def test_figures_below_zero_are_kept_and_decide_nothing(store: Store) -> None:
    """The differences in the finalists' round may be negative for calls that are shorter than the noise."""

    class Hidden(SyntheticRunner):
        def one(self, candidate: Candidate, common: list[float]) -> Measurement:
            measurement = super().one(candidate, common)
            if not candidate.conditions.in_place or candidate.config.variant != "push":
                return measurement
            return replace(measurement, samples=tuple(tuple(-abs(us) - 0.1 for us in rank) for rank in measurement.samples))

    verdict = run(store, Hidden(gemm_landscape), trials=12)
    assert verdict.winner and verdict.winner.measurement.config.variant != "push"
    kept = [trial for trial in store.trials() if trial.config.variant == "push" and trial.conditions.get("stage")]
    assert kept and all(trial.status == "ok" and trial.latency_us is not None and trial.latency_us < 0 for trial in kept)
