"""A fleet's database is a server, so its tests need one: that of the test extra, or $AUTOTAX_TEST_SERVER."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from autotax.fleet.messages import Ended, FleetJob, HostHello, Order, Probe, Probed, TrialEnded
from autotax.fleet.queue import ClaimQueue, Due
from autotax.fleet.worker import TunerLost
from autotax.hardware import Hardware
from autotax.operators.problems import AllGatherGemm
from autotax.runner.processes import SHARED
from autotax.software import environment
from autotax.tuner import Settings
from tests.db.conftest import KINDS, at_once, server_url, wipe
from tests.tuner.shared import H200

__all__ = ["at_once", "server_url"]

B200 = replace(H200, device="NVIDIA B200", target="cuda:100")
FLEET = "fleet-1"


def a_job(number: int = 0, **settings: object) -> FleetJob:
    """A job whose size grows with `number`."""
    problem = AllGatherGemm(m=16 * (number + 1), n=16, k=32, dtype="fp32", world_size=2)
    return FleetJob(problem, Settings(**({"trials": 3, "soak": 0} | settings)).on(H200))  # type: ignore[arg-type]


def due(count: int) -> list[Due]:
    return [Due(a_job(number)) for number in range(count)]


@pytest.fixture(autouse=True)
def _servers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test its own fork server. Processes of a shared server lack the test's mark, by which a test finds leftovers."""
    monkeypatch.delenv(SHARED)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    if "server" not in KINDS:
        pytest.skip("there is no wheel with a server, nor AUTOTAX_TEST_SERVER")
    url: str = request.getfixturevalue("server_url")
    wipe(url)
    return url


@pytest.fixture
def desk(url: str) -> Iterator[ClaimQueue]:
    """A queue whose fleet has begun."""
    from autotax.db import Store

    with Store.open(url), ClaimQueue(url, patience_s=30) as desk:
        desk.begin(FLEET)
        yield desk


def join(desk: ClaimQueue, host: str, hardware: Hardware = H200, fleet: str = FLEET, slot: int = 0) -> None:
    desk.join(host, fleet, slot, f"name of {host}", HostHello(hardware, environment("cpu")))


def an_order(url: str, **other: object) -> Order:
    """An order with a lease that a busy machine keeps: the worker ends when the driver has been silent for five."""
    return replace(Order(url=url, fleet=FLEET, slot=0, lease_s=6.0, patience_s=30), **other)  # type: ignore[arg-type]


class StandInBench:
    """Answers like a bench, in the process of the worker. `script` lists the ends of the jobs in turn; the last one repeats."""

    def __init__(self, *script: object, hardware: Hardware = H200, us: float | None = 100.0) -> None:
        self.script = list(script) or [Ended("tuned", "push 1.2")]
        self.place = HostHello(hardware, environment("cpu"))
        self.us = us
        self.jobs: list[FleetJob] = []
        self.probed: list[FleetJob] = []
        self.starts = self.kills = 0
        self.interrupted = False
        self.waiting: Callable[[], bool] = lambda: False
        self.coming: list[object] = []

    def start(self, order: Order) -> HostHello:
        self.starts += 1
        self.coming = []
        return self.place

    def send(self, asked: object) -> None:
        if isinstance(asked, Probe):
            self.probed.append(asked.job)
            self.coming = [Probed(self.us)]
            return
        assert isinstance(asked, FleetJob)
        self.jobs.append(asked)
        ending = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.coming = [TrialEnded(1, 3), ending]

    def receive(self, seconds: float) -> object:
        from time import sleep

        if not self.coming or self.waiting():
            sleep(min(seconds, 0.05))
            return None
        coming = self.coming.pop(0)
        if isinstance(coming, TunerLost):
            raise coming
        if coming == "silence":
            return None
        return coming() if callable(coming) else coming

    def interrupt(self) -> None:
        self.interrupted = True
        self.coming = [Ended("interrupted")]

    def kill(self) -> None:
        self.kills += 1
