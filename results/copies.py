"""Copies of modules whose kernels call other functions: variants of a kernel for a measurement, without an edit of its source."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


def copy_of(module: ModuleType, name: str, **changes: Any) -> Any:
    """The same module once more, named after `name`, with other functions for its kernels to call."""
    name = f"{module.__name__}_{name}"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    vars(copy).update(changes)
    return copy
