"""The breakdown of a run's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.report.formatting import accounts
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.tuner.search import Search
from tests.tuner.shared import H200, Ear, gemm_landscape, run
from tests.tuner.synthetic import Clock, SyntheticRunner


class Slow(SyntheticRunner):
    """Each job takes 60 ms: 30 on the devices, 20 compiling; and notices that rank 2 is slow."""

    clock = Clock()

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        self.clock.sleep(0.06)
        first, *others = super().measure(problem, candidates, effort)
        first = replace(first, device_s=0.03, compile_s=0.02, notices=("rank 2 is slow",))
        return [first, *(replace(other, compile_s=0.0) for other in others)]


def test_a_run_accounts_for_its_seconds(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "clock", clock)
    verdict = run(store, Slow(gemm_landscape), trials=10)
    breakdown = verdict.accounts
    jobs = round(breakdown["device_s"] / 0.03)
    assert jobs >= 11 and breakdown["compile_s"] == pytest.approx(jobs * 0.02)
    assert breakdown["ranks_s"] == pytest.approx(jobs * 0.01)
    parts = breakdown["device_s"] + breakdown["compile_s"] + breakdown["ranks_s"] + breakdown["tuner_s"]
    assert parts == pytest.approx(breakdown["seconds"]) and breakdown["seconds"] == pytest.approx(verdict.seconds)
    assert breakdown["idle_share"] == pytest.approx(1 - breakdown["device_s"] / breakdown["seconds"])
    assert breakdown["trials"] == 10 and breakdown["trials_per_minute"] == pytest.approx(600 / breakdown["search_s"])
    assert breakdown["search_s"] < breakdown["seconds"], "the finalists are not part of the search"
    assert store.runs()[0].accounts == pytest.approx(breakdown)
    resumed = run(store, Slow(gemm_landscape), trials=12)
    assert resumed.accounts["trials"] == 2, "those of earlier runs took this one no time"


def test_what_the_database_takes_while_ranks_measure_is_not_their_work(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Beside(SyntheticRunner):
        """Each job takes the ranks 20 ms, none of it on their devices, while the tuner looks ahead."""

        def measure(
            self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
        ) -> list[Measurement]:  # fmt: skip
            until = clock.monotonic() + 0.02
            measurements = super().measure(problem, candidates, effort, overlap)
            clock.sleep(max(0.0, until - clock.monotonic()))
            return [replace(m, ranks_s=0.02 / len(measurements), compile_s=0.0) for m in measurements]

    ask = Search.ask

    def locked(self: Search) -> Config | None:
        clock.sleep(0.2)
        return ask(self)

    monkeypatch.setattr(Search, "ask", locked)
    runner = Beside(gemm_landscape)
    runner.look_ahead = 2
    breakdown = run(store, runner, trials=8).accounts
    assert breakdown["tuner_s"] > 7 * 0.2 and 8 * 0.02 < breakdown["ranks_s"] < 5 * 0.2


def test_one_line_says_it() -> None:
    breakdown = {
        "device_s": 7.8, "compile_s": 1.6, "ranks_s": 4.0, "tuner_s": 6.6, "seconds": 20.0, "idle_share": 0.61,
        "trials": 60, "search_s": 16.0, "trials_per_minute": 225.0,
    }  # fmt: skip
    assert accounts(breakdown, H200) == "Search 16 s, finals 4 s; GPUs waited for the host 61 % of the time."


def test_a_notice_is_told_once_a_run_and_kept(store: Store) -> None:
    ear = Ear()
    verdict = run(store, Slow(gemm_landscape), trials=8, sampler="tpe", listener=ear)
    assert ear.notices == ["rank 2 is slow"] == list(verdict.notices)
    run(store, Slow(gemm_landscape), trials=8, sampler="tpe")
    assert [record.notices for record in store.runs()] == [("rank 2 is slow",)] * 2
