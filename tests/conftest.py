"""Which tests need the machine for themselves: `make test` runs the others first, in two processes, the longest file at once."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALONE = [
    HERE / path
    for path in (
        "gpu",  # one job at a time on the GPUs
        "nn/test_on_gpus.py",
        "heap/test_shared.py",  # who is late at a barrier, by tenths of a second
        "runner",  # deadlines, slow ranks, what is left of processes and in shared memory
        "tuner/test_accounts.py",  # where the time of a run went
        "tuner/test_trouble.py",  # how long a stuck database holds a run up
        "test_unattended.py",  # deadlines, and what is left in shared memory
    )
]
NOT_ALONE = HERE / "runner" / "test_ahead.py"  # no rank, and time for everything
LONGEST = HERE / "test_end_to_end.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path != LONGEST)  # begun last, one process would wait for it
    for item in items:
        if item.path != NOT_ALONE and any(item.path.is_relative_to(path) for path in ALONE):
            item.add_marker(pytest.mark.alone)
            item.add_marker(pytest.mark.xdist_group("alone"))  # one after another with `-n 2 --dist loadgroup` as well
