"""Modules under the names that they had in version 0.1, each with a DeprecationWarning, for one release."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType

PUBLIC = {
    "autotax.conditions": "autotax.core.conditions",
    "autotax.config": "autotax.core.config",
    "autotax.errors": "autotax.core.errors",
    "autotax.interpreting": "autotax.heap.triton_interpreter",
    "autotax.operators.draw": "autotax.operators.inputs",
    "autotax.parallel": "autotax.torch.styles",
    "autotax.plugins": "autotax.engines",
    "autotax.problem": "autotax.core.problem",
    "autotax.sources": "autotax.operators.registry",
    "autotax.spaces.space": "autotax.core.space",
    "autotax.start": "autotax.cli.start",
    "autotax.testing.ranks": "autotax.runner.ranks",
}

MOVED = {
    ("autotax.hardware", "Environment"): "autotax.software",
    ("autotax.hardware", "environment"): "autotax.software",
}
"""Names that went to another module, by their former module."""


class _FormerNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its former name and returns the module itself, so that its classes exist once."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        return importlib.util.spec_from_loader(fullname, self) if _new_name(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = _new_name(spec.name)
        warnings.warn(f"{spec.name} is {name} now: import that", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run under its own name; it gets its own spec back, which the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _new_name(name: str) -> str:
    """Today's name of a module; empty if it has no other."""
    package, _, module = name.rpartition(".")
    return PUBLIC.get(name) or (f"{PUBLIC[package]}.{module}" if package in PUBLIC else "")


def install() -> None:
    """Lets `import` find the former names."""
    if not any(isinstance(finder, _FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerNames())  # before the finder of files, which would load the module twice


def moved(module: str, name: str) -> object:
    """The `__getattr__` of a module that names have left: the object at its new place, with a DeprecationWarning."""
    if (place := MOVED.get((module, name))) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is {place}.{name} now: import that", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(place), name)
