"""Timelines of stamped kernels on real GPUs: programs and their waits lie in their kernel, on one clock."""

from __future__ import annotations

import pytest

from autotax import trace
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.spaces import space_for

PROBLEM = AllGatherGemm(512, 1024, 2048, "bf16", "m", 2)
SLACK_US = 50.0
"""How far two clocks may part within a call."""


@pytest.mark.parametrize("variant", ["push", "push_specialized", "push_words"])
def test_programs_wait_and_send_inside_their_kernel(variant: str) -> None:
    space = space_for(PROBLEM, detect())
    if variant not in space.variants:
        pytest.skip(f"{variant} is not for these GPUs")
    timeline = trace(PROBLEM, config=space.default(variant), programs=True)
    for slices in timeline.ranks:
        programs = [each for each in slices if each.kind == "program"]
        kernels = [each for each in slices if each.kind == "kernel"]
        assert len({each.track for each in programs}) > 1
        begin, end = min(each.start_us for each in kernels), max(each.end_us for each in kernels)
        assert all(begin - SLACK_US < each.start_us and each.end_us < end + SLACK_US for each in programs)
        assert {each.kind for each in slices} >= {"kernel", "program", "wait", "send"}
        of_track = {each.track: each for each in programs}
        inner = [each for each in slices if each.kind in ("wait", "send") and each.track in of_track]
        assert all(of_track[each.track].start_us <= each.start_us for each in inner)
    assert all(0 < timeline.share(rank, "wait") < 1 for rank in range(2))
