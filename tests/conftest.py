"""Which tests need the machine for themselves: `make test` runs the others first, in two processes, long files at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

HERE = Path(__file__).parent
ALONE = [
    HERE / path
    for path in (
        "gpu",  # one job at a time on the GPUs
        "nn/test_on_gpus.py",
        "heap/test_shared.py",  # who is late at a barrier, by tenths of a second
        # deadlines, slow ranks, what is left of processes and in shared memory
        "runner/test_live.py",
        "runner/test_machine.py",
        "runner/test_neighbours.py",
        "runner/test_sampling.py",
        "runner/test_soak.py",
        "tuner/test_accounts.py",  # where the time of a run went
        "tuner/test_trouble.py",  # how long a stuck database holds a run up
        "test_unattended.py",  # deadlines, and what is left in shared memory
    )
]
LONG = [HERE / "test_end_to_end.py", HERE / "tuner/test_tune.py"]
"""Begun last, one process would wait for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path not in LONG)
    for item in items:
        if any(item.path.is_relative_to(path) for path in ALONE):
            item.add_marker(pytest.mark.alone)
            item.add_marker(pytest.mark.xdist_group("alone"))  # one after another with `-n 2 --dist loadgroup` as well


@pytest.fixture
def without_syncing() -> Iterator[None]:
    """SQLite does not wait for the disk, which is most of the time of what commits often. Only who loses power could tell."""

    def let_be(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", let_be)
    yield
    event.remove(Engine, "connect", let_be)
