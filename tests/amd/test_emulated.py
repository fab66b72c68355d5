"""Kernels compiled for AMD and executed on emulated GPUs: `make test-amd`. docs/amd.md says what this proves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from autotax.core.config import Config
from autotax.operators.problems import FlashDecode
from autotax.spaces import space_for
from tests.amd import jobs
from tests.amd.jobs import Job
from tests.amd.ranks import Outcome, hardware

pytestmark = pytest.mark.amd

TARGET = "hip:gfx942"
JOBS = list(jobs.jobs([TARGET]))
SMALL = FlashDecode(1, 4, 2, 32, 128, "fp16", 2)
SEEDS = range(2)
"""With the first seed a flag overtakes its data."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with jobs.pool(str(tmp_path_factory.mktemp("triton"))) as processes:
        yield processes
        processes.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="module")
def outcomes(processes: ProcessPoolExecutor, request: pytest.FixtureRequest) -> dict[Job, Future[Outcome]]:
    """Starts the jobs of all selected tests at once, so that they run in parallel."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {call["job"] for call in calls if "job" in call}
    return {job: processes.submit(jobs.run, job) for job in JOBS if job in wanted}


@pytest.mark.timeout(3600)  # one waits for all before it
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[1]}-{job[2]}")
def test_every_variant_is_right(outcomes: dict[Job, Future[Outcome]], job: Job) -> None:
    outcome = outcomes[job].result()
    assert outcome.kernels
    assert jobs.faults(job, outcome) == []


@pytest.mark.timeout(3600)
def test_releases_as_triton_made_them_let_flags_overtake_their_data(processes: ProcessPoolExecutor) -> None:
    """The emulator must show this fault; otherwise it could not show that our releases are right."""
    usual = space_for(SMALL, hardware(TARGET, 2)).default("fused")
    job = TARGET, SMALL, Config.of("fused", usual.values | {"protocol": "flags", "payload": "fp32"})
    bad = [processes.submit(jobs.run_without_waiting, job, seed) for seed in SEEDS]
    good = [processes.submit(jobs.run, job, seed) for seed in SEEDS]
    assert any(jobs.faults(job, future.result()) for future in bad)
    assert not any(jobs.faults(job, future.result()) for future in good)


@pytest.mark.timeout(3600)
def test_words_that_are_counted_before_they_are_written_back_give_wrong_tiles(processes: ProcessPoolExecutor) -> None:
    """`push_packets` on programs of two dies: what one has received, the other would not find."""
    job = next(job for job in JOBS if job[1] == jobs.PACKETS)
    bad = [processes.submit(jobs.run_without_write_back, job, seed) for seed in SEEDS]
    good = [processes.submit(jobs.run, job, seed) for seed in SEEDS]
    assert all(jobs.faults(job, future.result()) for future in bad)
    assert not any(jobs.faults(job, future.result()) for future in good)
