"""Reads the output of `autotax compare --json`. Earlier versions printed a comparison or a list of comparisons without the
enclosing object.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from autotax.core.conditions import Conditions
from autotax.core.decoding import ConfigShape, Malformed, Name, Positive, Sample, converted, from_json
from autotax.core.errors import UsageError
from autotax.core.files import read_bytes
from autotax.db.formats import ConditionsShape, HardwareShape
from autotax.operators import Operator, registry
from autotax.operators.problem_files import problem_of
from autotax.tuner.comparison import TUNED, Comparison

Document = dict[str, Any]


class _Row(msgspec.Struct):
    name: Name
    latency_us: Sample | None
    verified: bool
    rounds_us: list[Sample]
    variant: str = ""
    config: dict[str, Any] = {}
    speedup_vs_bsp: Positive | None = None
    samples_us: list[list[Sample]] = []


class _Comparison(msgspec.Struct):
    """The fields of a document that are read. The document has further fields, which depend on the version."""

    problem: dict[str, Any]
    hardware: HardwareShape  # type: ignore[valid-type]
    rows: list[_Row]
    conditions: ConditionsShape | None = None
    error: str | None = None
    best_peer: Name | None = None
    speedup_vs_best_peer: Positive | None = None
    bound_us: Positive | None = None
    links_us: Positive | None = None
    memory_us: Positive | None = None
    over_bound: Positive | None = None


def read(path: Path) -> list[Document]:
    """The comparisons of a file, in its order. Raises UsageError of one line for any other file."""
    try:
        content = from_json(read_bytes(path), list[Document] | Document)  # type: ignore[arg-type]
        if isinstance(content, dict) and "schema_version" in content:
            content = converted(content.get("results"), list[Document])
        documents = content if isinstance(content, list) else [content]
        for document in documents:
            _check(converted(document, _Comparison))
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give another") from None
    except (Malformed, UsageError) as error:
        raise UsageError(f"file {path} is not what `autotax compare --json` prints ({error}): give another") from None
    return documents


def _check(document: _Comparison) -> None:
    problem_of(document.problem)
    if document.conditions:
        Conditions(**msgspec.structs.asdict(document.conditions))
    for row in document.rows:
        converted({"variant": row.variant, "params": row.config}, ConfigShape)
        if row.latency_us is not None and not row.rounds_us:
            raise Malformed(f"row {row.name} has a latency, but no rounds")


# Where the time of bulk-synchronous calls goes, computed from one comparison: parts that add up to the time of BSP.

WORK, LAUNCH = "work", "launch"


@dataclass(frozen=True)
class Tax:
    """A part of a call in microseconds, negative if a step is slower. `description` says what it is."""

    name: str
    us: float
    description: str


def taxes(document: Document) -> list[Tax]:
    """The measured parts of a comparison's BSP, from the work itself upwards. The last part is the additional time of eager
    calls. Empty without a verified BSP.
    """
    rows, whole = _verified(document), bsp_us(document)
    if whole is None:
        return []
    operator = registry.named(document["problem"]["op"])
    bounds = {explained: us for name, explained in operator.bounds.items() if (us := document.get(f"{name}_us")) is not None}
    explained = _by_steps if operator.ladder else _by_bounds
    parts = explained(whole, rows, operator, bounds)
    if whole == rows.get("bsp-graph") and "bsp-eager" in rows:  # else the launches are part of the rest
        parts.append(Tax(LAUNCH, rows["bsp-eager"] - rows["bsp-graph"], "calls launched one by one, not replayed from a graph"))
    return parts


def bsp_us(document: Document) -> float | None:
    """The latency of BSP, launched like the tuned config: in a graph, or eager."""
    rows, launch = _verified(document), Conditions.from_dict(document.get("conditions") or {}).launch
    on_cpu = (document.get("hardware") or {}).get("backend") == "cpu"  # on CPU ranks calls in place are eager too
    return rows.get("bsp-eager" if on_cpu else f"bsp-{launch}")


def won_back(document: Document) -> float | None:
    """The share of BSP's time beyond the work that the tuned config saves; None if it is unknown or BSP has no such time."""
    parts, whole, tuned = taxes(document), bsp_us(document), _verified(document).get(TUNED)
    if whole is None or tuned is None or parts[0].name != WORK or whole <= parts[0].us:
        return None
    return (whole - tuned) / (whole - parts[0].us)


def _verified(document: Document) -> dict[str, float]:
    return {row["name"]: row["latency_us"] for row in document["rows"] if row["verified"] and row["latency_us"] is not None}


def fastest_us(document: Document) -> float:
    """The least latency of the verified rows that do all of the work."""
    return _fastest(_verified(document), registry.named(document["problem"]["op"]))


def _fastest(us: Mapping[str, float], operator: Operator[Any]) -> float:
    part = operator.part.row if operator.part else None
    return min((of_row for name, of_row in us.items() if name != part), default=math.inf)


def _by_bounds(whole: float, rows: dict[str, float], operator: Operator[Any], bounds: dict[str, float]) -> list[Tax]:
    """The parts for an operator without a ladder: the work that was measured alone, and the other bounds of a call."""
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
    """The time that each step of the ladder saves over the step before it. If several variants share a step, the best counts."""
    steps, before = [], whole
    for step in dict.fromkeys(variant.step for variant in operator.ladder if variant.step):
        here = [rows[variant.name] for variant in operator.ladder if variant.step == step and variant.name in rows]
        alternatives = sum(variant.step == step for variant in operator.ladder) > 1
        if alternatives:
            here.append(before)
        if here:
            steps.append(Tax(step.tax, before - min(here), step.description))
            before = min(here)
    if not bounds:
        return [Tax("left", before, "the fastest variant"), *reversed(steps)]
    work = max(bounds.values())
    left = Tax("left", before - work, "what the fastest variant takes beyond that")
    return [Tax(WORK, work, " and ".join(bounds)), left, *reversed(steps)]


# The bound of a comparison. No call is faster than the part of the work that was measured alone, or than the operator's bounds.

@dataclass(frozen=True)
class Bound:
    """Microseconds of each bound by its description, for instance `the links at full rate`."""

    parts: dict[str, float]

    @property
    def us(self) -> float:
        return max(self.parts.values())


def known_us(comparison: Comparison) -> dict[str, float]:
    """The declared bounds that are known here and that no row undercuts, microseconds by name."""
    row = comparison.row(TUNED)
    rates = row.measurement.conditions if row else {}
    bounds = registry.of(comparison.problem).bounds_us(comparison.problem, comparison.hardware, rates)
    return {name: us for name, us in bounds.items() if us <= _fastest_us(comparison)}


def _fastest_us(comparison: Comparison) -> float:
    us = {row.name: row.measurement.latency_us or math.inf for row in comparison.rows if row.measurement.verified}
    return _fastest(us, registry.of(comparison.problem))


def bound_of(comparison: Comparison) -> Bound | None:
    """The bound of a comparison. None unless all bounds that the operator declares are known and its part was measured."""
    operator, bounds = registry.of(comparison.problem), known_us(comparison)
    parts: dict[str, float] = {}
    if operator.part:
        row = comparison.row(operator.part.row)
        if row is None or row.measurement.latency_us is None or row.measurement.latency_us > _fastest_us(comparison):
            return None
        parts[operator.part.part] = row.measurement.latency_us
    if operator.bounds.keys() != bounds.keys():
        return None
    parts |= {operator.bounds[name]: us for name, us in bounds.items()}
    return Bound(parts) if parts else None


def tuned_us(comparison: Comparison) -> float | None:
    row = comparison.row(TUNED)
    return row.measurement.latency_us if row else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values above zero; None if there are none. A figure in place may be zero or less."""
    logarithms = [math.log(value) for value in values if value is not None and value > 0.0]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def means(comparisons: Sequence[Comparison], op: str) -> tuple[int, float | None, float | None]:
    """How many problems of an operator were compared, and the geometric means over BSP and over the best alternative."""
    compared = [c for c in comparisons if c.problem.op == op and c.ok]
    over_bsp = (row.speedup for c in compared if (row := c.row(TUNED)))
    return len(compared), geometric_mean(over_bsp), geometric_mean(c.over_peer for c in compared)
