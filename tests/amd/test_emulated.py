"""Kernels compiled for AMD and executed on emulated GPUs: `make test-amd`. What this shows and what it cannot: docs/amd.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from tests.amd import jobs
from tests.amd.jobs import Job
from tests.amd.ranks import Outcome

pytestmark = pytest.mark.amd

TARGET = "hip:gfx942"
JOBS = list(jobs.jobs([TARGET]))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with jobs.pool(str(tmp_path_factory.mktemp("triton"))) as processes:
        yield processes
        processes.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="module")
def outcomes(processes: ProcessPoolExecutor, request: pytest.FixtureRequest) -> dict[Job, Future[Outcome]]:
    """What is wanted, begun ahead."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {call["job"] for call in calls if "job" in call}
    return {job: processes.submit(jobs.run, job) for job in JOBS if job in wanted}


@pytest.mark.timeout(3600)  # one waits for all before it
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[1]}-{job[2]}")
def test_every_variant_is_right(outcomes: dict[Job, Future[Outcome]], job: Job) -> None:
    outcome = outcomes[job].result()
    assert outcome.kernels
    assert jobs.faults(job, outcome) == []
