from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotax.db import Store, shipped


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/tuned.db") as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Landscapes of tests are not those of the winners that are shipped. The folder where such would be."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    return tmp_path / "shipped"
