"""Functions of notebook cells in a file: their source, with the imports, constants and functions that it refers to.

Ranks and compilers are other processes. They cannot import a cell, but they can import this file.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from platformdirs import user_cache_path

from autotax.core.errors import UsageError
from autotax.core.files import write_whole

NOTEBOOK = "__main__"
HEAD = '"""Functions of a notebook, written by autotax for its ranks. Do not edit: a change of the cells makes a new file."""\n'


def is_of_a_cell(function: Callable[..., Any]) -> bool:
    """Whether a function was defined in a cell or at a prompt."""
    module = sys.modules.get(NOTEBOOK)
    return getattr(function, "__module__", None) == NOTEBOOK and getattr(module, "__file__", None) is None


def write(functions: Mapping[str, Callable[..., Any]]) -> Path:
    """Writes a file with these functions and returns its path; equal sources have the same path. `functions` has their roles as
    keys, for messages. Raises UsageError for a function without a name or a source, and for a value that has no text.
    """
    cells = _Cells(vars(sys.modules[NOTEBOOK]))
    for role, function in functions.items():
        name = function.__name__
        if cells.names.get(name) is not function:
            raise UsageError(
                f"{role} is {function!r}; ranks import it by name, so it must be a function of a cell: give it a name there"
            )
        cells.add(name, role)
    text = "\n".join([HEAD, *cells.texts.values()])
    folder = user_cache_path("autotax") / "cells"
    path = folder / f"cells_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return path


class _Cells:
    """Collects the definitions of names, each behind the names that it refers to."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.texts: dict[str, str] = {}
        self._seen: set[str] = set()

    def add(self, name: str, user: str) -> None:
        """Adds a name of the notebook, unless it is a built-in one. `user` refers to it."""
        if name in self._seen or name not in self.names:
            return
        self._seen.add(name)
        value = self.names[name]
        self.texts[name] = self._defined(name, value) if _of_a_cell(value) else _stated(name, value, user)

    def _defined(self, name: str, value: Any) -> str:
        plain = _plain(value)
        text = _source(plain)
        if not text:
            raise UsageError(f"{name} has no source that Python can find: define it in a cell")
        if plain.__name__ != name:
            text += f"\n{name} = {plain.__name__}\n"
        if getattr(plain, "__closure__", None):
            raise UsageError(f"{name} refers to variables of another function: define it at the top of a cell")
        for other in sorted(_globals_of(text)):
            self.add(other, name)
        return f"\n{text}"


def _plain(value: Any) -> Any:
    """The function inside of what a decorator made, or a class."""
    inner = getattr(value, "fn", value)  # of triton.jit
    return inspect.unwrap(inner) if callable(inner) else inner


def _source(plain: Any) -> str:
    """The source of a function or class; empty if there is none. `inspect` finds no classes of modules without a file."""
    if not isinstance(plain, type):
        with suppress(OSError, TypeError):
            return textwrap.dedent(inspect.getsource(plain))
        return ""
    for file, entry in reversed(list(linecache.cache.items())):
        if len(entry) < 3 or Path(file).exists():  # a cell has lines, and no file
            continue
        with suppress(SyntaxError):  # of a cell with magics
            for node in ast.parse("".join(lines := entry[2])).body:
                if isinstance(node, ast.ClassDef) and node.name == plain.__name__:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _of_a_cell(value: Any) -> bool:
    plain = _plain(value)
    return isinstance(plain, FunctionType | type) and plain.__module__ == NOTEBOOK


def _globals_of(text: str) -> set[str]:
    """The global names that a definition refers to."""
    top = symtable.symtable(text, "cell", "exec")
    tables, names = [top], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (s.is_global() or table is top)}
    return names


def _stated(name: str, value: Any, user: str) -> str:
    """A line that gives a name its value in another process."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    for own in (getattr(value, "__qualname__", None), name):
        if module and module.__name__ != NOTEBOOK and own and getattr(module, own, None) is value:
            return f"from {module.__name__} import {own} as {name}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "torch.dtype":
        return f"import torch\n{name} = {value!r}"
    if kind == "triton.language.core.constexpr":
        return f"import triton.language\n{name} = triton.language.constexpr({value.value!r})"
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    raise UsageError(
        f"{user} refers to {name}, a {type(value).__qualname__}; allowed are modules, functions, classes, numbers, texts and "
        f"collections of them: make it inside of {user}"
    )
