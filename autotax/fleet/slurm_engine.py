"""Slurm, through submitit: an array of jobs of one node each, which start, die and are requeued independently."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from autotax.core.errors import UsageError
from autotax.fleet.messages import MOST_STARTS, EngineOptions, Notice, Order
from autotax.fleet.worker import Worker

NAME = "autotax-fleet"
USUAL = {"exclusive": True, "time": "24:00:00"}
"""Default parameters: a worker has its node exclusively."""
LOCAL_MINUTES = 24 * 60


class Task:
    """The worker on one node. Slurm sends a signal before it preempts a job or its time is up. Then submitit asks for a
    checkpoint and requeues the task. The checkpoint is empty, because the database holds the whole state.
    """

    def __call__(self, order: Order) -> str:
        worker = Worker(order)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())  # submitit ignores it
        return worker.run()

    def checkpoint(self, order: Order) -> DelayedSubmission:
        return DelayedSubmission(self, order)


@dataclass
class _Slot:
    job: Any
    order: Order
    starts: int = 1
    ended: bool = False


class SlurmEngine:
    """`slurm:local` runs the tasks as processes of this machine, to try things out."""

    def __init__(self, options: EngineOptions) -> None:
        if options.address not in ("", "local"):
            raise UsageError(f"--on slurm:{options.address} is unknown; allowed are slurm and slurm:local: give one of these")
        if options.hosts is None:
            raise UsageError("no number of hosts given, which Slurm needs: give --hosts")
        self.options = options
        self._slots: dict[int, _Slot] = {}
        self._executor: Any = None

    def start(self, order: Order) -> int:
        """See Engine.start. Slurm starts the tasks when it has nodes; none is waited for."""
        assert self.options.hosts is not None
        try:
            self._executor = submitit.AutoExecutor(folder=self.options.logs / "%j", cluster=self.options.address or "slurm")
        except (RuntimeError, OSError, ValueError) as error:
            raise UsageError(f"no Slurm answers here ({error}): run the command on a node that has `sbatch`") from None
        self._executor.update_parameters(name=NAME, nodes=1, tasks_per_node=1, timeout_min=LOCAL_MINUTES)
        if not self.options.address:
            more = USUAL | dict(self.options.parameters)
            self._executor.update_parameters(slurm_additional_parameters=more, slurm_array_parallelism=self.options.hosts)
        slots = range(self.options.hosts)
        orders = [replace(order, slot=slot, suffix=f"#{slot}" if self.options.address else "") for slot in slots]
        try:
            with self._executor.batch():
                jobs = [self._executor.submit(Task(), own) for own in orders]
        except submitit.core.utils.FailedJobError as error:
            raise UsageError(f"Slurm refuses the job ({' '.join(str(error).split())[:200]}): give other --slurm") from None
        self._slots = {own.slot: _Slot(job, own) for own, job in zip(orders, jobs, strict=True)}
        return len(self._slots)

    def watch(self) -> list[Notice]:
        """See Engine.watch."""
        return [self._ended(number) for number, slot in self._slots.items() if not slot.ended and slot.job.done()]

    def _ended(self, number: int) -> Notice:
        slot = self._slots[number]
        try:
            message = slot.job.result()
        except Exception as error:  # an exception of the task is raised here
            lost = " ".join(str(error).split())[-200:]
        else:
            slot.ended = True
            return Notice(number, False, message)
        if slot.starts < MOST_STARTS:
            slot.starts += 1
            slot.job = self._executor.submit(Task(), slot.order)
        else:
            slot.ended = True
        return Notice(number, True, lost)

    @property
    def running(self) -> int:
        return sum(not slot.ended for slot in self._slots.values())

    def close(self) -> None:
        """See Engine.close."""
        for slot in self._slots.values():
            if not slot.ended:
                with suppress(Exception):
                    slot.job.cancel(check=False)
        self._slots = {}
