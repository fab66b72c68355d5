"""WHICH operators there are: those of the package, those of installed packages, and those that a user loads.

The package's own come by the same door as everybody's: a module that makes an `Operator`, or adds a variant to one. Installed
packages name such modules as entry points of the group `autotax.operators`; `--load`, AUTOTAX_LOAD and `autotax.load` name more.
All ranks must load the same; `fingerprints` is what they compare.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotax.core.errors import UsageError
from autotax.core.problem import Problem

if TYPE_CHECKING:
    from autotax.operators.declaration import Operator

GROUP = "autotax.operators"
VARIABLE = "AUTOTAX_LOAD"

_operators: dict[str, Operator[Any]] = {}
_loaded: dict[str, str] = {}
"""What was loaded beside the package, in order, each with the digest of its text."""


def add(operator: Operator[Any]) -> None:
    """Registers a declaration. The same operator may be declared again by the same class, as when a notebook cell runs twice."""
    there = _operators.get(operator.name)
    if there and _path_of(there.problem) != _path_of(operator.problem):
        raise UsageError(
            f"operator {operator.name!r} is declared by {there.problem.__module__} and by {operator.problem.__module__}: "
            "give one of them another name"
        )
    _operators[operator.name] = operator


def _path_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def operators() -> Mapping[str, Operator[Any]]:
    """All operators by name, those of installed packages and of AUTOTAX_LOAD among them."""
    _load_built_in()
    load_entry_points()
    return _operators


def named(name: object) -> Operator[Any]:
    """The operator of that name. Raises UsageError."""
    found = _find(name)
    if found is None:
        raise UsageError(f"op is {name!r}; allowed are {', '.join(operators())}: name one of these, or --load its module")
    return found


def known(name: object) -> bool:
    """Whether there is such an operator."""
    return _find(name) is not None


def of(problem: Problem) -> Operator[Any]:
    """The operator of a problem."""
    return named(problem.op)


def kernel_of(op: str, variant: str) -> tuple[str, str] | None:
    """The module and the name of the kernel class of a variant or peer; None for what is not here."""
    found = _find(op)
    try:
        return found.implementation(variant).place if found else None
    except UsageError:
        return None


def problem_from_dict(values: Mapping[str, Any]) -> Problem:
    """The inverse of `Problem.to_dict`; raises UsageError on an unknown operator or field."""
    name = values.get("op")
    kind = named(name).problem
    given = {field: value for field, value in values.items() if field != "op"}
    allowed = [each.name for each in fields(kind)]
    if unknown := sorted(set(given) - set(allowed)):
        raise UsageError(f"{name} has no {', '.join(unknown)}; it takes {', '.join(allowed)}: take the others out")
    try:
        return kind(**given)
    except TypeError as error:
        raise UsageError(f"{name} takes {', '.join(allowed)}; {str(error).split('__init__() ')[-1]}: give them all") from None


def load(name: str) -> None:
    """Imports a module (`package.module`, or the path of a .py file) that declares operators or variants. Raises UsageError."""
    _load_built_in()
    if name in _loaded:
        return
    if name.startswith("callable:"):
        from autotax.operators import callables

        _loaded[name] = callables.load_word(name)
        return
    try:
        module = import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name} cannot be loaded ({type(error).__name__}: {error}): mend it, or give another --load") from error
    origin = getattr(module, "__file__", None)
    text = Path(origin).read_bytes() if origin else b""
    _loaded[name] = hashlib.sha256(text).hexdigest()[:16]


def loaded() -> tuple[str, ...]:
    """What was loaded beside the package: every rank and compiler must load the same, in this order."""
    return tuple(_loaded)


def fingerprints() -> dict[str, str]:
    """The digest of the text of each module that was loaded."""
    return dict(_loaded)


@functools.cache
def load_entry_points() -> None:
    """Loads what installed packages declare, and what AUTOTAX_LOAD names (module names with commas between)."""
    import importlib.metadata  # takes longer than all of `import autotax`

    _load_built_in()
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        load(point.value)
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        load(name)


@functools.cache
def _load_built_in() -> None:
    importlib.import_module("autotax.operators.problems")  # which imports the declarations in their order


def _find(name: object) -> Operator[Any] | None:
    _load_built_in()
    if not isinstance(name, str):
        return None
    if name not in _operators:
        load_entry_points()
    return _operators.get(name)


def import_file(path: Path) -> Any:
    """Imports a file under its own name; processes that unpickle its classes find them so. It may import modules beside it."""
    import importlib.util

    name = path.stem
    if name in sys.modules and Path(getattr(sys.modules[name], "__file__", None) or "").resolve() == path.resolve():
        return sys.modules[name]
    other = importlib.util.find_spec(name)
    if other is not None and Path(other.origin or "").resolve() != path.resolve():
        raise UsageError(f"file {path} has the name of another module, {name}: rename the file")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"file {path} is not there: give another --load")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if new := folder not in sys.path:
        sys.path.append(folder)  # at the end, where it hides no module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if new:
            sys.path.remove(folder)
        raise
    return module
