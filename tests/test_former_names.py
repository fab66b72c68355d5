"""Modules are found under their former names, as the same modules, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

from autotax.former_names import MOVED, PUBLIC

NAMES = PUBLIC | {"autotax.plugins.vllm": "autotax.engines.vllm"}


@pytest.mark.parametrize("former", NAMES)
def test_a_former_name_gives_the_module_itself_and_warns(former: str) -> None:
    new = importlib.import_module(NAMES[former])
    spec = new.__spec__
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"{former} is {NAMES[former]} now"):
        module = importlib.import_module(former)
    assert module is new and module.__spec__ is spec
    assert new.__name__ == NAMES[former]


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_a_name_that_moved_is_found_at_its_former_module_and_warns(module: str, name: str) -> None:
    new = getattr(importlib.import_module(MOVED[module, name]), name)
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is {MOVED[module, name]}.{name} now"):
        assert getattr(importlib.import_module(module), name) is new
