"""Tests in this folder need real GPUs; elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ONE_IS_ENOUGH = "one_gpu.py"
"""Ends the names of files whose ranks share a GPU."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing := _missing(1 if item.path.name.endswith(ONE_IS_ENOUGH) else 2):
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing(needed: int) -> str:
    count = torch.cuda.device_count()
    return "" if count >= needed else f"needs {needed} GPUs{' that reach each other' * (needed > 1)}; this machine has {count}"
