"""The worker of a host: claims a problem, lets the tuner process tune it, renews the claim and claims the next one."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from autotax.core.errors import MachineError
from autotax.db.records import SOFTWARE
from autotax.fleet.messages import Claim, Ended, FleetJob, HostHello, Order, Probe, Probed, TrialEnded
from autotax.fleet.queue import ClaimQueue, Heartbeat
from autotax.runner.processes import Child
from autotax.software import Environment

START_S = 300.0
"""Timeout for a tuner process to report its hardware, and for a probe."""
TRIES = 3
"""Attempts at one problem on one host, if the machine, the database or the tuner itself fails."""
BAD_LUCK = 3
"""A host on which this many problems in a row failed leaves the fleet, because the host is assumed to be faulty."""
ENDING_S = 10.0
"""Timeout for an interrupted run to report its end."""
IDLE_S = (1.0, 10.0)
"""The first and the longest pause of a worker that finds nothing to claim."""


class TunerLost(Exception):
    """The tuner process is gone, or was ended because it sent no messages."""


class TunerLike(Protocol):
    """The interface of a tuner process to its worker."""

    def start(self, order: Order) -> HostHello: ...
    def send(self, message: object) -> None: ...
    def receive(self, seconds: float) -> Any:
        """The next message, or None after the timeout. Raises TunerLost."""
        ...

    def interrupt(self) -> None: ...
    def kill(self) -> None: ...


class TunerProcess:
    """The tuner as a separate process."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def start(self, order: Order) -> HostHello:
        self._child = Child.start(order.tuner_module, (), {})
        self.send(order)
        hello = self.receive(START_S)
        if not isinstance(hello, HostHello):
            self.kill()
            raise TunerLost(f"the tuner did not start within {START_S:.0f} s")
        return hello

    def send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise TunerLost(self._last_words()) from None

    def receive(self, seconds: float) -> Any:
        try:
            return self._pipe.recv() if self._pipe.poll(seconds) else None
        except (EOFError, OSError):
            raise TunerLost(self._last_words()) from None

    def interrupt(self) -> None:
        if self._child and self._child.process.poll() is None:
            os.kill(self._child.process.pid, signal.SIGINT)

    def kill(self) -> None:
        if self._child:
            self._child.kill()
            self._child = None

    @property
    def _pipe(self) -> Connection:
        assert self._child is not None
        return self._child.pipe

    def _last_words(self) -> str:
        child, self._child = self._child, None
        assert child is not None
        ending = child.last_words()
        child.kill()
        return f"the tuner {ending}"


@dataclass
class Worker:
    """One worker. `run` returns when the fleet no longer needs it, with a text that says how it ended."""

    order: Order
    tuner: TunerLike = field(default_factory=TunerProcess)
    claim: Claim | None = None
    trials: int = 0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.name = socket.gethostname() + self.order.suffix
        self.kind = ""
        self._stop = threading.Event()
        self._queue = ClaimQueue(self.order.url, self.order.patience_s, self._waiting)
        self._step = TrialEnded(0, 0)
        self._began = self._beaten = self._heard = 0.0
        self._tries = self._bad_luck = 0
        self._idle_s = IDLE_S[0]
        self._probes: dict[str, float] = {}
        self._probed, self._probing_since = False, 0.0
        self._resting_until = 0.0

    def stop(self) -> None:
        """Makes the worker end soon and give its claim back. May be called from another thread or a signal handler."""
        self._stop.set()

    def run(self) -> str:
        state, note = "failed", ""
        try:
            self._place = self.tuner.start(self.order)
            self.kind = self._place.hardware.digest
            self._queue.join(self.id, self.order.fleet, self.order.slot, self.name, self._place)
            state, note = self._work()
        except TunerLost as lost:
            note = str(lost)
        except MachineError as error:
            note = str(error)
        except (KeyboardInterrupt, SystemExit):
            state, note = "left", "it was asked to end"
            self._leave(state, note)
            raise
        self._leave(state, note)
        return f"{state}: {note}" if note else state

    def _work(self) -> tuple[str, str]:
        while True:
            if self._stop.is_set():
                return "left", "it was asked to end"
            answer = self._beat()
            if answer is not None:
                if not answer.going:
                    return "left", ""
                if self.claim and not answer.held:
                    self.claim = None  # another worker has it
                    self._restart_tuner()
                if why := self._differs(answer.software):
                    return "refused", why
                if answer.dealt and not self._probed:
                    self._begin_probe(answer.probe)
                if self.claim is None and answer.dealt and not self._probing_since and not self._take():
                    if not self._queue.left(self.order.fleet, self.kind):
                        return "left", ""
                    self._idle_s = min(self._idle_s * 1.5, IDLE_S[1], self.order.lease_s)
            self._listen()
            if self._bad_luck >= BAD_LUCK:
                return "retired", f"{BAD_LUCK} problems in a row failed on it"

    def _differs(self, others: Environment | None) -> str:
        """Why winners of this host would be stale on other hosts of its kind or vice versa; empty if they hold."""
        if others is None:
            return ""
        here, names = self._place.environment, ("kernels", *SOFTWARE)
        values = [f"{name} {getattr(here, name)} and not {getattr(others, name)}" for name in names]
        differing = [line for line, name in zip(values, names, strict=True) if getattr(here, name) != getattr(others, name)]
        return f"it has {', '.join(differing)} like its kind: install the same on all" if differing else ""

    # Beats and claims

    def _beat(self) -> Heartbeat | None:
        """Sends a heartbeat when it is due, and whenever a problem has ended, to claim the next one at once."""
        pause_s = self.order.beat_s if self.claim else min(self._idle_s, self.order.beat_s)
        if time.monotonic() - self._beaten < pause_s:
            return None
        claim = self.claim.id if self.claim else None
        values = self._progress()
        answer = self._queue.beat(self.id, self.order.fleet, claim, self.order.lease_s, 5 * self.order.lease_s, **values)
        self._beaten = time.monotonic()
        return answer

    def _progress(self) -> dict[str, Any]:
        busy_s = self.busy_s + (time.monotonic() - self._began if self.claim else 0.0)
        state = {"state": "working" if self.claim else "idle"} if self.kind else {}
        counts = {"done": self._step.done, "total": self._step.total, "trials": self.trials, "busy_s": busy_s}
        return state | counts | {"probes": self._probes}

    def _begin_probe(self, job: FleetJob | None) -> None:
        """All hosts of a kind measure the same probe, which shows slow hosts."""
        self._probed = True
        if job:
            self._probing_since, self._probe_key = time.monotonic(), job.problem.key
            self.tuner.send(Probe(job))

    def _end_probe(self, us: float | None) -> None:
        self._probing_since = self._beaten = 0.0
        self._probes |= {self._probe_key: us} if us else {}

    def _take(self) -> bool:
        claim = self._queue.take(self.id, self.order.fleet, self.kind, self.name, self.order.lease_s)
        if claim is None:
            return False
        if claim.taken_before:  # else a search that began anew on another host would start over again
            job = replace(claim.job, settings=replace(claim.job.settings, resume=True))
            claim = replace(claim, job=job)
        self.claim, self._step, self._tries = claim, TrialEnded(0, 0), 0
        self._began = self._beaten = time.monotonic()
        self._idle_s = IDLE_S[0]
        self._send()
        return True

    def _send(self) -> None:
        assert self.claim is not None
        self._tries += 1
        self._heard = time.monotonic()
        self.tuner.send(self.claim.job)

    def _restart_tuner(self) -> None:
        self.tuner.kill()
        self.tuner.start(self.order)

    # Messages of the tuner process

    def _listen(self) -> None:
        """Waits for messages of the tuner process, until the next heartbeat is due or for a short time."""
        try:
            if self.claim and self._resting_until:
                if time.monotonic() >= self._resting_until:
                    self._resting_until = 0.0
                    self._send()
                time.sleep(0.1)
                return
            heard = self.tuner.receive(min(0.5, self.order.beat_s))
        except TunerLost as lost:
            if self.claim is None:
                raise
            self._restart_tuner()
            self._ended(Ended("trouble", str(lost)))
            return
        if heard is not None:
            self._heard = time.monotonic()
        elif self.claim and time.monotonic() - self._heard > self.order.hang_s:
            self._restart_tuner()
            self._ended(Ended("trouble", f"the tuner reported nothing for {self.order.hang_s:.0f} s and was ended"))
        if isinstance(heard, TrialEnded):
            self.trials += heard.done > self._step.done
            self._step = heard
        elif isinstance(heard, Ended):
            self._ended(heard)
        elif isinstance(heard, Probed):
            self._end_probe(heard.us)
        elif self._probing_since and time.monotonic() - self._probing_since > START_S:
            self._restart_tuner()
            self._end_probe(None)

    def _ended(self, ended: Ended) -> None:
        claim = self.claim
        if claim is None:
            return
        if ended.how == "trouble" and self._tries < TRIES:
            self._queue.left(self.order.fleet, self.kind)  # waits for the database, which may be the cause of the trouble
            self._resting_until = time.monotonic() + min(2.0, self.order.beat_s)
            return
        seconds = time.monotonic() - self._began
        if ended.how == "tuned":
            self._bad_luck = 0
            self._queue.finish(self.id, claim.id, "tuned", ended.message, seconds)
        elif ended.how == "interrupted":  # not interrupted by the fleet
            self._queue.release(self.id, claim.id)
        else:
            self._bad_luck += 1
            self._queue.fail(self.id, claim.id, self.name, ended.message, seconds)
        self.busy_s += seconds
        self.claim, self._beaten = None, 0.0

    # The end

    def _waiting(self, message: str) -> None:  # noqa: ARG002
        """Called while the database is unreachable: the tuner goes on, but a worker that was asked to end stops waiting."""
        if self._stop.is_set():
            raise MachineError("it was asked to end while the database was away")

    def _leave(self, state: str, note: str) -> None:
        """Ends the tuner process and gives the claim back, which lapses if the database is unreachable."""
        try:
            if self.claim:
                self.busy_s += time.monotonic() - self._began
                self._interrupt()
        finally:
            self.tuner.kill()
            self._queue.patience_s = 0.0
            try:
                if self.claim:
                    self._queue.release(self.id, self.claim.id)
                self.claim = None
                if self.kind:
                    self._queue.leave(self.id, state, note, trials=self.trials, busy_s=self.busy_s)
            except MachineError:
                pass
            self._queue.close()

    def _interrupt(self) -> None:
        """Interrupts the tuner process by SIGINT, so that its run can store that it was interrupted."""
        self.tuner.interrupt()
        until = time.monotonic() + ENDING_S
        try:
            while (left := until - time.monotonic()) > 0:
                if isinstance(self.tuner.receive(left), Ended):
                    return
        except TunerLost:
            pass


def work(order: Order) -> str:
    """Runs a worker on this host until the fleet ends. SIGTERM stops it in order; preempted hosts receive it."""
    worker = Worker(order)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    return worker.run()
