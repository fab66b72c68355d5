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
from sqlalchemy import MetaData, create_engine

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import Store, TrialRecord, WinnerRecord, resolve_url
from autotax.hardware import Environment, Hardware
from autotax.operators.problems import AllGatherGemm
from autotax.problem import Problem
from autotax.sources import variant_digest
from tests.db import server

GIVEN = os.environ.get("AUTOTAX_TEST_SERVER")
KINDS = ["sqlite", "sqlite with spaces"] + (["server"] if GIVEN or server.binaries() else [])

PROBLEM = AllGatherGemm(m=512, n=7168, k=8192, world_size=4)
HARDWARE = Hardware(
    backend="cuda",
    device="NVIDIA H200",
    target="cuda:90",
    count=4,
    memory_gib=139,
    processors=132,
    shared_memory=232448,
    l2_bytes=60 * 2**20,
    links="peer access 12/12 pairs",
)
ENVIRONMENT = Environment(
    python="3.11.7", torch="2.9.0", triton="3.6.0", comm="nccl 2.27.5", kernels="0123456789abcdef"
)
BSP = Config.of("bsp", block_m=128)
PUSH = Config.of("push", block_m=64, comm_ctas=16, order="zigzag")


def a_trial(number: int = 0, config: Config = PUSH, **more: object) -> TrialRecord:
    good = {
        "status": "ok",
        "latency_us": 120.5,
        "samples": [[120.0, 120.5], [119.25, 1 / 3]],
        "slowest_rank": 1,
        "compile_s": 2.5,
        "verified": True,
        "relative_error": 1e-3,
        "conditions": {"mode": "graph", "l2": "cold", "skew_us": 0.0},
    }
    return TrialRecord(number=number, config=config, **(good | more))  # type: ignore[arg-type]


def a_winner(trial_id: int, config: Config = PUSH, problem: Problem = PROBLEM, **more: object) -> WinnerRecord:
    good = {
        "hardware": HARDWARE,
        "environment": ENVIRONMENT,
        "latency_us": 120.5,
        "baseline_us": 150.0,
        "baseline": BSP,
        "speedup": 1.245,
        "interval_low": 1.2,
        "interval_high": 1.29,
        "tie": False,
        "verified": True,
        "samples": {config.digest: [[120.0], [121.0]], BSP.digest: [[150.0], [149.0]]},
        "kernel_digest": variant_digest(problem.op, config.variant),
    }
    return WinnerRecord(problem=problem, trial_id=trial_id, config=config, **(good | more))  # type: ignore[arg-type]


def keep_winner(
    store: Store,
    problem: Problem = PROBLEM,
    config: Config = PUSH,
    hardware: Hardware = HARDWARE,
    environment: Environment = ENVIRONMENT,
    conditions: Conditions = Conditions(),  # noqa: B008
    **more: object,
) -> WinnerRecord:
    """A winner with the run and the trial that it needs."""
    run_id = store.begin_run(problem, hardware, environment, {})
    sources = more.get("kernel_digest")
    trial_id = store.add_trial(run_id, a_trial(config=config, conditions=conditions.to_dict(), kernel_digest=sources))
    more |= {"hardware": hardware, "environment": environment, "conditions": conditions}
    winner = a_winner(trial_id, config, problem, **more)
    store.set_winner(winner)
    return winner


@pytest.fixture(params=KINDS)
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


def wipe(url: str) -> None:
    """Removes all tables from a database."""
    engine = create_engine(url)
    tables = MetaData()
    tables.reflect(engine)
    tables.drop_all(engine)
    engine.dispose()


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
