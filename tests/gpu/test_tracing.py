"""Timelines of stamped kernels on real GPUs: programs and their waits lie in their kernel, on one clock."""

from __future__ import annotations

import pytest

from autotax import trace
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.spaces import space_for

PROBLEM = AllGatherGemm(512, 1024, 2048, "bf16", "m", 2)
FEW_ROWS = AllGatherGemm(64, 1024, 2048, "bf16", "m", 2)
SLACK_US = 50.0
"""The greatest difference of two clocks within a call."""
LONGEST_US = 2000.0
"""Limit for the duration of a call. It takes some 30 us if its ranks arrive together."""


@pytest.mark.parametrize(
    ("problem", "variant"), [(PROBLEM, "push"), (PROBLEM, "push_specialized"), (FEW_ROWS, "push_words")]
)  # fmt: skip
def test_programs_wait_and_send_inside_their_kernel(problem: AllGatherGemm, variant: str) -> None:
    space = space_for(problem, detect())
    if variant not in space.variants:
        pytest.skip(f"{variant} is not for these GPUs")
    timeline = trace(problem, config=space.default(variant))
    for rank, slices in enumerate(timeline.ranks):
        programs = [span for span in slices if span.kind == "program"]
        kernels = [span for span in slices if span.kind == "kernel"]
        assert len({span.track for span in programs}) > 1
        begin, end = min(span.start_us for span in kernels), max(span.end_us for span in kernels)
        assert all(begin - SLACK_US < span.start_us and span.end_us < end + SLACK_US for span in programs)
        assert {span.kind for span in slices} >= {"kernel", "program", "wait", "send"}
        of_track = {span.track: span for span in reversed(programs)}
        inner = [span for span in slices if span.kind in ("wait", "send")]
        assert all(of_track[span.track].start_us <= span.start_us <= span.end_us <= of_track[span.track].end_us for span in inner)
        assert 0 < timeline.share(rank, "wait") < 1
        assert timeline.call_us(rank) < LONGEST_US and timeline.shipped_us[rank] < LONGEST_US, "no rank waits for a host"


def test_kernels_alone_are_shown_as_they_ship() -> None:
    timeline = trace(PROBLEM, config=space_for(PROBLEM, detect()).default("push"), programs=False)
    assert not timeline.programs and not timeline.shipped_us
    assert [[(span.kind, span.name) for span in slices] for slices in timeline.ranks] == [[("kernel", "push_kernel")]] * 2
    assert max(map(timeline.call_us, range(2))) < LONGEST_US
