"""Tests in this folder need real GPUs; elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    missing = _missing()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing() -> str:
    count = torch.cuda.device_count()
    return "" if count >= 2 else f"needs 2 GPUs that reach each other; this machine has {count}"
