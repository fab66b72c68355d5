"""The driver with workers that are threads of this process, each with a stand-in for its bench."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from autotax.core.errors import MachineError, UsageError
from autotax.db import Store
from autotax.fleet.driver import Driver, FleetOutcome, new_order
from autotax.fleet.messages import Ended, Event, FleetJob, HostHello, Notice, Order, Snapshot
from autotax.fleet.queue import ClaimQueue
from autotax.fleet.worker import Worker
from autotax.hardware import Hardware
from tests.fleet.conftest import B200, H200, StandInBench, a_job
from tests.fleet.shared import wait_until

TUNED = Ended("tuned", "push 1.2")
PATIENCE_S = 250.0
"""A busy machine does in this time what takes a second."""


class Threads:
    """An engine whose workers are threads."""

    def __init__(self, *benches: StandInBench) -> None:
        self.benches = benches
        self.workers: list[Worker] = []
        self.answers: dict[int, str] = {}
        self.reported: set[int] = set()
        self.closed = False

    def start(self, order: Order) -> int:
        for slot, bench in enumerate(self.benches):
            self.workers.append(worker := Worker(replace(order, slot=slot, suffix=f"#{slot}"), bench))
            threading.Thread(target=self._run, args=[slot, worker], daemon=True).start()
        return len(self.benches)

    def _run(self, slot: int, worker: Worker) -> None:
        self.answers[slot] = worker.run()

    def watch(self) -> list[Notice]:
        new = set(self.answers) - self.reported
        self.reported |= new
        return [Notice(slot, False, self.answers[slot]) for slot in sorted(new)]

    @property
    def running(self) -> int:
        return len(self.benches) - len(self.reported)

    def close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.stop()


class Ear:
    """A screen that records events."""

    def __init__(self, when: Callable[[Event], None] = lambda _: None) -> None:
        self.heard: list[Event] = []
        self.when = when

    def show(self, snapshot: Snapshot, happened: Sequence[Event]) -> None:
        self.heard += happened
        for event in happened:
            self.when(event)

    def names(self) -> list[str]:
        return [event["event"] for event in self.heard]


def drive(
    url: str,
    engine: Any,
    jobs: Callable[[Hardware], Sequence[FleetJob]] = lambda _: [a_job(0), a_job(1)],
    ear: Ear | None = None,
    **order: Any,
) -> FleetOutcome:
    settings = {"lease_s": 9.0, "patience_s": 30.0} | order
    driver = Driver(new_order(url, **settings), engine, jobs, ear or Ear(), poll_s=0.1, grace_s=5.0)
    outcome = driver.run()
    assert engine.closed
    return outcome


def late(bench: StandInBench, until: Callable[[], object]) -> StandInBench:
    """Delays a bench's host: it joins when `until` returns."""
    real = bench.start

    def start(order: Order) -> HostHello:
        wait_until(lambda: bool(until()), 60)
        return real(order)

    bench.start = start  # type: ignore[method-assign]
    return bench


def together(*benches: StandInBench) -> Threads:
    """No bench answers before all have been asked for a probe, so that every worker gets work."""
    for bench in benches:
        bench.waiting = lambda: not all(peer.probed for peer in benches)
    return Threads(*benches)


def test_each_kind_tunes_the_whole_list_and_hosts_of_a_kind_share_it(url: str) -> None:
    engine, ear = together(StandInBench(), StandInBench(), StandInBench(hardware=B200)), Ear()
    outcome = drive(url, engine, ear=ear)
    assert outcome.done and outcome.snapshot.count("tuned") == 4
    jobs = [bench.jobs for bench in engine.benches]
    assert sorted(job.problem.m for job in jobs[0] + jobs[1]) == [16, 32]
    assert [job.problem.m for job in jobs[2]] == [32, 16], "the longest first"
    assert ear.names().count("problems dealt") == 2 and ear.names().count("host left") == 3
    assert [len(bench.probed) for bench in engine.benches] == [1, 1, 1]


def test_hosts_that_are_slow_are_named(url: str) -> None:
    outcome = drive(url, together(StandInBench(us=100.0), StandInBench(us=130.0), StandInBench(us=104.0)))
    assert [(gap.slow[-2:], gap.fast[-2:]) for gap in outcome.gaps] == [("#1", "#0")]


def test_problems_that_do_not_fit_a_kind_are_none_of_it(url: str) -> None:
    def jobs(hardware: Hardware) -> list[FleetJob]:
        if hardware == B200:
            raise UsageError("world size is 8; this machine has 4 GPUs")
        return [a_job(0)]

    ear = Ear()
    outcome = drive(url, Threads(StandInBench(), StandInBench(hardware=B200)), jobs, ear)
    assert outcome.done and outcome.snapshot.count("tuned") == 1
    (report,) = [event for event in ear.heard if event["event"] == "nothing to tune"]
    assert (report["kind"], report["message"]) == (B200.digest, "world size is 8; this machine has 4 GPUs")


def test_a_host_that_joins_after_another_has_left_is_waited_for(url: str) -> None:
    """The first one finds nothing to tune for its kind and leaves at once."""

    engine = Threads(StandInBench(), StandInBench(hardware=B200))
    late(engine.benches[0], lambda: 1 in engine.reported)
    outcome = drive(url, engine, lambda hardware: [] if hardware == B200 else [a_job(0)])
    assert outcome.done and outcome.snapshot.count("tuned") == 1


def test_a_host_that_joins_while_another_kind_is_dealt_gets_its_problems(url: str) -> None:
    dealing = threading.Event()
    engine = Threads(StandInBench(), StandInBench(hardware=B200))
    late(engine.benches[0], dealing.is_set)

    def jobs(hardware: Hardware) -> list[FleetJob]:
        if hardware != B200:
            return [a_job(0)]
        dealing.set()
        database = create_engine(url)
        with database.connect() as connection:
            wait_until(lambda: connection.execute(text("SELECT count(*) FROM autotax_fleet_host")).scalar() == 2, 60)
        database.dispose()
        return []

    outcome = drive(url, engine, jobs)
    assert outcome.done and outcome.snapshot.count("tuned") == 1


def test_what_fails_on_every_host_is_told_as_failed(url: str) -> None:
    bad = Ended("unverified", "nothing could be verified (3 hang)")
    outcome = drive(url, Threads(StandInBench(bad), StandInBench(bad)), lambda _: [a_job(0)])
    assert not outcome.done and not outcome.trouble
    (claim,) = outcome.snapshot.claims
    assert (claim.outcome, claim.message, claim.failures) == ("failed", "nothing could be verified (3 hang)", 2)


def test_what_fails_on_the_only_host_of_its_kind_is_given_up(url: str) -> None:
    outcome = drive(url, Threads(StandInBench(Ended("refused", "it does not fit"), TUNED)))
    assert [claim.outcome for claim in outcome.snapshot.claims] == ["failed", "tuned"]
    assert outcome.snapshot.claims[0].message == "it does not fit"


def test_hosts_with_other_kernels_are_refused(url: str) -> None:
    other = StandInBench(hardware=B200)
    other.place = HostHello(B200, replace(other.place.environment, kernels="0123456789abcdef"))
    outcome = drive(url, Threads(StandInBench(), other))
    (host,) = [host for host in outcome.snapshot.hosts if host.kind == B200.digest]
    assert host.state == "refused" and "install the same autotax" in host.note and not other.jobs
    assert outcome.snapshot.count("tuned") == 2


def test_hosts_of_a_kind_with_other_software_are_refused(url: str) -> None:
    """The winners of one host would be stale on the other."""
    other = StandInBench()
    other.place = HostHello(H200, replace(other.place.environment, triton="3.0.0"))
    busy = StandInBench(lambda: wait_until(lambda: 1 in engine.answers, 60) or TUNED)
    engine = Threads(busy, late(other, lambda: busy.jobs))
    outcome = drive(url, engine, lambda _: [a_job(0)], lease_s=30.0)
    refused = [host for host in outcome.snapshot.hosts if host.state == "refused"]
    assert [host.name[-2:] for host in refused] == ["#1"] and "triton 3.0.0" in refused[0].note and not other.jobs
    assert outcome.done


def test_without_a_host_that_lives_the_fleet_ends(url: str) -> None:
    class Dying(StandInBench):
        def start(self, order: Order) -> HostHello:
            raise MachineError("the driver is broken")

    outcome = drive(url, Threads(Dying(), Dying()))
    assert outcome.trouble == "no host is left: see the message of each" and not outcome.done


def test_an_interrupt_ends_all_workers_and_the_same_command_goes_on(url: str) -> None:
    def interrupt(event: Event) -> None:
        if event["event"] == "problem begun":
            raise KeyboardInterrupt

    engine = Threads(StandInBench("silence"), StandInBench("silence"))
    began = time.monotonic()
    outcome = drive(url, engine, ear=Ear(interrupt))
    assert outcome.interrupted and not outcome.done and time.monotonic() - began < PATIENCE_S
    assert all(bench.interrupted for bench in engine.benches if bench.jobs) and any(bench.jobs for bench in engine.benches)
    assert {host.state for host in outcome.snapshot.hosts} == {"left"}
    assert all(claim.holder is None for claim in outcome.snapshot.claims) and len(outcome.snapshot.left) == 2
    assert drive(url, Threads(StandInBench())).done


def test_a_worker_that_the_engine_lost_frees_its_problem_at_once(url: str) -> None:
    class Losing(Threads):
        """The worker in slot 0 dies with its node as soon as it has begun."""

        def watch(self) -> list[Notice]:
            notices = super().watch()
            if self.benches[0].jobs and 0 not in self.reported and self.workers[0].claim:
                self.reported.add(0)
                self.workers[0]._queue = _Gone()  # type: ignore[assignment]
                notices.append(Notice(0, True, "its node died"))
            return notices

    engine = Losing(StandInBench("silence"), late(StandInBench(), lambda: 0 in engine.reported))
    ear = Ear()
    began = time.monotonic()
    outcome = drive(url, engine, ear=ear, lease_s=2 * PATIENCE_S)
    assert outcome.done and time.monotonic() - began < PATIENCE_S, "the lease is longer"
    assert {claim.host[-2:] for claim in outcome.snapshot.claims if claim.host} == {"#1"}
    assert "worker lost" in ear.names() and "host lost" in ear.names()
    assert {event["problem"] for event in ear.heard if event.get("after_lost_hosts") == 1} == {a_job(1).problem.key}


class _Gone:
    """The queue of a dead worker."""

    patience_s = 0.0

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise MachineError("this worker is dead")


def test_nothing_is_dealt_that_is_tuned_already(url: str) -> None:
    from autotax.software import environment
    from tests.db.conftest import keep_winner

    with Store.open(url) as store:
        conditions = a_job(0).settings.conditions
        keep_winner(store, a_job(0).problem, hardware=H200, environment=environment("cpu"), conditions=conditions)
    bench = StandInBench()
    outcome = drive(url, Threads(bench))
    assert [job.problem.m for job in bench.jobs] == [32] and outcome.done
    assert [won.winner.problem.m for won in outcome.winners] == [16], "its winner is in the table all the same"


def test_a_driver_that_is_killed_takes_its_workers_with_it(url: str, desk: ClaimQueue) -> None:
    """The workers stop when the driver has been silent for five leases."""
    order = new_order(url, lease_s=0.4, patience_s=5.0)
    desk.begin(order.fleet)
    worker = Worker(order, bench := StandInBench("silence"))
    began = time.monotonic()
    assert worker.run() == "left" and 1.5 < time.monotonic() - began < PATIENCE_S and not bench.jobs


@pytest.mark.parametrize("url", ["sqlite:////tmp/x.db"])
def test_a_file_is_no_database_of_a_fleet(url: str) -> None:
    with pytest.raises(UsageError):
        Driver(new_order(url), Threads(), lambda _: [], Ear()).run()
