"""Where the time of bulk-synchronous calls goes, told from one comparison: parts that add up to what BSP takes.

The frame is that of "Eliminating Multi-GPU Performance Taxes" (arXiv 2511.02168): a tax for launching kernels, one for waiting in
bulk, one for results that go through memory between kernels. What a comparison cannot tell apart stays together here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotax.core.conditions import Conditions
from autotax.operators import Operator, registry
from autotax.report.comparison_files import Document
from autotax.tuner.compare import TUNED

WORK, LAUNCH = "work", "launch"


@dataclass(frozen=True)
class Tax:
    """Microseconds of a call; negative where a step loses. `told`: what it is."""

    name: str
    us: float
    told: str


def taxes(document: Document) -> list[Tax]:
    """The parts of a comparison's BSP from the work itself upwards, as far as they were measured, then what eager calls take
    beyond it. Nothing without a verified BSP.
    """
    rows, whole = _verified(document), bsp_us(document)
    if whole is None:
        return []
    operator = registry.named(document["problem"]["op"])
    bounds = {told: us for name, told in operator.bounds.items() if (us := document.get(f"{name}_us")) is not None}
    told = _by_steps if operator.ladder else _by_bounds
    parts = told(whole, rows, operator, bounds)
    if whole == rows.get("bsp-graph") and "bsp-eager" in rows:  # else launches are among the rest
        parts.append(Tax(LAUNCH, rows["bsp-eager"] - rows["bsp-graph"], "calls launched one by one, not replayed from a graph"))
    return parts


def bsp_us(document: Document) -> float | None:
    """What BSP takes as the tuned config is called: in a graph, or eager."""
    rows, launch = _verified(document), Conditions.from_dict(document.get("conditions") or {}).launch
    on_cpu = (document.get("hardware") or {}).get("backend") == "cpu"  # where in place is eager too
    return rows.get("bsp-eager" if on_cpu else f"bsp-{launch}")


def won_back(document: Document) -> float | None:
    """The share of what BSP takes beyond the work that the tuned config does not take; None where that is not known or none."""
    parts, whole, tuned = taxes(document), bsp_us(document), _verified(document).get(TUNED)
    if whole is None or tuned is None or parts[0].name != WORK or whole <= parts[0].us:
        return None
    return (whole - tuned) / (whole - parts[0].us)


def _verified(document: Document) -> dict[str, float]:
    """The latency of each row that is."""
    return {row["name"]: row["latency_us"] for row in document["rows"] if row["verified"] and row["latency_us"] is not None}


def _by_bounds(whole: float, rows: dict[str, float], operator: Operator[Any], bounds: dict[str, float]) -> list[Tax]:
    """Of an operator without a ladder: the part that was measured alone, and what else bounds a call."""
    part = rows.get(operator.part.row) if operator.part else None
    if part is None or operator.part is None:
        return [Tax("all", whole, "communication and computation")]
    if len(bounds) < len(operator.bounds):
        return [
            Tax(WORK, part, operator.part.part),
            Tax("communication", whole - part, f"all beyond {operator.part.part}, which waits for it"),
        ]
    times = {operator.part.part: part} | bounds
    greatest, rest = max(times.values()), sum(times.values()) - max(times.values())
    return [
        Tax(WORK, greatest, f"the greater of {' and '.join(times)}"),
        Tax("bulk-synchronous", rest, "the smaller of the two, which is not beside the other"),
        Tax("library", whole - greatest - rest, "communication beyond the links' rate, launches, data that go through memory"),
    ]


def _by_steps(whole: float, rows: dict[str, float], operator: Operator[Any], bounds: dict[str, float]) -> list[Tax]:
    """What each rung of the ladder takes away from the one before it. Of rungs that share a step the best counts."""
    steps, before = [], whole
    for step in dict.fromkeys(variant.step for variant in operator.ladder if variant.step):
        here = [rows[variant.name] for variant in operator.ladder if variant.step == step and variant.name in rows]
        alternatives = sum(variant.step == step for variant in operator.ladder) > 1
        if alternatives:
            here.append(before)
        if here:
            steps.append(Tax(step.tax, before - min(here), step.told))
            before = min(here)
    if not bounds:
        return [Tax("left", before, "the fastest variant"), *reversed(steps)]
    work = max(bounds.values())
    left = Tax("left", before - work, "what the fastest variant takes beyond that")
    return [Tax(WORK, work, " and ".join(bounds)), left, *reversed(steps)]
