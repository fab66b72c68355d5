"""Tests of kernels on GPUs run on few machines. Here they make their configs, and assert that the spaces of Hopper have them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from autotax import hardware
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.kernels.offline import known_hardware

HOPPER = known_hardware("cuda:90")
TESTS = Path(__file__).parents[1] / "gpu" / "test_kernels.py"


def calls_of(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments of each call of a test, but for its fixtures."""
    choices = []
    for mark in getattr(test, "pytestmark", ()):
        names, rows = mark.args[:2]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        choices.append([dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in rows])
    for chosen in product(*choices):
        yield {name: value for part in chosen for name, value in part.items()}


def test_the_spaces_of_hopper_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda: HOPPER)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spec = importlib.util.spec_from_file_location("tests_of_kernels", TESTS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: list[tuple[Problem, Config]] = []

    def run(_: object, problem: Problem, config: Config, *more: object, **options: object) -> list[float]:  # noqa: ARG001
        made.append((problem, config))
        return [0.0, 0.0]

    monkeypatch.setattr(module, "run", run)
    tests = [test for name, test in vars(module).items() if name.startswith("test_") and isinstance(test, FunctionType)]
    for test in tests:
        for call in calls_of(test):
            with suppress(pytest.skip.Exception):
                test(SimpleNamespace(run=run), **call)
    assert len(made) > 400
