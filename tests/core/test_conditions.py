"""The conditions under which calls are made."""

from __future__ import annotations

import pytest

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.errors import UsageError
from autotax.db.formats import conditions_of


@pytest.mark.parametrize("skew_us", [0.0, 12.5, 33.333333333, 9999.9999, 1e-7])
def test_what_a_database_gives_back_is_what_was_asked_for(skew_us: float) -> None:
    asked = Conditions("eager", "warm", skew_us)
    assert conditions_of(asked.key) == asked == Conditions.from_dict(asked.to_dict())


def test_calls_in_a_graph_are_searched_back_to_back_and_proven_in_place() -> None:
    usual = Conditions.usual(on_gpu=True)
    assert (usual.key, usual.launch, usual.in_place) == ("in-place/cold/0", "graph", True)
    assert conditions_of(usual.key) == usual == Conditions.from_dict(usual.to_dict()) == usual.proven
    assert usual.searched == Conditions("graph") and Conditions("graph").proven == usual
    assert Conditions.from_dict({"l2": "cold"}) == Conditions("graph"), "older trials do not say in what mode they were measured"


@pytest.mark.parametrize("conditions", [ON_CPU, Conditions("eager"), Conditions("graph", "warm", 5.0)])
def test_other_calls_are_proven_as_they_are(conditions: Conditions) -> None:
    assert conditions.proven == conditions.searched == conditions


def test_ranks_that_arrive_apart_stand_nowhere() -> None:
    with pytest.raises(UsageError, match="skew is 20 us in place, where ranks arrive together: give --mode graph or no --skew"):
        Conditions("in-place", skew_us=20.0)
