"""A file of problems, as a user writes it: TOML, an array of tables for each operator.

What is wrong is a UsageError: one line that says what was given, what is allowed and what to do.
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
"""Bytes."""


def read_shapes(path: Path, world_size: int) -> list[Problem]:
    """The problems of a TOML file, each once; `world_size` is for those that name none."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)  # some devices never end
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


def _read_shape(named: str, values: dict[str, Any]) -> Problem:
    try:
        return problem_of(values)
    except Malformed as error:
        raise UsageError(f"{named}: {error}") from None
