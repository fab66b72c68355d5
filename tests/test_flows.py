"""A trial, a first look-up and a call pass through few files of the package, so that a newcomer can follow each."""

from __future__ import annotations

import pytest

from results.runtime.flows import traced


def test_a_first_look_up() -> None:
    """It calls no function of another file for each shipped winner, of which there are hundreds."""
    counted = traced("look-up")
    assert counted["files"] <= 25 and counted["hops"] <= 60 and counted["calls"] <= 300, counted


@pytest.mark.volume
@pytest.mark.parametrize(("flow", "files"), [("trial", 20), ("call", 12)])
def test_a_trial_and_a_call(flow: str, files: int) -> None:
    counted = traced(flow)
    assert counted["files"] <= files, counted
