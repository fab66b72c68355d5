"""Problems from outside: of rows, of JSON, and of a user's TOML file. Mistakes raise UsageError with one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from autotax.core.decoding import LONGEST_NAME, Malformed, Name, converted, reason
from autotax.core.errors import UsageError
from autotax.core.files import as_utf8, read_once
from autotax.core.problem import Problem
from autotax.core.terminal import printable
from autotax.operators.registry import operators, problem_from_dict

LARGEST_FILE = 2**24
"""Most bytes of a file."""
MOST_PROBLEMS = 10_000
"""A plan of so many takes some ten seconds, and their tuning takes days."""
LONGEST = 60
"""Most characters of a name or a value that a message repeats."""


def problem_of(values: object) -> Problem:
    """The inverse of `Problem.to_dict`. Raises Malformed."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if type(value) is int and (bits := value.bit_length()) > 63:  # Python refuses to print the largest
            raise Malformed(f"{printable(str(name))[:LONGEST_NAME]} is a number of {bits} bits; at most 63 are allowed")
    try:
        return problem_from_dict(converted(values, dict[Name, int | float | bool | Name]))
    except UsageError as error:
        raise Malformed(reason(error)) from None


def read_shapes(path: Path, world_size: int) -> list[Problem]:
    """The problems of a TOML file without duplicates; `world_size` is the default for problems that do not give one."""
    try:
        data = read_once(path, LARGEST_FILE)  # reading some device files never ends
        if len(data) > LARGEST_FILE:
            raise UsageError(f"file {path} holds more than {LARGEST_FILE >> 20} MiB: give another --shapes")
        tables = tomllib.loads(as_utf8(data).decode())
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give another --shapes") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"file {path} is not TOML ({error}): mend it, or give another --shapes") from None
    arrays = {op: _array(path, op, entries) for op, entries in tables.items()}
    if (count := sum(map(len, arrays.values()))) > MOST_PROBLEMS:
        raise UsageError(f"file {path} holds {count} problems; at most {MOST_PROBLEMS} are allowed: make several files of it")
    problems = [
        _read_shape(f"file {path}, [[{op}]] number {number}", {"world_size": world_size, "op": op} | entry, op)
        for op, entries in arrays.items()
        for number, entry in enumerate(entries, 1)
    ]
    if not problems:
        raise UsageError(f"file {path} holds no problems; it needs tables such as [[{next(iter(operators()))}]]: add some")
    return list(dict.fromkeys(problems))


def _array(path: Path, op: str, entries: object) -> list[dict[str, Any]]:
    if op not in operators():
        raise UsageError(f"file {path} has {op[:LONGEST]!r}; allowed are [[{']], [['.join(operators())}]]: take it out")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"file {path} has {op!r} as something else than an array of tables: write [[{op}]]")
    return entries


def _read_shape(label: str, values: dict[str, Any], op: str) -> Problem:
    if values["op"] != op:
        raise UsageError(f"{label}: op is {str(values['op'])[:LONGEST]!r} in a table of {op}: take it out, or move the table")
    try:
        return problem_of(values)
    except Malformed as error:
        raise UsageError(f"{label}: {error}") from None
