"""The tuner of a host: `python -m autotax.fleet.tuner_process FD` tunes one job after another here, as `autotax tune` does.

It is a separate process, so a tuner that crashes, hangs or is killed affects neither the worker nor the claim. SIGINT ends the
current run like Ctrl-C. The process dies with its worker.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from autotax.core.errors import MachineError, UsageError
from autotax.core.settings import as_deployed
from autotax.db import Store
from autotax.fleet.messages import Ended, FleetJob, HostHello, Order, Probe, Probed, TrialEnded
from autotax.hardware import Hardware, detect
from autotax.runner.measurement import Candidate, Effort, Runner
from autotax.runner.processes import die_with_parent
from autotax.software import environment
from autotax.spaces import space_for
from autotax.tuner import Progress, tune

Runners = Callable[[Hardware, int, int], Any]
"""Makes a runner for hardware, world size and seed. In addition to the protocol Runner it has an `environment`."""


def main() -> None:
    die_with_parent("autotax-bench")
    serve(Connection(int(sys.argv[1])))


def live_runner(hardware: Hardware, world_size: int, seed: int) -> Any:
    from autotax.runner.local_runner import LiveRunner

    return LiveRunner(hardware, world_size, seed=seed)


def this_machine(order: Order) -> Hardware:
    return detect(order.backend)


def serve(pipe: Connection, runners: Runners = live_runner, find: Callable[[Order], Hardware] = this_machine) -> None:
    """Answers the messages of the pipe until it closes."""
    order: Order = pipe.recv()
    hardware = find(order)
    pipe.send(HostHello(hardware, environment(hardware.backend)))
    tuner = HostTuner(order, hardware, runners, pipe.send)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            request = pipe.recv()
            pipe.send(tuner.probe(request.job) if isinstance(request, Probe) else tuner.tune(request))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tuner.close()


class HostTuner:
    """Tunes on one pool of ranks, which is kept until a problem has another world size."""

    def __init__(self, order: Order, hardware: Hardware, runners: Runners, tell: Callable[[object], None]) -> None:
        self.order, self.hardware, self.tell = order, hardware, tell
        self.name = socket.gethostname() + order.suffix
        self._make = runners
        self._runner: Any = None
        self._world_size = 0

    def tune(self, job: FleetJob) -> Ended:
        """One run of the tuner. Returns errors as `Ended`, so that the worker decides about the claim."""
        try:
            store = Store.open(self.order.url)
        except UsageError as error:  # the worker has used this database, so it is unreachable or has no free connection
            return Ended("trouble", str(error))
        try:
            with store:
                runner = self._runner_for(job)
                verdict = tune(
                    job.problem,
                    hardware=self.hardware,
                    runner=runner,
                    store=store,
                    environment=runner.environment,
                    settings=replace(job.settings, host=self.name),
                    listener=self,
                )
                if verdict.winner:
                    store.forget_miss(job.problem, self.hardware, verdict.conditions)
        except (KeyboardInterrupt, UsageError, MachineError, RuntimeError) as error:
            return self._explain(error)
        finally:
            gc.collect()  # frees the connections of the study's storage, because a server has few
        if verdict.interrupted:
            return Ended("interrupted")
        if verdict.winner is None or verdict.baseline is None:
            counts = ", ".join(f"{count} {status}" for status, count in verdict.trials.items())
            return Ended("unverified", f"nothing could be verified ({counts})")
        return Ended("tuned", f"{verdict.winner.measurement.config.variant} {verdict.winner.speedup:.3f}")

    def probe(self, job: FleetJob) -> Probed:
        """Measures BSP of a problem, unless the machine cannot run it."""
        try:
            runner: Runner = self._runner_for(job)
            conditions = as_deployed(job.settings.conditions, self.hardware).searched
            candidate = Candidate(space_for(job.problem, self.hardware).default("bsp"), conditions)
            (measurement,) = runner.measure(job.problem, [candidate], Effort())
            return Probed(measurement.latency_us if measurement.verified else None)
        except (UsageError, MachineError, RuntimeError):
            return Probed(None)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    # The listener of a run

    def progress(self, progress: Progress) -> None:
        self.tell(TrialEnded(progress.done, progress.total))

    def notice(self, text: str) -> None:
        pass  # the store has the notice with the run

    def _runner_for(self, job: FleetJob) -> Any:
        if self._runner is None or self._world_size != job.problem.world_size:
            self.close()
            self._runner = self._make(self.hardware, job.problem.world_size, job.settings.seed)
            self._world_size = job.problem.world_size
        return self._runner

    def _explain(self, error: BaseException) -> Ended:
        if isinstance(error, KeyboardInterrupt):
            return Ended("interrupted")
        if isinstance(error, UsageError):
            return Ended("refused", str(error))
        self.close()  # the next job begins with new ranks
        return Ended("trouble", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
