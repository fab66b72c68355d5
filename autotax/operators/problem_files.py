"""Reads a user's file of problems: TOML with an array of tables for each operator.

Mistakes raise UsageError with one line: the given value, the allowed values and the remedy.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.validation import Malformed, problem_of
from autotax.operators import operators

LARGEST_FILE = 2**24
"""Most bytes of a file."""


def read_shapes(path: Path, world_size: int) -> list[Problem]:
    """The problems of a TOML file without duplicates; `world_size` is the default for problems that do not give one."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)  # reading some device files never ends
        if len(data) > LARGEST_FILE:
            raise UsageError(f"file {path} holds more than {LARGEST_FILE >> 20} MiB: give another --shapes")
        tables = tomllib.loads(data.decode())
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give another --shapes") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"file {path} is not TOML ({error}): mend it, or give another --shapes") from None
    problems = [
        _read_shape(f"file {path}, [[{op}]] number {number}", {"world_size": world_size} | entry | {"op": op})
        for op, entries in tables.items()
        for number, entry in enumerate(_array(path, op, entries), 1)
    ]
    if not problems:
        raise UsageError(f"file {path} holds no problems; it needs tables such as [[{next(iter(operators()))}]]: add some")
    return list(dict.fromkeys(problems))


def _array(path: Path, op: str, entries: object) -> list[dict[str, Any]]:
    if op not in operators():
        raise UsageError(f"file {path} has {op!r}; allowed are [[{']], [['.join(operators())}]]: take it out")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"file {path} has {op!r} as something else than an array of tables: write [[{op}]]")
    return entries


def _read_shape(label: str, values: dict[str, Any]) -> Problem:
    try:
        return problem_of(values)
    except Malformed as error:
        raise UsageError(f"{label}: {error}") from None
