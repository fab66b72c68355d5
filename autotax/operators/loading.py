"""Imports the modules that declare operators.

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
from pathlib import Path
from typing import Any

from autotax.core.errors import UsageError

GROUP = "autotax.operators"
VARIABLE = "AUTOTAX_LOAD"
ONE_OFFS = "autotax.declare"
"""The module that declares the operators of `callable:` words. It is imported by name because it needs kernels and torch."""

digests: dict[str, str] = {}
"""Additional modules in the order of loading, each with the digest of its text."""


def load(name: str) -> None:
    """Imports a module (`package.module`, or the path of a .py file) that declares operators or variants. Raises UsageError if
    that fails.
    """
    load_built_in()
    if name in digests:
        return
    if name.startswith("callable:"):
        digests[name] = importlib.import_module(ONE_OFFS).load_word(name)
        return
    try:
        module = import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name} cannot be loaded ({type(error).__name__}: {error}): mend it, or give another --load") from error
    origin = getattr(module, "__file__", None)
    text = Path(origin).read_bytes() if origin else b""
    digests[name] = hashlib.sha256(text).hexdigest()[:16]


def loaded() -> tuple[str, ...]:
    """The additional modules. Every rank and compiler process must load the same ones in this order."""
    return tuple(digests)


def fingerprints() -> dict[str, str]:
    """The digest of the text of each module that was loaded."""
    return dict(digests)


@functools.cache
def load_entry_points() -> None:
    """Loads the modules that installed packages declare, and those in AUTOTAX_LOAD (module names separated by commas)."""
    import importlib.metadata  # takes longer than all of `import autotax`

    load_built_in()
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
        load(point.value)
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        load(name)


@functools.cache
def load_built_in() -> None:
    importlib.import_module("autotax.operators.problems")  # it imports the declarations in their order


def import_file(path: Path) -> Any:
    """Imports a file under its own name, so that processes that unpickle its classes find them. It may import modules from its
    folder.
    """
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
        sys.path.append(folder)  # at the end, so that it shadows no module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if new:
            sys.path.remove(folder)
        raise
    return module
