"""Threads that decode values of a type at once when nobody has before. Msgspec alone crashes the process then."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest

from autotax.core.decoding import converted, from_json

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated
import msgspec

@dataclass
class Row:
    size: int
    name: str = ""

class Inner(msgspec.Struct):
    lists: dict[str, list[int]] | None = None
    row: Row | None = None

class Outer(msgspec.Struct):
    first: Inner
    rest: list[Inner]
    names: dict[str, Annotated[str, msgspec.Meta(max_length=9)]]
"""
TYPES, THREADS = 400, 4


def meet(way: str) -> None:
    """In a process of its own: threads meet one new type after another."""
    sys.setswitchinterval(1e-6)
    ways: dict[str, Callable[[Any], Any]] = {
        "json": lambda shape: from_json('{"first": {"row": {"size": 1}}, "rest": [{}], "names": {}}', shape),
        "values": lambda shape: converted({"first": {"row": {"size": 1}}, "rest": [{}], "names": {}}, shape),
    }
    met: list[Any] = []
    for number in range(TYPES):
        module = sys.modules[f"shapes{number}"] = types.ModuleType(f"shapes{number}")
        exec(SOURCE, vars(module))
        together = Barrier(THREADS)

        def run(shape: Any = module.Outer, together: Barrier = together) -> None:
            together.wait()
            met.append(ways[way](shape))

        threads = [Thread(target=run) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(met) == TYPES * THREADS and all(value.first.row.size == 1 for value in met)


@pytest.mark.parametrize("way", ["json", "values"])
def test_a_type_that_threads_meet_at_once_crashes_nothing(way: str) -> None:
    code = f"from tests.core.test_decoding import meet; meet({way!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
