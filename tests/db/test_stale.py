"""Selection of the stale winners that must be proven again, and the conditions of each proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotax.api import stale_here
from autotax.core.conditions import EAGER, Conditions
from autotax.core.config import Config
from autotax.db import Store
from autotax.db.records import Entry, Place, stale_winners
from autotax.operators.problems import GatherAttention, GemmReduceScatter
from autotax.spaces import space_for
from tests.db.conftest import ENVIRONMENT, HARDWARE, PUSH, a_winner

USUAL = Conditions.usual(on_gpu=True)
OTHER = Config.of("push", block_m=32)


def test_what_was_proven_back_to_back_holds_and_is_proven_in_place_when_all_are_asked_for() -> None:
    here = Place(HARDWARE, ENVIRONMENT, USUAL)
    back_to_back = a_winner(1, PUSH, conditions=Conditions("graph"))
    assert stale_winners([back_to_back], here, any_conditions=True) == []
    (stale,) = stale_winners([back_to_back], here, any_conditions=True, everything=True)
    assert (stale.conditions, stale.configs, stale.why) == (USUAL, (PUSH,), "")


def test_winners_of_calls_that_are_deployed_alike_are_proven_together() -> None:
    here = Place(HARDWARE, ENVIRONMENT, USUAL)
    winners = [
        a_winner(1, PUSH, conditions=Conditions("graph")),
        a_winner(2, OTHER, conditions=USUAL),
        a_winner(3, PUSH, conditions=EAGER),
        a_winner(4, PUSH, conditions=Conditions("graph", skew_us=9.0)),
    ]
    configs = {
        stale.conditions: set(stale.configs) for stale in stale_winners(winners, here, any_conditions=True, everything=True)
    }
    assert configs == {USUAL: {PUSH, OTHER}, EAGER: {PUSH}, Conditions("graph", skew_us=9.0): {PUSH}}
    asked = Place(HARDWARE, ENVIRONMENT, Conditions("graph"))
    (only,) = stale_winners(winners, asked, everything=True)
    assert (only.conditions, set(only.configs)) == (Conditions("graph"), {PUSH, OTHER})


def test_winners_from_before_a_parameter_are_proven_with_what_they_did(tmp_path: Path) -> None:
    old = {"block_m": 64, "block_n": 128, "num_stages": 4, "group_m": 8, "order": "ring"}
    usual = {"adds": "warps", "polls": "piece"}
    added = {"push_specialized": usual, "scaled_specialized": {**usual, "strip": 128}, "heads": {"pieces": 1, "squares": 1}}
    problems = (
        GemmReduceScatter(512, 1024, 1024, "bf16", "scattered", 2),
        GemmReduceScatter(512, 1024, 1024, "e4m3", "scattered", 2, scales="row"),
        GatherAttention(1, 16, 4, 128, 4096, "bf16", 2),
    )
    before = {"heads": {"library": "cudnn"}}
    with Store.open(tmp_path / "some.db", create=True) as store:
        for problem, variant in zip(problems, added, strict=True):
            winner = replace(a_winner(1, Config.of(variant, before.get(variant, old)), conditions=USUAL), problem=problem)
            store.merge([Entry(winner)], "an older version")
        stale = stale_here(store, HARDWARE, problems, None, everything=True)
    assert {item.problem: item.configs for item in stale} == {
        problem: (Config.of(variant, before.get(variant, old) | more),)
        for problem, (variant, more) in zip(problems, added.items(), strict=True)
    }
    assert all(config in space_for(item.problem, HARDWARE) for item in stale for config in item.configs)
