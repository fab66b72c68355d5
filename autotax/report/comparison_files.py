"""Reading what `autotax compare --json` printed; earlier versions printed a comparison or a list of them without a frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.core.validation import ConfigShape, Malformed, Name, Positive, Sample, converted, from_json, problem_of, read_bytes
from autotax.db.file_format import ConditionsShape, HardwareShape

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
    """What is read of a document. It holds more, and may hold yet more in other versions."""

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
    """The comparisons of a file, in its order. Raises UsageError of one line for what is not such a file."""
    try:
        found = from_json(read_bytes(path), list[Document] | Document)  # type: ignore[arg-type]
        if isinstance(found, dict) and "schema_version" in found:
            found = converted(found.get("results"), list[Document])
        documents = found if isinstance(found, list) else [found]
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
