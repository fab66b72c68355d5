"""What `autotax compare --json` printed, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotax.errors import UsageError
from autotax.hardware import Hardware
from autotax.problem import problem_from_dict

Document = dict[str, Any]


def read(path: Path) -> list[Document]:
    """The comparisons of a file, in its order. Raises UsageError of one line for what is not such a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        documents = found if isinstance(found, list) else [found]
        for document in documents:
            problem_from_dict(document["problem"])
            Hardware(**document["hardware"])
            for row in document["rows"]:
                _check(row)
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give another") from None
    except (ValueError, KeyError, TypeError, UsageError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"file {path} is not what `autotax compare --json` prints ({why}): give another") from None
    return documents


def _check(row: Any) -> None:
    name, us, rounds = row["name"], row["latency_us"], row["rounds_us"]
    if not (isinstance(name, str) and isinstance(us, float | int | None) and isinstance(row["verified"], bool)):
        raise TypeError(f"a row is {name!r}, {us!r}")
    if not all(isinstance(each, float | int) for each in rounds):
        raise TypeError(f"row {name} has samples that are no numbers")
