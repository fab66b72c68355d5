"""Functions of notebook cells get a file with all that they refer to, or a line that says what cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from triton.language import constexpr

from autotax import UsageError
from autotax.declare import is_of_a_cell, write_cells
from tests.examples.test_tour import run_cell

CELL = """
import functools
import math as m
from collections.abc import Callable, Mapping
from dataclasses import dataclass
import torch

LIMIT, KIND, NAMES = 3, torch.float16, {"a": (1, 2)}
BLOCK = constexpr(16)
unused = object()

@dataclass
class Scale:
    by: int = LIMIT

@functools.cache
def helper(x: int, scale: type = Scale) -> float:
    unused = m.sqrt(x) * scale().by
    return unused if x < LIMIT else make(x - 1)

def make(x: int = 5) -> Callable[..., Mapping[str, int]]:
    return helper(x), KIND, NAMES, BLOCK.value
"""


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A main module without a file, as in a kernel."""
    module = ModuleType("__main__")
    module.__dict__["constexpr"] = constexpr
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_cell(1, CELL, module.__dict__)
    return module


def test_a_file_holds_what_the_functions_refer_to(notebook: ModuleType) -> None:
    assert is_of_a_cell(notebook.make) and not is_of_a_cell(pytest.fixture)
    path = write_cells({"make": notebook.make})
    there: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), there)
    made = there["make"]
    assert callable(made) and made() == notebook.make() and "unused = object" not in path.read_text()
    assert write_cells({"make": notebook.make}) == path, "equal sources have one file"
    run_cell(2, "LIMIT = 4", notebook.__dict__)
    assert write_cells({"make": notebook.make}) != path


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("def make(): return unused", "make refers to unused, a object; allowed are modules, functions"),
        ("make = lambda: 1", "must be a function of a cell: give it a name there"),
        ("def outer(x):\n    def make(): return x\n    return make\nmake = outer(1)", "refers to variables of another function"),
        ("exec('def make(): return 1')", "make has no source that Python can find"),
    ],
)
def test_what_no_file_can_hold_is_one_line(notebook: ModuleType, cell: str, message: str) -> None:
    run_cell(2, cell, notebook.__dict__)
    with pytest.raises(UsageError, match=message):
        write_cells({"make": notebook.make})


def test_a_call_with_other_tunables_takes_the_place_of_the_former() -> None:
    code = "from tests.test_cells import declare_twice; print(declare_twice())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True)
    assert ran.stdout == "[('a', (1,)), ('a', (1, 2))]\n"


def declare_twice() -> list[tuple[str, object]]:
    """The parameter of each declaration, as a search sees it."""
    from autotax.declare import declare
    from autotax.hardware import detect
    from autotax.spaces import space_for

    roles = dict.fromkeys(("make", "inputs", "reference", "baseline"), declare_twice)
    parameters = []
    for values in ([1], [1, 2]):
        space = space_for(declare(roles, {"a": values}, "mine")(), detect("cpu"))
        parameters.append(next(iter(space.variants["tuned"].parameters.items())))
    return parameters


def test_a_file_that_was_changed_is_written_anew_and_a_folder_of_all_users_is_refused(notebook: ModuleType) -> None:
    path = write_cells({"make": notebook.make})
    text = path.read_text()
    path.write_text("raise SystemExit('a stranger was here')")
    assert write_cells({"make": notebook.make}) == path and path.read_text() == text
    assert path.parent.stat().st_mode & 0o077 == 0
    path.parent.chmod(0o777)
    with pytest.raises(UsageError, match="all users may write to it: remove it, or `chmod o-w` it"):
        write_cells({"make": notebook.make})
