"""The choice of the config that represents a variant in a comparison."""

from __future__ import annotations

from autotax.core.config import Config
from autotax.db import TrialRecord
from autotax.spaces import space_for
from autotax.tuner.comparison import best_of
from tests.tuner.shared import GEMM, H200

SPACE = space_for(GEMM, H200)
PUSH, OTHER, THIRD = SPACE.variants["push"].seeds[:3]


def trial(config: Config, us: float, *, final: bool = False, status: str = "ok") -> TrialRecord:
    conditions = {"stage": "finalists"} if final else {}
    return TrialRecord(0, config, status, us, verified=status == "ok", conditions=conditions)


def test_a_config_that_was_no_finalist_does_not_win_because_finalists_read_slower() -> None:
    """Finalists read 5 % slower than in the search: clocks are lower by then."""
    searched = [trial(PUSH, 100.0), trial(OTHER, 101.0), trial(THIRD, 102.0)]
    finals = [trial(PUSH, 105.0, final=True), trial(OTHER, 106.0, final=True)]
    choice = best_of("push", [*searched, *finals], SPACE)
    assert (choice.config, choice.source) == (PUSH, "best of 5 trials in a paired round")


def test_an_unpaired_figure_that_scatters_does_not_win() -> None:
    trials = [trial(PUSH, 100.0), trial(THIRD, 98.0), trial(PUSH, 100.0, final=True)]
    assert best_of("push", trials, SPACE).config == PUSH


def test_a_config_found_later_that_is_clearly_faster_stands_for_its_variant() -> None:
    trials = [trial(PUSH, 100.0), trial(PUSH, 105.0, final=True), trial(THIRD, 90.0)]
    assert best_of("push", trials, SPACE).config == THIRD


def test_a_config_that_failed_since_does_not_stand_for_its_variant() -> None:
    wrong = trial(PUSH, 100.0, final=True, status="wrong_result")
    assert best_of("push", [trial(PUSH, 100.0), trial(OTHER, 120.0), wrong], SPACE).config == OTHER
    assert best_of("push", [wrong], SPACE).source == "default: none of 1 trials is verified"


def test_the_level_of_another_variants_finalists_counts_too() -> None:
    bsp = Config("bsp")
    trials = [trial(bsp, 100.0), trial(bsp, 110.0, final=True), trial(PUSH, 100.0, final=True), trial(OTHER, 92.0)]
    assert best_of("push", trials, SPACE).config == PUSH, "the other would read 101 among finalists"
