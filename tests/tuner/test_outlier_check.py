"""A latency that is implausibly low is measured again, and the slower result counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.runner import Candidate, Effort, Measurement, Overlap
from tests.tuner.shared import Ear, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("without_syncing")


class Flattering(SyntheticRunner):
    """The ninth config is fast, and then `later` when it is measured again."""

    def __init__(self, later: float | str) -> None:
        super().__init__(lambda _: 100.0)
        self.later = later
        self.flattered: Config | None = None

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None,
    ) -> list[Measurement]:  # fmt: skip
        self.landscape = lambda config: self.later if config == self.flattered else 100.0
        if len(candidates) == 1 and self.flattered is None and len(self.searched) == 8:
            self.flattered = candidates[0].config
            self.landscape = lambda _: 50.0
        return super().measure(problem, candidates, effort)


@pytest.mark.parametrize(("later", "stands"), [(100.0, 100.0), (50.0, 50.0), (30.0, 50.0)])
def test_the_slower_figure_stands(store: Store, later: float, stands: float) -> None:
    ear, runner = Ear(), Flattering(later)
    run(store, runner, trials=12, listener=ear)
    (kept,) = [t for t in store.trials() if "measured_again" in t.conditions]
    assert kept.config == runner.flattered and runner.searched.count(kept.config) == 2
    assert kept.latency_us == pytest.approx(stands, rel=0.05)
    assert kept.conditions["measured_again"] == pytest.approx(50.0, rel=0.05)
    assert bool(ear.notices) == (later != 50.0) and all("suspiciously" in text for text in ear.notices)
    assert len([t for t in store.trials() if "stage" not in t.conditions]) == 12, "it is one trial all the same"


def test_what_fails_when_measured_again_has_failed(store: Store) -> None:
    verdict = run(store, Flattering("wrong_result"), trials=12)
    assert verdict.trials == {"ok": 11, "wrong_result": 1} and len(verdict.notices) == 1


def test_the_first_few_are_not_doubted(store: Store) -> None:
    falling = chain(range(1000, 100, -100), repeat(100))
    runner = SyntheticRunner(lambda _: float(next(falling)))
    run(store, runner, trials=5, soak=0)
    assert len(runner.searched) == 5
