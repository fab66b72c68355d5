"""Selection of the stale winners that must be proven again, and the conditions of each proof."""

from __future__ import annotations

from autotax.core.conditions import EAGER, Conditions
from autotax.core.config import Config
from autotax.db.records import Place, stale_winners
from tests.db.conftest import ENVIRONMENT, HARDWARE, PUSH, a_winner

USUAL = Conditions.usual(on_gpu=True)
OTHER = Config.of("push", block_m=32)


def test_what_was_proven_back_to_back_holds_and_is_proven_in_place_when_all_are_asked_for() -> None:
    here = Place(HARDWARE, ENVIRONMENT, USUAL)
    back_to_back = a_winner(1, PUSH, conditions=Conditions("graph"))
    assert stale_winners([back_to_back], here, any_conditions=True) == []
    (found,) = stale_winners([back_to_back], here, any_conditions=True, everything=True)
    assert (found.conditions, found.configs, found.why) == (USUAL, (PUSH,), "")


def test_winners_of_calls_that_are_deployed_alike_are_proven_together() -> None:
    here = Place(HARDWARE, ENVIRONMENT, USUAL)
    winners = [
        a_winner(1, PUSH, conditions=Conditions("graph")),
        a_winner(2, OTHER, conditions=USUAL),
        a_winner(3, PUSH, conditions=EAGER),
        a_winner(4, PUSH, conditions=Conditions("graph", skew_us=9.0)),
    ]
    found = {each.conditions: set(each.configs) for each in stale_winners(winners, here, any_conditions=True, everything=True)}
    assert found == {USUAL: {PUSH, OTHER}, EAGER: {PUSH}, Conditions("graph", skew_us=9.0): {PUSH}}
    asked = Place(HARDWARE, ENVIRONMENT, Conditions("graph"))
    (only,) = stale_winners(winners, asked, everything=True)
    assert (only.conditions, set(only.configs)) == (Conditions("graph"), {PUSH, OTHER})
