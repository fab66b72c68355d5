"""Selection and order of the problems to tune, and the estimate of the time left."""

from __future__ import annotations

import pytest

from autotax.db.index import Index, IndexedWinner
from autotax.db.records import Place
from autotax.fleet.driver import Took, deal, estimator
from autotax.fleet.messages import FleetJob, seconds_left
from autotax.hardware import Hardware
from autotax.operators.problems import FlashDecode
from autotax.operators.registry import variant_digest
from autotax.software import Environment, environment
from tests.fleet.conftest import B200, H200, a_job

HERE = environment("cpu")
OLDER = Environment(HERE.python, HERE.torch, "3.0.0", HERE.comm, HERE.kernels)


def won(job: FleetJob, software: Environment = HERE, hardware: object = H200) -> IndexedWinner:
    place = Place(hardware, software, job.settings.conditions)  # type: ignore[arg-type]
    digest = variant_digest(job.problem.op, "bsp")
    return IndexedWinner(job.problem.key, place, digest, '{"variant": "bsp", "params": {}}', 1.0, 1.0, 1.0, False, 1)


def order_of(jobs: list[FleetJob], *winners: IndexedWinner, earlier: object = ()) -> list[FleetJob]:
    return [due.job for due in deal(jobs, Index(winners), H200, HERE, earlier)]  # type: ignore[arg-type]


def test_what_is_tuned_is_left_out_and_what_is_stale_comes_first() -> None:
    jobs = [a_job(number) for number in range(4)]
    assert order_of(jobs) == jobs[::-1], "the largest first"
    assert order_of(jobs, won(jobs[3]), won(jobs[0], OLDER)) == [jobs[0], jobs[2], jobs[1]]


def test_a_winner_of_another_kind_is_none_here() -> None:
    jobs = [a_job(0), a_job(1)]
    assert order_of(jobs, won(jobs[1], hardware=B200)) == [jobs[1], jobs[0]]


def test_what_is_tuned_anew_is_due_whatever_is_known() -> None:
    anew = a_job(0, resume=False)
    assert order_of([anew], won(anew)) == [anew]


def test_what_took_long_before_comes_first() -> None:
    jobs = [a_job(number) for number in range(3)]
    earlier = [took(jobs[0], 90.0), took(jobs[0], 5.0), took(jobs[1], 30.0, B200)]
    assert order_of(jobs, earlier=earlier) == [jobs[0], jobs[1], jobs[2]]
    schedule = deal(jobs, Index([]), H200, HERE, earlier)  # type: ignore[arg-type]
    assert [due.estimate_s for due in schedule] == [90.0, 30.0, None]


def test_what_was_never_tuned_takes_what_others_of_its_sizes_took() -> None:
    jobs = [a_job(number) for number in (0, 1, 2, 20, 30)]
    estimate = estimator([took(job, 10.0 * (i + 1)) for i, job in enumerate(jobs[:4])], H200.digest)
    assert estimate(jobs[1].problem) == 20.0
    assert estimate(jobs[4].problem) == 30.0, "the median of the three nearest"
    assert estimate(FlashDecode(1, 8, 8, 128, 1024)) is None, "of another operator nothing is known"


def took(job: FleetJob, seconds: float, hardware: Hardware = H200) -> Took:
    return Took(job.problem.key, job.problem.to_dict(), hardware.digest, seconds)


@pytest.mark.parametrize(
    ("due", "hosts", "pace", "usual", "left"),
    [
        ([(60.0, False), (60.0, False), (60.0, True)], 2, 1.0, None, 75.0),
        ([(60.0, False)] * 4, 2, 2.0, None, 240.0),
        ([(100.0, False), (1.0, False)], 50, 1.0, None, 100.0),
        ([(None, False)] * 4, 2, 1.0, 30.0, 60.0),
        ([(None, False)], 2, 1.0, None, None),
        ([(60.0, False)], 0, 1.0, 60.0, None),
    ],
)
def test_time_left(
    due: list[tuple[float | None, bool]], hosts: int, pace: float, usual: float | None, left: float | None
) -> None:
    assert seconds_left(due, hosts, pace, usual) == left
