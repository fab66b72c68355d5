from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotax.runner import LiveRunner
from tests.runner.small import CPU, FAULTS


@pytest.fixture(scope="module")
def runner() -> Iterator[LiveRunner]:
    """Two CPU ranks that know the faulty variants, with a deadline that a busy machine keeps."""
    live = LiveRunner(CPU, 2, deadline_s=120.0, modules=FAULTS)
    yield live
    live.close()


@pytest.fixture
def hasty(runner: LiveRunner, monkeypatch: pytest.MonkeyPatch) -> LiveRunner:
    """The same ranks with a short deadline, so that hangs cost little."""
    monkeypatch.setattr(runner, "deadline_s", 5.0)
    return runner
