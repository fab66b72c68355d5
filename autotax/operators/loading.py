"""Imports the modules that declare operators.

The package's own operators are declared by modules that make an `Operator`; other modules do the same, or add variants. Installed
packages name such modules as entry points of the group `autotax.operators`; `--load`, AUTOTAX_LOAD and `autotax.load` name more.
All ranks must load the same; `fingerprints` is what they compare.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from autotax.core.errors import UsageError

GROUP = "autotax.operators"
VARIABLE = "AUTOTAX_LOAD"
ONE_OFFS = "autotax.declare"
"""The module that declares the operators of `callable:` words. It is imported by name because it needs kernels and torch."""

_loaded: dict[str, str] = {}
"""Modules loaded beside the package, in order, each with the digest of its text."""


def load(name: str) -> None:
    """Imports a module (`package.module`, or the path of a .py file) that declares operators or variants. Raises UsageError."""
    load_built_in()
    if name in _loaded:
        return
    if name.startswith("callable:"):
        _loaded[name] = importlib.import_module(ONE_OFFS).load_word(name)
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

    load_built_in()
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        load(point.value)
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        load(name)


@functools.cache
def load_built_in() -> None:
    importlib.import_module("autotax.operators.problems")  # which imports the declarations in their order


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
