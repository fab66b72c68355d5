"""Modules are found under their former names, as the same modules, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

from autotax.former_names import PUBLIC

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
