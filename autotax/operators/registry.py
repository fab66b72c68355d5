"""Loads operators and looks them up by name: those of the package, of installed packages, and of modules that a user loads.

A module declares an operator by constructing an `Operator`; other modules may add operators or variants. Installed packages name
such modules as entry points of the group `autotax.operators`; `--load`, AUTOTAX_LOAD and `autotax.load` name more. All ranks must
load the same modules, so they compare their `fingerprints`.
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
from typing import Any

from autotax.core.errors import UsageError, described, summary
from autotax.core.problem import Problem
from autotax.digests import Symbol, has_source, kernel_digest, symbol_digest
from autotax.hardware import content_digest
from autotax.operators.declaration import Operator, Peer, Variant, declared

GROUP = "autotax.operators"
VARIABLE = "AUTOTAX_LOAD"
ONE_OFF = "callable:"
ONE_OFFS = "autotax.declare"
"""The module that declares the operators of `callable:` words. It is imported by name because it needs kernels and torch."""

digests: dict[str, str] = {}
"""Additional modules in the order of loading, each with the digest of its text."""
_broken: dict[str, str] = {}
"""Entry points that cannot be loaded, each with the reason."""
REMEDY = ": mend it, or give another --load"
LONGEST = 200
"""Most characters of a name that a message repeats."""


def load(name: str) -> None:
    """Imports a module that declares operators or variants.

    Args:
        name: `package.module`, or the path of a .py file.

    Raises:
        UsageError: The import failed, with nothing declared, or the file has changed since it was loaded.
    """
    load_built_in()
    if name in digests:
        if digests[name] != _digest(name):
            raise UsageError(f"{name[:LONGEST]} has changed since it was loaded, and Python keeps the old one: start again")
        return
    before = {op: (operator, dict(operator.variants), dict(operator.peers)) for op, operator in declared.items()}
    try:
        _import(name)
        digests[name] = _digest(name)
    except BaseException as error:
        _restore(before)
        if isinstance(error, UsageError | KeyboardInterrupt):
            raise
        ended = "it ends the program" if isinstance(error, SystemExit) else summary(described(error))
        message = f"{name[:LONGEST] or repr(name)} cannot be loaded ({ended})"
        raise UsageError(message + REMEDY) from error


def _import(name: str) -> None:
    if name.startswith(ONE_OFF):
        importlib.import_module(ONE_OFFS).load_word(name)
    elif name.endswith(".py"):
        import_file(Path(name))
    else:
        importlib.import_module(name)


def _digest(name: str) -> str:
    """The digest of the text of a module that has been imported, as it is now."""
    if name.startswith(ONE_OFF):
        files = importlib.import_module(ONE_OFFS).files_of(name)
        text = name.encode()
    else:
        module = sys.modules.get(_name_of(Path(name)) if name.endswith(".py") else name)
        origin = getattr(module, "__file__", None)
        files, text = [origin] if origin else [], b""
    try:
        text += b"".join(Path(file).read_bytes() for file in files)
    except FileNotFoundError:
        text += b"\0"  # it is gone, which is a change, too
    return hashlib.sha256(text).hexdigest()[:16]


def _name_of(path: Path) -> str:
    """The name of a file as a module: a dot would make it a module of a package."""
    return path.stem.replace(".", "_")


def _restore(before: Mapping[str, tuple[Any, dict[str, Any], dict[str, Any]]]) -> None:
    """Takes back what a module had declared before it failed."""
    for op in declared.keys() - before.keys():
        del declared[op]
    for op, (operator, variants, peers) in before.items():
        declared[op], operator.variants, operator.peers = operator, variants, peers


def loaded() -> tuple[str, ...]:
    """The additional modules. Every rank and compiler process must load the same ones in this order."""
    return tuple(digests)


def broken() -> tuple[str, ...]:
    """One line for each installed package whose operators cannot be loaded."""
    return tuple(
        f"the operators of entry point {name!r} are left out, {why}: mend or remove its package" for name, why in _broken.items()
    )


def fingerprints() -> dict[str, str]:
    """The digest of the text of each module that was loaded."""
    return dict(digests)


@functools.cache
def load_entry_points() -> None:
    """Loads the modules that installed packages declare, and those in AUTOTAX_LOAD (module names separated by commas). A package
    whose module is broken is left out: see `broken`.
    """
    import importlib.metadata  # takes longer than all of `import autotax`

    load_built_in()
    try:
        points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    except Exception as error:
        points, _broken[GROUP] = [], f"those of installed packages cannot be read ({type(error).__name__}: {error})"
    for point in points:
        try:
            load(point.value)
        except UsageError as error:  # the command at hand may not need it, and its user did not choose it
            _broken[point.name] = str(error).removesuffix(REMEDY)
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        load(name)


@functools.cache
def load_built_in() -> None:
    importlib.import_module("autotax.operators.problems")  # it imports the declarations in their order


def import_file(path: Path) -> Any:
    """Imports a file under its own name, by which other processes unpickle its classes; its folder may hold more modules."""
    import importlib.util

    name = _name_of(path)
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
        sys.path.append(folder)  # at the end, so that it shadows no module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if new:
            sys.path.remove(folder)
        raise
    return module


def operators() -> Mapping[str, Operator[Any]]:
    """All operators by name, including those of installed packages and of AUTOTAX_LOAD."""
    load_built_in()
    load_entry_points()
    return declared


def named(name: object) -> Operator[Any]:
    """The operator of that name. Raises UsageError if there is none."""
    operator = _find(name)
    if operator is None:
        allowed = f"allowed are {', '.join(operators())}"
        raise UsageError("; ".join([f"op is {name!r}; {allowed}: name one of these, or --load its module", *broken()]))
    return operator


def known(name: object) -> bool:
    """Whether there is such an operator."""
    return _find(name) is not None


def of(problem: Problem) -> Operator[Any]:
    """The operator of a problem."""
    return named(problem.op)


def implementation(operator: Operator[Any], name: str) -> Variant:
    """The variant or peer of this name. Raises UsageError if there is none."""
    if not (variant := operator.variants.get(name) or operator.peers.get(name)):  # an installed package may declare it
        load_entry_points()
        variant = operator.variants.get(name) or operator.peers.get(name)
    if not variant:
        have = ", ".join(operator.variants)
        raise UsageError(f"variant is {name!r}; {operator.name} has {have}: name one of these, or --load its module")
    return variant


def problem_from_dict(values: Mapping[str, Any]) -> Problem:
    """The inverse of `Problem.to_dict`; raises UsageError on an unknown operator or field."""
    name = values.get("op")
    kind = named(name).problem
    arguments = {field: value for field, value in values.items() if field != "op"}
    allowed = [entry.name for entry in fields(kind)]
    if unknown := sorted(set(arguments) - set(allowed)):
        raise UsageError(f"{name} has no {', '.join(unknown)}; it takes {', '.join(allowed)}: take the others out")
    if lacking := [field for field in kind.required() if field not in arguments]:
        raise UsageError(f"{name} lacks {', '.join(lacking)}; it takes {', '.join(allowed)}: give them all")
    return kind(**arguments)


def _find(name: object) -> Operator[Any] | None:
    load_built_in()
    if not isinstance(name, str):
        return None
    if name not in declared:
        load_entry_points()
    return declared.get(name)


@functools.lru_cache(maxsize=1024)
def variant_digest(op: str, variant: str) -> str:
    """Digest of the code that decides what a variant of an operator computes, for instance of `all-gather-gemm`, `push`.

    The digest of a peer covers the version of torch, which it calls. Falls back to `kernel_digest()` for an operator or variant
    that is not declared here.
    """
    operator = _find(op)
    try:
        declaration = implementation(operator, variant) if operator else None
    except UsageError:
        declaration = None
    symbol = Symbol(*declaration.place) if declaration else None
    if symbol is None or not has_source(symbol.module):
        return kernel_digest()
    digest = symbol_digest(symbol)
    if not isinstance(declaration, Peer):
        return digest
    from autotax.software import torch_version

    return content_digest({"kernel": digest, "torch": torch_version()})
