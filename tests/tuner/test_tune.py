"""The tuner over made-up landscapes: budgets, resumption, honesty of verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotax.core.config import Config
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.db.formats import write
from autotax.db.lookup import lookup, reload
from autotax.hardware import Hardware
from autotax.operators import named
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.operators.registry import variant_digest
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.software import environment
from autotax.spaces import Space, space_for
from autotax.tuner import Settings, tune
from autotax.tuner.finalists import run_finalists
from tests.db.conftest import keep_winner
from tests.db.test_exchange import an_entry
from tests.edits import edited
from tests.tuner.shared import CPU, DECODE, GEMM, H200, Ear, gemm_landscape, measuring, run
from tests.tuner.synthetic import Clock, Landscape, SyntheticRunner
from tests.volume import volume

pytestmark = pytest.mark.usefixtures("without_syncing")


def test_finds_a_winner_within_its_budget_and_stores_it(store: Store) -> None:
    runner = SyntheticRunner(gemm_landscape)
    verdict = run(store, runner, trials=40)
    assert len(runner.searched) == 40 == sum(verdict.trials.values())
    assert verdict.winner and verdict.winner.measurement.config.variant == "push" and not verdict.tie
    assert verdict.winner.interval[0] <= verdict.winner.speedup <= verdict.winner.interval[1]
    assert verdict.winner.interval[0] > 1.0
    (stored,) = store.winners()
    assert stored.config == verdict.winner.measurement.config
    assert stored.verified and stored.speedup == pytest.approx(verdict.winner.speedup)
    assert stored.baseline_us == pytest.approx(130.0, rel=0.05)
    assert len([t for t in store.trials(GEMM) if "stage" not in t.conditions]) == 40


def test_seeds_come_first_and_bsp_is_always_among_them(store: Store) -> None:
    runner, space = SyntheticRunner(gemm_landscape), searched_unless_asked(GEMM, H200)
    run(store, runner, trials=len(space.variants))
    assert runner.searched[: len(space.variants)] == [space.default(variant) for variant in space.variants]
    assert runner.searched[0] == Config("bsp")


def test_what_only_explains_where_time_goes_is_searched_if_asked_for(store: Store) -> None:
    usual, asked = SyntheticRunner(gemm_landscape), SyntheticRunner(gemm_landscape)
    run(store, usual, trials=20)
    assert {"pull", "push_two_kernel"}.isdisjoint(config.variant for config in usual.searched)
    run(store, asked, trials=6, resume=False, variants=("pull",))
    assert {config.variant for config in asked.searched} == {"bsp", "pull"}


@pytest.mark.parametrize(
    ("m", "shipped", "tried"),
    [(2 * GEMM.m, False, {"pull"}), (GEMM.m, True, {"pull"}), (8 * GEMM.m, False, set()), *volume((GEMM.m, False, {"pull"}))],
)
def test_or_where_it_has_won_before(store: Store, nothing_shipped: Path, m: int, shipped: bool, tried: set[str]) -> None:
    """The config is a stale winner of this problem or of a similar one."""
    space = space_for(GEMM, H200)
    fields: dict[str, Any] = {"problem": replace(GEMM, m=m), "config": space.default("pull"), "hardware": H200}
    fields["environment"] = replace(environment("cpu"), triton="3.5.0")
    if shipped:
        nothing_shipped.mkdir()
        write(nothing_shipped / "a.json", [an_entry(**fields)], anonymous=True)
    else:
        keep_winner(store, **fields)
    runner = SyntheticRunner(gemm_landscape)
    run(store, runner, trials=12)
    ladder = set(space.variants) - set(searched_unless_asked(GEMM, H200).variants)
    assert {config.variant for config in runner.searched} & ladder == tried


def test_a_shipped_winner_of_this_problem_is_among_the_finalists_of_a_short_search(store: Store, nothing_shipped: Path) -> None:
    """Else a search that had no time for it would store something slower, which look-ups prefer."""
    space = space_for(GEMM, H200)
    best = space.neighbours(space.default("push_specialized"))[-1]
    fields: dict[str, Any] = {"problem": GEMM, "config": best, "hardware": H200, "environment": environment("cpu")}
    fields |= {"kernel_digest": variant_digest(GEMM.op, best.variant)}
    nothing_shipped.mkdir()
    write(nothing_shipped / "a.json", [an_entry(**fields)], anonymous=True)
    runner = SyntheticRunner(lambda config: {best: 90.0, Config("bsp"): 130.0}.get(config, 110.0))
    verdict = run(store, runner, trials=1)
    assert best not in runner.searched and verdict.winner and verdict.winner.measurement.config == best
    verdict = run(store, runner, trials=2, resume=False, variants=("push",))
    assert verdict.winner and verdict.winner.measurement.config == best, "then the stored winner is proven again"


def searched_unless_asked(problem: Problem, hardware: Hardware) -> Space:
    """The space without the variants of role `ladder`."""
    space = space_for(problem, hardware)
    declared = named(problem.op).variants
    return space.only([name for name in space.variants if declared[name].role != "ladder"])


@pytest.mark.parametrize("shipped", [False, True])
def test_what_won_before_an_upgrade_is_tried_in_turn_with_seeds(store: Store, nothing_shipped: Path, shipped: bool) -> None:
    """So a few trials are enough to have it again, though it is no seed."""
    space = space_for(GEMM, H200)
    seeds = space.seeds()
    odd = next(config for config in space.neighbours(space.default("push")) if config not in seeds)
    unfit = Config.of("push", odd.values | {"block_m": 24})
    older = replace(environment("cpu"), triton="3.5.0")
    for config, low in ((odd, 1.1), (unfit, 1.2)):
        fields: dict[str, Any] = {"problem": GEMM, "config": config, "hardware": H200, "environment": older, "interval_low": low}
        fields |= {"kernel_digest": config.digest}
        if shipped:
            nothing_shipped.mkdir(exist_ok=True)
            write(nothing_shipped / f"{config.digest}.json", [an_entry(**fields)], anonymous=True)
        else:
            keep_winner(store, **fields)
    runner = SyntheticRunner(lambda config: {odd: 90.0, Config("bsp"): 130.0}.get(config, 110.0))
    verdict = run(store, runner, trials=4, sampler="tpe")
    assert runner.searched == [Config("bsp"), odd, *seeds[1:3]]
    assert verdict.winner and verdict.winner.measurement.config == odd


def test_no_config_is_searched_twice_and_none_breaks_a_constraint(store: Store) -> None:
    runner = SyntheticRunner(gemm_landscape)
    run(store, runner, trials=30, sampler="random")
    assert len(set(runner.searched)) == 30
    assert all(config in space_for(GEMM, H200) for config in runner.searched)


@pytest.mark.volume
@pytest.mark.usefixtures("optunas_tables")
def test_a_runner_with_foresight_gets_its_configs_in_advance_and_in_any_order(store: Store) -> None:
    runner = SyntheticRunner(gemm_landscape)
    runner.look_ahead = 8
    verdict = run(store, runner, trials=40)
    assert len(runner.searched) == 40 == len(set(runner.searched))
    assert verdict.winner and verdict.winner.measurement.config.variant == "push"
    interrupted = SyntheticRunner(gemm_landscape)
    interrupted.look_ahead, interrupted.interrupt_after = 8, 5
    run(store, interrupted, trials=60)
    (study,) = optuna.get_all_study_summaries(store.url)
    states = {trial.state.name for trial in optuna.load_study(study_name=study.study_name, storage=store.url).get_trials()}
    assert "RUNNING" not in states, "what was asked for and not measured is given up"


def test_idle_compilers_get_what_the_queue_holds_before_anything_is_measured(store: Store) -> None:
    runner = SyntheticRunner(gemm_landscape)
    runner.look_ahead = 8
    run(store, runner, trials=20, sampler="tpe")
    (asked, later), *others = runner.requests
    assert [config.variant for config in asked] == ["bsp"] and len(later) == 16
    assert set(later) <= set(runner.searched), "compilers work for trials that come"
    assert all(not set(asked) & set(later) and len(asked) + len(later) <= 20 for asked, later in others)
    assert runner.requests[-1][1] == []


@pytest.mark.parametrize(("sampler", "every_second"), [("tpe", True), ("random", False)])
def test_after_the_seeds_every_second_suggestion_is_a_neighbour_of_one_of_the_best(
    store: Store, sampler: str, every_second: bool
) -> None:
    runner, space = SyntheticRunner(gemm_landscape), space_for(GEMM, H200).only(["bsp", "push"])
    seeds = len(space.seeds())
    run(store, runner, trials=seeds + 10, variants=("push",), sampler=sampler)
    verified = [config for config in runner.searched if isinstance(gemm_landscape(config), float)]
    near = [any(config in space.neighbours(origin) for origin in verified) for config in runner.searched[seeds:]]
    assert (sum(near) >= 5) is every_second


@pytest.mark.usefixtures("optunas_tables")
def test_infeasible_and_failed_configs_are_never_told_as_failures(store: Store) -> None:
    run(store, SyntheticRunner(gemm_landscape), trials=40)
    (study,) = optuna.get_all_study_summaries(store.url)
    trials = optuna.load_study(study_name=study.study_name, storage=store.url).get_trials()
    assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}


def test_a_small_space_is_exhausted_and_the_run_ends(store: Store) -> None:
    tiny = FlashDecode(1, 1, 1, 16, 16, "fp32", 2)
    space = searched_unless_asked(tiny, CPU)
    runner = SyntheticRunner(lambda config: 10.0 if config.variant == "bsp" else 9.0)
    verdict = run(store, runner, tiny, CPU, trials=space.count + 100)
    assert sorted(runner.searched, key=str) == sorted(space, key=str)
    assert verdict.winner and verdict.winner.measurement.config.variant == "fused", "the simplest of equals"


@pytest.mark.usefixtures("optunas_tables")
def test_resumes_where_an_interrupted_run_stopped(store: Store) -> None:
    first = SyntheticRunner(gemm_landscape)
    first.interrupt_after = 7
    verdict = run(store, first, trials=20)
    assert verdict.interrupted and verdict.winner is None and not store.winners()
    assert sum(verdict.trials.values()) == 7
    second = SyntheticRunner(gemm_landscape)
    verdict = run(store, second, trials=20)
    assert len(second.searched) == 13 and not set(first.searched) & set(second.searched)
    assert sum(verdict.trials.values()) == 20 and verdict.winner
    third = SyntheticRunner(gemm_landscape)
    run(store, third, trials=20)
    assert third.searched == [], "nothing left to search"
    (study,) = optuna.get_all_study_names(store.url)
    assert len(study_values(store, study)) == verdict.trials["ok"], "the study is told of each once"
    fresh = SyntheticRunner(gemm_landscape)
    run(store, fresh, trials=20, resume=False)
    assert len(fresh.searched) == 20


@pytest.mark.volume
@pytest.mark.usefixtures("optunas_tables")
def test_trials_of_variants_that_were_not_edited_stay_known(store: Store) -> None:
    first = SyntheticRunner(gemm_landscape)
    run(store, first, trials=9)
    (winner,) = store.winners()
    stale = {config for config in first.searched if config.variant == "push"}
    with edited("kernels/all_gather_gemm/push.py"):
        second = SyntheticRunner(gemm_landscape)
        run(store, second, trials=9)
        assert stale and len(second.searched) == len(stale), "as many as are not known any more"
        assert not set(second.searched) & (set(first.searched) - stale)
        assert winner.config.variant == "push" and len(store.winners()) == 2, "the old one holds where its sources are"
        old, new = (study_values(store, study) for study in optuna.get_all_study_names(store.url))
        assert {str(dict(params)["variant"]) for params, _ in set(old) - set(new)} == {"push"}
    third = SyntheticRunner(gemm_landscape)
    run(store, third, trials=9)
    assert third.searched == [], "all of it holds for the sources as they were"
    assert winner.config.digest in third.asked, "so the winner is challenged"
    with edited("kernels/all_gather_gemm/push.py", lambda text: text + "\nassert 1\n"):
        fourth = SyntheticRunner(gemm_landscape)
        run(store, fourth, trials=2, resume=False, variants=("pull",))
        assert winner.config.digest not in fourth.asked, "which is stale here"


def test_a_run_says_what_a_used_budget_leaves_untried(store: Store) -> None:
    assert not run(store, SyntheticRunner(gemm_landscape), trials=9, soak=10).notices
    assert not run(store, SyntheticRunner(gemm_landscape), trials=9, soak=10).notices
    with edited("kernels/all_gather_gemm/push.py"):
        runner = SyntheticRunner(gemm_landscape)
        (notice,) = run(store, runner, trials=5, soak=10).notices
        assert not runner.searched and "sources of push were not tried: give more --trials" in notice
        assert not run(store, SyntheticRunner(gemm_landscape), trials=9, soak=10).notices


def test_a_better_winner_that_another_tuner_stored_meanwhile_stays(store: Store) -> None:
    class Slow(SyntheticRunner):
        def measure(self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None) -> list[Measurement]:  # noqa: E501  # fmt: skip
            if effort.soak and not store.winners():
                run(store, SyntheticRunner(gemm_landscape), trials=30, soak=10, variants=("push",))
            return super().measure(problem, candidates, effort, overlap)

    ear = Ear()
    verdict = run(store, Slow(gemm_landscape), trials=8, soak=10, variants=("decomposed",), listener=ear)
    assert verdict.winner and verdict.winner.measurement.config.variant != "push"
    (winner,) = store.winners()
    assert winner.config.variant == "push"
    assert any("another tuner has stored push" in notice and "better proven" in notice for notice in ear.notices)


def study_values(store: Store, name: str) -> list[tuple[frozenset[tuple[str, object]], float]]:
    """The finished trials in a study: parameters, the variant included, and microseconds."""
    trials = optuna.load_study(study_name=name, storage=store.url).get_trials(states=[optuna.trial.TrialState.COMPLETE])
    return [(frozenset(trial.params.items()), trial.values[0]) for trial in trials]


def test_ranks_of_other_sources_than_the_tuners_are_not_measured(store: Store) -> None:
    old = environment("cpu")
    with edited("kernels/all_gather_gemm/push.py"), pytest.raises(MachineError, match="run the same command again") as caught:
        tune(
            GEMM, hardware=H200, runner=SyntheticRunner(gemm_landscape), store=store, environment=old, settings=Settings(trials=3)
        )
    assert "\n" not in str(caught.value) and old.kernels in str(caught.value)
    assert store.counts()["runs"] == 0


def test_what_was_interrupted_comes_again_bsp_before_all(store: Store) -> None:
    first = SyntheticRunner(gemm_landscape)
    first.interrupt_after, first.look_ahead = 0, 4
    run(store, first, trials=5)
    second = SyntheticRunner(gemm_landscape)
    verdict = run(store, second, trials=5)
    assert second.searched[0] == Config("bsp") and verdict.winner


def test_an_interrupted_fresh_run_goes_on_from_its_own_trials(store: Store) -> None:
    run(store, SyntheticRunner(gemm_landscape), trials=10)
    fresh = SyntheticRunner(gemm_landscape)
    fresh.interrupt_after = 3
    run(store, fresh, trials=10, resume=False)
    second = SyntheticRunner(gemm_landscape)
    verdict = run(store, second, trials=10)
    assert len(second.searched) == 7 and sum(verdict.trials.values()) == 10


def test_other_variants_may_be_searched_after_some_and_some_after_all(store: Store) -> None:
    for variants in (("push",), None, ("pull",)):
        verdict = run(store, SyntheticRunner(gemm_landscape), trials=12, variants=variants)
        assert verdict.winner


def test_what_killed_the_group_is_not_tried_again_after_a_resume(store: Store) -> None:
    def deadly(config: Config) -> float | str:
        return "hang" if config.variant == "copy_engine" else gemm_landscape(config)

    first = SyntheticRunner(deadly)
    run(store, first, trials=8)
    hung = {config for config in first.searched if config.variant == "copy_engine"}
    second = SyntheticRunner(deadly)
    run(store, second, trials=16)
    assert hung and not hung & set(second.searched)
    assert {t.status for t in store.trials(GEMM) if t.config in hung} == {"hang"}


def test_what_cannot_be_told_apart_is_a_tie_and_bsp_wins(store: Store) -> None:
    runner = SyntheticRunner(lambda _: 100.0)
    verdict = run(store, runner, trials=12)
    assert verdict.winner and verdict.winner.measurement.config.variant == "bsp" and verdict.tie
    assert store.winners()[0].tie and store.winners()[0].speedup == 1.0


def test_chance_seldom_beats_bsp_though_many_challenge_it_often() -> None:
    space = space_for(GEMM, H200)
    candidates = [Candidate(config) for config in space.seeds()[:5]]
    runner = SyntheticRunner(lambda _: 100.0)
    decisions = [run_finalists(space, measuring(runner), candidates)[0] for _ in range(100)]
    assert sum(decision is not None and not decision.tie for decision in decisions) <= 5


def test_a_few_slow_samples_prove_nothing() -> None:
    class Slow(SyntheticRunner):
        def measure(
            self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
        ) -> list[Measurement]:  # fmt: skip
            return super().measure(problem, candidates, Effort(samples=3))

    space = space_for(GEMM, H200)
    candidates = [Candidate(space.default(variant)) for variant in ("bsp", "push")]
    decision, _ = run_finalists(space, measuring(Slow(gemm_landscape)), candidates)
    assert decision and decision.winner.measurement.config.variant == "push"
    assert len(decision.baseline.rounds) >= 10


def test_without_bsp_there_are_no_finalists() -> None:
    runner = SyntheticRunner(gemm_landscape)
    space = space_for(GEMM, H200)
    assert run_finalists(space, measuring(runner), [Candidate(space.default("push"))]) == (None, [])
    assert not runner.asked


def test_bsp_wins_without_a_tie_where_it_is_faster(store: Store) -> None:
    verdict = run(store, SyntheticRunner(lambda c: 100.0 if c.variant == "bsp" else 150.0), trials=12)
    assert verdict.winner and verdict.winner.measurement.config.variant == "bsp" and not verdict.tie


@pytest.mark.parametrize("fate", ["wrong_result", "hang", *volume("crash", "compile_error")])
def test_nothing_unverified_becomes_a_winner(store: Store, fate: str) -> None:
    verdict = run(store, SyntheticRunner(lambda _: fate), trials=6)
    assert verdict.winner is None and not store.winners()
    assert verdict.trials == {fate: 6}


def test_a_finalist_that_fails_in_the_last_round_does_not_win(store: Store) -> None:
    runner = SyntheticRunner(gemm_landscape)
    fastest: Landscape = gemm_landscape

    def treacherous(config: Config) -> float | str:
        late = runner.asked[config.digest] >= 2
        return "wrong_result" if late and config.variant == "push" else fastest(config)

    runner.landscape = treacherous
    verdict = run(store, runner, trials=20)
    assert verdict.winner and verdict.winner.measurement.config.variant != "push"


def test_a_stored_winner_stands_until_it_is_beaten(store: Store) -> None:
    first = run(store, SyntheticRunner(gemm_landscape), trials=12)
    run(store, SyntheticRunner(gemm_landscape), trials=3, resume=False, variants=("pull",))
    (kept,) = store.winners()
    assert first.winner and kept.config == first.winner.measurement.config


def test_bsp_is_tried_with_the_parameters_of_a_new_leader(store: Store) -> None:
    def landscape(config: Config) -> float:
        return 20.0 + abs(config["splits"] - 64) / 8 + (5.0 if config.variant == "bsp" else 0.0)

    runner = SyntheticRunner(landscape)
    verdict = run(store, runner, DECODE, trials=30)
    assert verdict.winner and verdict.baseline
    leader = verdict.winner.measurement.config
    assert verdict.baseline.config["splits"] == leader["splits"], "the baseline is tuned as well"


def test_a_timeout_ends_the_search_but_not_the_verdict(store: Store, clock: Clock) -> None:
    class Slow(SyntheticRunner):
        """A job takes a tenth of a second."""

        def one(self, candidate: Candidate, common: list[float]) -> Measurement:
            clock.sleep(0.1)
            return super().one(candidate, common)

    verdict = run(store, Slow(gemm_landscape), trials=10_000, timeout_s=3.0)
    assert verdict.winner and verdict.seconds < 60 and 3 < sum(verdict.trials.values()) <= 31


def test_the_listener_is_told_of_every_trial(store: Store) -> None:
    ear = Ear()
    run(store, SyntheticRunner(gemm_landscape), trials=9, listener=ear)
    heard = ear.heard
    assert [p.done for p in heard] == [*range(1, 10), 9]
    assert heard[-1].phase == "finalists" and heard[-1].baseline_us == pytest.approx(130, rel=0.05)
    bests = [p.best.latency_us for p in heard if p.best and p.best.latency_us]
    assert bests == sorted(bests, reverse=True)


def test_the_stored_winner_answers_look_ups_on_this_machine_only(store: Store) -> None:
    problem = AllGatherGemm(64, 64, 64, "fp32", "m", 2)
    verdict = run(store, SyntheticRunner(lambda c: 90.0 if c.variant == "bsp" else 80.0), problem, CPU, trials=12)
    reload()
    assert verdict.winner
    answer = lookup(problem, hardware=CPU, db=store.url)
    assert answer.match == "exact" and answer == verdict.winner.measurement.config
    assert lookup(problem, hardware=H200, db=store.url).match == "fallback"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trials": 0}, "trials is 0"),
        ({"timeout_s": 0.0}, "timeout is 0.0 s"),
        ({"sampler": "magic"}, "sampler is 'magic'; allowed are tpe, random, gp"),
        ({"variants": ("bsp", "teleport")}, f"variant is teleport; {GEMM} has bsp, decomposed, copy_engine, pull, push"),
    ],
)
def test_senseless_settings_are_refused_in_one_line(store: Store, settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        run(store, SyntheticRunner(gemm_landscape), **settings)
    assert "\n" not in str(refusal.value)
    assert store.counts() == {"runs": 0, "trials": 0, "winners": 0}
