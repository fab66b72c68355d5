"""Stores of every kind under test, and records to put into them.

SQLite always; a PostgreSQL server where the wheel of the test extra ships one, or the one at the URL in $AUTOTAX_TEST_SERVER:
an empty database that may be wiped.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.db import Store, resolve_url
from autotax.operators.problems import AllGatherGemm
from tests.conformance.records import ENVIRONMENT, HARDWARE, Examples
from tests.conformance.stores import wipe
from tests.db import server

__all__ = ["BSP", "ENVIRONMENT", "HARDWARE", "PROBLEM", "PUSH", "a_trial", "a_winner", "keep_winner"]

GIVEN = os.environ.get("AUTOTAX_TEST_SERVER")
KINDS = ["sqlite", "sqlite with spaces"] + (["server"] if GIVEN or server.binaries() else [])

PROBLEM = AllGatherGemm(m=512, n=7168, k=8192, world_size=4)
BSP = Config.of("bsp", block_m=128)
PUSH = Config.of("push", block_m=64, comm_ctas=16, order="zigzag")
EXAMPLES = Examples(PROBLEM, BSP, PUSH, Config.of("pull"))
a_trial, a_winner, keep_winner = EXAMPLES.trial, EXAMPLES.winner, EXAMPLES.keep


@pytest.fixture(params=[kind if kind == "sqlite" else pytest.param(kind, marks=pytest.mark.volume) for kind in KINDS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database that does not exist yet, or is empty."""
    if request.param == "sqlite":
        return resolve_url(str(tmp_path / "new" / "autotax.db"))
    if request.param == "sqlite with spaces":
        return resolve_url(str(tmp_path / "a folder with spaces & ümläuts" / "my autotax.db"))
    if request.param not in KINDS:
        pytest.skip("there is no wheel with a server, nor AUTOTAX_TEST_SERVER")
    url: str = request.getfixturevalue("server_url")
    wipe(url)
    return url


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a server that runs."""
    if GIVEN:
        yield GIVEN
        return
    programs = server.binaries()
    assert programs is not None
    with server.running(programs) as url:
        yield url


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder, with the bytes of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def at_once() -> Callable[[int, Callable[[int], None]], list[int | None]]:
    """Calls a function in several processes at the same moment, with the number of each; gives their exit codes."""

    def call(count: int, function: Callable[[int], None]) -> list[int | None]:
        fork = multiprocessing.get_context("fork")
        ready = fork.Barrier(count)

        def begin(number: int) -> None:
            ready.wait()
            function(number)

        processes = [fork.Process(target=begin, args=[number]) for number in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        return [process.exitcode for process in processes]

    return call


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store
