"""A worker with a stand-in for its bench: its reaction to each failure of the bench or the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autotax.core.config import Config
from autotax.db import Store
from autotax.fleet.messages import Ended, FleetJob, HostHello, Order, TrialEnded
from autotax.fleet.queue import ClaimQueue, Due, job_of
from autotax.fleet.worker import BAD_LUCK, TRIES, TunerLost, TunerProcess, Worker
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.runner.processes import Child
from autotax.tuner import Settings
from tests.db import server
from tests.fleet.conftest import FLEET, H200, StandInBench, a_job, an_order, due, join
from tests.fleet.shared import searched, wait_until
from tests.fleet.test_queue import restart_after
from tests.fleet.tuner_process import two_kinds

KIND = H200.digest
TUNED = Ended("tuned", "push 1.2")


@pytest.fixture
def worker(url: str) -> Iterator[Callable[..., tuple[Worker, StandInBench]]]:
    made: list[Worker] = []

    def make(*script: object, us: float | None = 100.0, **order: object) -> tuple[Worker, StandInBench]:
        bench = StandInBench(*script, us=us)
        made.append(Worker(an_order(url, **order), bench))
        return made[-1], bench

    yield make
    for instance in made:
        instance.stop()


def outcomes(desk: ClaimQueue) -> list[tuple[str | None, str]]:
    return [(row.outcome, row.message) for row in desk.attend(FLEET, 60.0)[1]]


def state(desk: ClaimQueue) -> tuple[str, str]:
    (host,) = desk.attend(FLEET, 60.0)[0]
    return host.state, host.note


def test_tunes_one_after_another_and_leaves_when_nothing_is_left(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, due(3), a_job(1))
    mine, bench = worker()
    assert mine.run() == "left"
    assert bench.jobs == [entry.job for entry in due(3)] and bench.probed == [a_job(1)] and bench.kills == 1
    (host,) = desk.attend(FLEET, 60.0)[0]
    assert (host.state, host.trials, host.probes) == ("left", 3, {a_job(1).problem.key: 100.0})
    assert outcomes(desk) == [("tuned", "push 1.2")] * 3


GONE = Ended("trouble", "MachineError: the database is gone")


@pytest.mark.parametrize("trouble", [GONE, TunerLost("the tuner was killed by SIGKILL")], ids=["reported", "killed"])
def test_the_same_problem_goes_on_after_trouble(desk: ClaimQueue, worker: Callable[..., tuple], trouble: object) -> None:
    desk.deal(FLEET, KIND, due(1))
    mine, bench = worker(trouble, TUNED)
    assert mine.run() == "left" and outcomes(desk) == [("tuned", "push 1.2")]
    assert len(bench.jobs) == 2 and bench.starts == (2 if isinstance(trouble, TunerLost) else 1)


def test_a_host_on_which_everything_fails_leaves_and_spoils_nothing(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, due(BAD_LUCK + 1))
    mine, bench = worker(Ended("trouble", "the ranks do not start"))
    assert mine.run() == f"retired: {BAD_LUCK} problems in a row failed on it"
    assert len(bench.jobs) == BAD_LUCK * TRIES and outcomes(desk)[-1] == (None, "")
    assert [outcome for outcome, _ in outcomes(desk)] == [None] * (BAD_LUCK + 1), "others may have better luck"
    other = Worker(an_order(mine.order.url, suffix="#2"), good := StandInBench())
    assert other.run() == "left" and len(good.jobs) == BAD_LUCK + 1
    assert {outcome for outcome, _ in outcomes(desk)} == {"tuned"}


def test_a_tuner_that_tells_nothing_is_ended(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, due(1))
    mine, bench = worker("silence", TUNED, hang_s=0.5)
    assert mine.run() == "left" and bench.starts == 2 and outcomes(desk) == [("tuned", "push 1.2")]


def test_a_worker_whose_claim_was_taken_gives_up_what_it_measures(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, due(1))

    def pause() -> TrialEnded:
        """Like a host that is swapped out: its claim lapses, and another worker takes and finishes the problem."""
        join(desk, "other")
        until = time.monotonic() + 60
        while (claim := desk.take("other", FLEET, KIND, "other", 1.2)) is None and time.monotonic() < until:
            time.sleep(0.1)
        assert claim and claim.taken_before
        desk.finish("other", claim.id, "tuned", "by the other", 1.0)
        return TrialEnded(2, 3)

    mine, bench = worker("silence", lease_s=1.2)
    bench.script = ["silence"]
    real = bench.send

    def send(asked: object) -> None:
        real(asked)
        bench.coming = [TrialEnded(1, 3), pause, "silence"]

    bench.send = send  # type: ignore[method-assign]
    assert mine.run() == "left" and outcomes(desk) == [("tuned", "by the other")]
    assert bench.starts == 2, "the tuner is ended, for somebody else is at its problem"


def test_what_is_begun_anew_goes_on_where_another_host_was_lost(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, [Due(a_job(0, resume=False)), Due(a_job(1, resume=False))])
    join(desk, "gone")
    assert desk.take("gone", FLEET, KIND, "gone", 60.0).job.settings.resume is False
    desk.lose("gone", "its node is gone")
    mine, bench = worker()
    assert mine.run() == "left"
    assert [job.settings.resume for job in bench.jobs] == [True, False]


def test_a_worker_that_is_asked_to_end_gives_its_claim_back(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, due(1))
    mine, bench = worker(lambda: mine.stop() or TrialEnded(2, 3))
    assert mine.run() == "left: it was asked to end" and bench.interrupted
    assert state(desk) == ("left", "it was asked to end") and outcomes(desk) == [(None, "")]
    join(desk, "next")
    assert desk.take("next", FLEET, KIND, "next", 60.0).taken_before


def test_a_fleet_that_stops_ends_its_workers(desk: ClaimQueue, worker: Callable[..., tuple]) -> None:
    desk.deal(FLEET, KIND, due(1))
    mine, bench = worker(lambda: desk.stop(FLEET) or TrialEnded(2, 3))
    assert mine.run() == "left" and bench.interrupted


@pytest.mark.usefixtures("desk")
def test_a_bench_that_does_not_start_is_told(url: str) -> None:
    worker = Worker(an_order(url, tuner_module="tests.fleet.no_such_module"), TunerProcess())
    said = worker.run()
    assert said.startswith("failed: the tuner exited with code 1: ") and "no_such_module" in said


@pytest.mark.usefixtures("desk")
def test_a_bench_that_is_gone_before_its_order_comes_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Child.start

    def started_too_late(*arguments: Any) -> Child:
        child = start(*arguments)
        child.process.wait(60)
        return child

    monkeypatch.setattr(Child, "start", started_too_late)
    said = Worker(an_order(url, tuner_module="tests.fleet.no_such_module"), TunerProcess()).run()
    assert said.startswith("failed: the tuner exited with code 1: ") and "no_such_module" in said


@pytest.mark.volume
def test_the_bench_tunes_with_real_ranks_and_notes_the_host(desk: ClaimQueue, url: str) -> None:
    cpu = detect("cpu")
    problem = AllGatherGemm(16, 16, 32, "fp32", world_size=1)
    job = FleetJob(problem, Settings(trials=2, soak=0).on(cpu))
    desk.deal(FLEET, cpu.digest, [Due(job)], job)
    order = an_order(url, backend="cpu", suffix="#7", lease_s=30.0)
    assert Worker(order).run() == "left"
    (host,), (claim,) = desk.attend(FLEET, 60.0)
    assert host.name.endswith("#7") and host.probes[problem.key] > 0 and host.trials == 2
    assert claim.outcome == "tuned" and claim.message.split()[0] in ("bsp", "pull", "push")
    with Store.open(url, create=False) as store:
        (winner,) = store.winners()
        (run,) = store.runs()
        assert (run.status, run.settings["host"]) == ("done", host.name)
        assert desk.provers([winner.trial_id]) == {winner.trial_id: host.name}
        assert Config.of("bsp").variant in {trial.config.variant for trial in store.trials()}


@pytest.mark.skipif(server.binaries() is None, reason="there is no wheel with a server")
@pytest.mark.volume
def test_a_server_that_restarts_while_a_problem_is_tuned_costs_no_trial() -> None:
    """The real tuner in its process; its measurements are synthetic. It continues the run that the server interrupted."""
    programs = server.binaries()
    assert programs
    with server.running(programs) as url:
        with Store.open(url), ClaimQueue(url, patience_s=60) as desk:
            desk.begin(FLEET)
            order = an_order(url, tuner_module="tests.fleet.slow_tuner_process", lease_s=3.0, patience_s=60)
            kind = two_kinds(order)
            job = FleetJob(a_job().problem, Settings(trials=12, sampler="random", soak=0).on(kind))
            desk.deal(FLEET, kind.digest, [Due(job)])
            answers: list[str] = []
            thread = threading.Thread(target=lambda: answers.append(Worker(order).run()))
            thread.start()
            wait_until(lambda: desk.attend(FLEET, 60.0)[1][0].holder is not None, 60)
            wait_until(lambda: sum(sum(tally.values()) for tally in searched(url).values()) >= 3, 60, lambda: str(outcomes(desk)))
            restart_after(url, 2.0)
            thread.join(90)
            assert answers == ["left"] and outcomes(desk)[0][0] == "tuned"
        (configs,) = searched(url).values()
        assert len(configs) == 12 and set(configs.values()) == {1}
        with Store.open(url, create=False) as store:
            assert [run.status for run in store.runs()][-1] == "done" and len(store.runs()) >= 2 and len(store.winners()) == 1


def test_orders_and_greetings_travel_whole(url: str) -> None:
    import pickle

    order = an_order(url)
    assert pickle.loads(pickle.dumps(order)) == order and isinstance(order, Order)
    hello = StandInBench().place
    assert isinstance(hello, HostHello) and pickle.loads(pickle.dumps(hello)) == hello
    assert job_of(a_job(3, variants=("bsp", "push"), timeout_s=9.0).to_dict()) == a_job(
        3, variants=("bsp", "push"), timeout_s=9.0
    )
