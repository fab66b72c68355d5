from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from autotax.db import Store, shipped
from autotax.operators.declaration import ONLY_OURS_VARIABLE
from autotax.tuner import progress, run_recorder, tuning
from tests.tuner.synthetic import Clock


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/tuned.db") as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hides the shipped winners, which do not fit the synthetic landscapes. Returns the empty folder in their place."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.fixture
def optunas_tables() -> None:
    """For tests of studies in the database, where `studies_in_memory` would leave nothing."""


@pytest.fixture(autouse=True)
def studies_in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna's tables take most of the time of a run over a made-up landscape."""
    if "optunas_tables" not in request.fixturenames:
        kept = defaultdict[str, optuna.storages.InMemoryStorage](optuna.storages.InMemoryStorage)
        monkeypatch.setattr(run_recorder, "_storage", lambda url: kept[url])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of runs: no machine is too slow for a limit."""
    clock = Clock()
    for module in (tuning, progress):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(tuning, "Accounts", lambda: progress.Accounts(started=clock.monotonic()))
    return clock


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The synthetic landscapes know no variants that others wrote."""
    monkeypatch.setenv(ONLY_OURS_VARIABLE, "1")
