"""Where causal attention of the vendor is cut into squares: where a head's keys and values do not fit in the L2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotax.operators.problems import GatherAttention
from autotax.spaces import space_for
from tests.tuner.shared import H200

LONG = GatherAttention(1, 64, 8, 128, 131072, "bf16", 2)


@pytest.mark.parametrize(
    ("problem", "variant", "squares", "seeded"),
    [
        (LONG, "heads", (1, 2, 4), 2),
        (LONG, "bsp", (1,), 1),  # a rank attends to its half, and to the other one without a mask
        (replace(LONG, seq_len=262144), "bsp", (1, 2, 4), 2),
        (replace(LONG, seq_len=262144), "heads", (1, 2, 4), 4),
        (replace(LONG, seq_len=65536), "heads", (1,), 1),
        (replace(LONG, mask="none"), "heads", (1,), 1),
        (replace(LONG, window=1024), "heads", (1,), 1),
        (replace(LONG, seq_len=131074), "heads", (1, 2), 2),  # squares have equal sides
        (replace(LONG, head_dim=64, seq_len=131072), "heads", (1,), 1),
    ],
    ids=str,
)
def test_squares_are_offered_where_keys_exceed_the_l2(
    problem: GatherAttention, variant: str, squares: tuple[int, ...], seeded: int
) -> None:
    space = space_for(problem, replace(H200, count=2))
    assert space.variants[variant].parameters["squares"] == squares
    assert {config["squares"] for config in space.variants[variant].seeds} == {seeded}
