"""A latency depends only on its config, not on the other measured rows nor on an idle time before."""

from __future__ import annotations

import pytest

from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, DecodeMerge
from autotax.runner import LiveRunner
from autotax.spaces import space_for
from autotax.tuner import compare
from autotax.tuner.comparison import Choice

WORLD = 2
CASES = (
    (DecodeMerge(2, 40, 128, world_size=WORLD), "words", ("gather", "fine_grained", "words", "compact")),
    (AllGatherGemm(16, 5120, 8192, world_size=WORLD), "push_words", ("decomposed", "push", "push_two_kernel", "push_words")),
)
"""A problem behind a product and one behind a norm, what is tuned for it, and its company."""
ALIKE = 0.05
TIMES = 2
"""Measurements of each kind: a figure must not differ from itself either."""


def figures(problem: Problem, variant: str, *modules: str, variants: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """Microseconds of the captured rows of comparisons with one runner, in place and back to back, by row."""
    hardware = detect()
    space = space_for(problem, hardware)
    tuned, bsp, *others = (Choice(space.default(name), "default") for name in (variant, "bsp", *variants))
    runner = LiveRunner(hardware, WORLD, modules=modules)
    readings = []
    try:
        for _ in range(TIMES):
            compared = compare(problem, hardware=hardware, runner=runner, tuned=tuned, baseline=bsp, variants=others)
            rows = {row.name: row.measurement for row in compared.rows if row.name in ("autotax", "bsp-graph")}
            assert all(m.status == "ok" for m in rows.values()), [m.error for m in rows.values()]
            us = {f"{name} in place": m.latency_us for name, m in rows.items()}
            us |= {f"{name} back to back": m.back_to_back_us for name, m in rows.items()}
            readings.append({name: value for name, value in us.items() if value is not None})
    finally:
        runner.close()
    return readings


@pytest.mark.parametrize(("problem", "variant", "company"), CASES, ids=str)
def test_a_figure_does_not_depend_on_what_is_measured_beside_it(problem: Problem, variant: str, company: tuple[str, ...]) -> None:
    readings = [
        *figures(problem, variant), *figures(problem, variant, variants=company), *figures(problem, variant, "tests.gpu.pausing")
    ]  # fmt: skip
    assert len(readings) == 3 * TIMES and all(len(reading) == 4 for reading in readings)
    apart = {name: [reading[name] for reading in readings] for name in readings[0]}
    print("\n".join(f"{name}: {', '.join(f'{value:.2f}' for value in us)} us" for name, us in apart.items()))
    for name, us in apart.items():
        assert max(us) <= (1 + ALIKE) * min(us), f"{name}: {us}"
