"""The conditions under which calls are made."""

from __future__ import annotations

import pytest

from autotax.conditions import Conditions
from autotax.db.convert import conditions_of


@pytest.mark.parametrize("skew_us", [0.0, 12.5, 33.333333333, 9999.9999, 1e-7])
def test_what_a_database_gives_back_is_what_was_asked_for(skew_us: float) -> None:
    asked = Conditions("eager", "warm", skew_us)
    assert conditions_of(asked.key) == asked == Conditions.from_dict(asked.to_dict())
