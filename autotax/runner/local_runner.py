"""The live runner: measures on a pool of ranks, and survives candidates that crash or hang the ranks."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from autotax.core.config import Config
from autotax.core.errors import MachineError, UsageError, joined
from autotax.core.problem import Problem
from autotax.hardware import Hardware, check_loopback, check_world_size
from autotax.operators import loaded, registry
from autotax.runner.gpu_monitor import amd_notices, device_addresses, device_uuids, nvidia_notices
from autotax.runner.measurement import REFERENCES, Candidate, Effort, Measurement, Overlap, TimeIsUp
from autotax.runner.messages import Fatal, Hello, Job, Raised, RankSetup, Report, Stage
from autotax.runner.precompile import CompileAhead
from autotax.runner.processes import Child, ForkServer, disk_is_full, full_disk, rank_environment, tells_of_full_disk
from autotax.runner.yardsticks import Watch
from autotax.software import Environment

# The group of rank processes, seen from the tuner: started together, answering together, killed together. Nothing is left behind,
# even after a crash: ranks die with the tuner, their heaps are anonymous memory, and their output goes to files without a name.

START_DEADLINE_S = 180.0
CLOSING_S = 1.0
"""The sockets of a process that ends close before its pipe, so a peer may report the closed socket this much earlier."""
GRACE_S = 5.0
"""Time for the peers of a rank that raised to agree on the error. Afterwards they are assumed to wait for that rank forever."""
LAST_WORDS_S = 1.0
"""Time for the other ranks to report their errors after a rank has ended."""


class GroupLost(RuntimeError):
    """The group could not finish a job and has been killed. `status` is `hang`, `crash` or `out_of_resources`; the message names
    the ranks and their stages, first the rank that failed first.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class _Failure:
    """`at` is the time of the error, `until` the time at which the group is given up because of it."""

    status: str
    text: str
    at: float
    until: float


@dataclass
class _Rank:
    rank: int
    child: Child
    stage: str = "starting"
    answer: Any = None
    failure: _Failure | None = None
    ended: bool = False

    @property
    def pipe(self) -> Connection:
        return self.child.pipe

    def end(self, text: str, at: float) -> None:
        """Notes that the rank has ended, for this reason or because of an error that it raised before."""
        first = self.failure or _Failure("crash", text, at, 0.0)
        self.ended, self.failure = True, replace(first, until=time.monotonic() + LAST_WORDS_S)


@dataclass
class RankPool:
    """`world_size` ranks: `start`, then `run`; after GroupLost start again; `close` ends them and the server that forks them."""

    hardware: Hardware
    world_size: int
    heap_bytes: int
    modules: tuple[str, ...] = ()
    server: ForkServer = field(default_factory=ForkServer)
    ranks: list[_Rank] = field(default_factory=list)
    _meeting: Any = None

    @property
    def running(self) -> bool:
        """Whether all ranks are alive; one may have died while it had nothing to do, which is no candidate's fault."""
        return bool(self.ranks) and all(rank.child.process.poll() is None for rank in self.ranks)

    def start(self, until: float = math.inf, overlap: Callable[[], None] | None = None) -> Environment:
        """Starts the ranks, calls `overlap` and waits until all are ready; returns the software that they all run.

        Raises GroupLost if they do not come up, MachineError if they cannot meet, UsageError if they do not all run the same code
        and packages, TimeIsUp at the monotonic time `until`.
        """
        self.kill()
        check_loopback()
        variables = rank_environment(self.hardware.backend)
        for rank in range(self.world_size):
            self.ranks.append(_Rank(rank, self.server.child("autotax.runner.rank_worker", (), variables)))

        from autotax.heap.world import Meeting  # only now: the fork server imports torch at the same time

        # A store remembers the group that used it: each group gets a new one.
        self._meeting = Meeting()
        for member in self.ranks:
            setup = member.rank, self.world_size, self.hardware.backend, self._meeting.address, self.heap_bytes, self.modules
            with suppress(BrokenPipeError):  # the process died at once; the code that waits for it notices
                member.pipe.send(RankSetup(*setup))
        hellos = self._collect(START_DEADLINE_S, START_DEADLINE_S, until, overlap)
        environments = [hello.environment for hello in hellos if isinstance(hello, Hello)]
        for rank, other in enumerate(environments):
            if other != environments[0]:
                pairs = zip(other.to_dict().items(), environments[0].to_dict().values(), strict=True)
                differing = [f"{name} {value!r} against {first!r}" for (name, value), first in pairs if value != first]
                self.kill()
                raise UsageError(f"rank {rank} runs other code than rank 0 ({', '.join(differing)}): install the same on all")
        for rank, hello in enumerate(hello for hello in hellos if isinstance(hello, Hello)):
            loaded = dict(hello.loaded)
            if differing := [name for name, digest in registry.fingerprints().items() if loaded.get(name, digest) != digest]:
                self.kill()
                raise UsageError(f"rank {rank} has loaded another {differing[0]} than this process: it was edited; start again")
        return environments[0]

    def run(
        self, job: Job, silence_s: float, total_s: float, overlap: Callable[[], None] | None = None, until: float = math.inf
    ) -> list[Report]:
        """Runs a job on all ranks, and `overlap` in this process. Returns the report of every rank.

        Kills the group and raises GroupLost when a rank ends, when its peers wait for a rank that raised, when all ranks are
        silent for `silence_s`, or after `total_s`. Kills it and raises TimeIsUp at the monotonic time `until`. Raises
        MachineError when a rank met a full disk. An error of `overlap` kills the group, then reaches the caller.
        """
        def send_then() -> None:
            for rank in self.ranks:
                rank.answer, rank.stage = None, "receiving the job"
                with suppress(BrokenPipeError):  # that rank is dead, which is noticed below
                    rank.child.send(job)
            if overlap:
                overlap()

        return self._collect(silence_s, total_s, until, send_then)

    def kill(self) -> None:
        """Kills all ranks at once. Safe to call twice."""
        for rank in self.ranks:
            rank.child.stop()
        for rank in self.ranks:
            rank.child.kill()
        self.ranks = []
        self._meeting = None

    def close(self) -> None:
        """Ends the ranks and their server. Safe to call twice."""
        try:
            self.kill()
        finally:
            self.server.close()

    def _collect(self, silence_s: float, total_s: float, until: float, first: Callable[[], None] | None = None) -> list[Any]:
        """One answer from each rank, after `first`; else kills the group and raises GroupLost, TimeIsUp or MachineError."""
        try:
            if first:
                first()
            return self._answers(silence_s, total_s, until)
        except BaseException:  # on Ctrl-C too: a late answer would be taken for the answer to the next job
            self.kill()
            raise

    def _answers(self, silence_s: float, total_s: float, until: float) -> list[Any]:
        started = looked = time.monotonic()
        last = min(started + total_s, until)
        deadline = min(last, started + silence_s)
        waiting = {rank.pipe: rank for rank in self.ranks}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                self._receive(rank, looked)
                if rank.answer is not None or rank.ended:
                    del waiting[pipe]  # type: ignore[arg-type]
            looked = time.monotonic()
            given_up = (rank.failure.until for rank in self.ranks if rank.failure)
            deadline = min(last, looked + silence_s, *given_up)
        if not waiting and not any(rank.failure for rank in self.ranks):
            return [rank.answer for rank in self.ranks]
        if time.monotonic() >= until and not any(rank.failure for rank in self.ranks):
            raise TimeIsUp(", ".join(f"rank {rank.rank} at '{rank.stage}'" for rank in waiting.values()))
        late = time.monotonic() >= started + total_s
        waited = f"not done after {total_s:.0f} s" if late else f"no answer within {silence_s:.0f} s"
        raise self._lost(list(waiting.values()), waited)

    def _receive(self, rank: _Rank, looked: float) -> None:
        """Takes a rank's next message. A rank without one ended at some time since the pool last `looked`."""
        try:
            message = rank.pipe.recv()
        except (EOFError, OSError):  # it ended, or it was stopped in the middle of a message
            rank.end(f"{rank.child.last_words()} (at '{rank.stage}')", looked - CLOSING_S)
            return
        if isinstance(message, Stage):
            rank.stage, rank.failure = message.text, None
        elif isinstance(message, Raised):
            text, until = f"failed at '{rank.stage}': {message.text}", time.monotonic() + GRACE_S
            rank.failure = _Failure(message.status, text, message.at, until)
        elif isinstance(message, Fatal):
            rank.end(f"failed at '{rank.stage}': {message.text}", message.at)
        else:
            rank.answer, rank.failure = message, None

    def _lost(self, silent: Sequence[_Rank], waited: str) -> GroupLost | MachineError:
        failed = sorted((rank.failure.at, rank.rank, rank.failure) for rank in self.ranks if rank.failure)
        for _, number, failure in failed:
            if tells_of_full_disk(failure.text):
                return disk_is_full(f"on rank {number}", failure.text)
        if failed:  # the first error causes the errors of the other ranks
            reports = [f"rank {number} {failure.text}" for _, number, failure in failed]
            return GroupLost(failed[0][2].status, joined(reports))
        stuck = [f"rank {rank.rank} at '{rank.stage}'" for rank in silent]
        return GroupLost("hang", f"{waited}: {', '.join(stuck)}")


# The runner.

DEADLINE_S = 60.0
MOST_COMPILERS = 16
FORESIGHT = 8
"""Initial number of configs requested in advance, small enough for the search to learn in between. It grows by one each time the
ranks wait for a compiler, up to the number of compilers.
"""
GPU_HEAP_BYTES = 8 << 30
CPU_HEAP_BYTES = 256 << 20
STARTS = 3
"""Attempts to start ranks, with longer and longer pauses."""
PAUSE_S = 2.0
MOST_OF_TRIAL = 2
"""Most candidates of a job of the search. They are compiled ahead; finalists have been compiled before."""


def heap_bytes(hardware: Hardware) -> int:
    """Bytes of the symmetric heap of a rank: at most an eighth of a GPU's memory."""
    return min(GPU_HEAP_BYTES, hardware.memory_gib << 27) if hardware.on_gpu else CPU_HEAP_BYTES


class LiveRunner:
    """Ranks on this machine, started at the first measurement and again after each loss.

    Ranks report before each stage. A group that is silent for `deadline_s` is killed, and the candidate gets the status `hang`.
    The same bound holds for a candidate as a whole without its soak, and for each replay of the soak. `seed` seeds all random
    numbers. Raises UsageError when the machine cannot hold the ranks.
    """

    def __init__(
        self,
        hardware: Hardware,
        world_size: int,
        *,
        deadline_s: float | None = None,
        modules: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        check_world_size(hardware, world_size)
        modules = tuple(dict.fromkeys((*loaded(), *modules)))
        self.hardware = hardware
        self.deadline_s = deadline_s or DEADLINE_S
        spare = (os.cpu_count() or 1) - world_size - 1
        server, workers = ForkServer(), min(MOST_COMPILERS, spare)
        self.pool = RankPool(hardware, world_size, heap_bytes(hardware), modules, server)
        self.compilers = CompileAhead(hardware, workers, modules, server=server) if hardware.on_gpu and spare > 0 else None
        self.restarts = 0
        self.foresight = FORESIGHT if self.compilers else 1
        self._seed = seed
        self._watch = Watch(hardware.on_gpu)
        self._news: tuple[str, ...] = ()
        """Notices from the start of the group, which the next measurements carry."""
        self._environment: Environment | None = None
        self._sequence = 0

    @property
    def environment(self) -> Environment:
        """The software of the ranks; starts them if they are not running."""
        return self.start()

    def start(self, overlap: Callable[[], None] | None = None) -> Environment:
        """Starts the ranks if they are not running, and calls `overlap` in this process before they are ready. Returns their
        software.
        """
        self._ensure_running(overlap=overlap)
        assert self._environment is not None
        return self._environment

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        """See Runner.measure. When the group is lost in a job of several candidates, each is run alone to find the culprits. The
        others are measured together again. Raises TimeIsUp after `effort.within_s`, and MachineError when a disk is full.
        """
        until = math.inf if effort.within_s is None else time.monotonic() + effort.within_s
        try:
            return self._measure(problem, candidates, replace(effort, within_s=None), overlap, until)
        except OSError as error:  # raised in this process, which starts ranks and compilers
            if why := full_disk(error):
                self.close()
                raise disk_is_full("where the tuner runs", why) from error
            raise

    def _measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None, until: float
    ) -> list[Measurement]:
        if not candidates:
            return []
        conditions = [self._conditions(problem, candidate) for candidate in candidates]
        if self.compilers and len(candidates) <= MOST_OF_TRIAL:
            for candidate in candidates:
                ahead = self.compilers.outcome(problem, candidate.config)
                if tells_of_full_disk(ahead.error):
                    self.pool.kill()
                    raise disk_is_full("where kernels are compiled", str(ahead.error))
                if ahead.lost:
                    others = [other for other in candidates if other != candidate]
                    measured = {result.candidate: result for result in self._measure(problem, others, effort, overlap, until)}
                    lost = Measurement(candidate, "compile_error", ahead.error, conditions=self._conditions(problem, candidate))
                    return [measured.get(one, lost) for one in candidates]
        self._ensure_running(until)
        self._sequence += 1
        job = Job(self._sequence, problem, tuple(candidates), effort, self._seed + self._sequence)
        silence_s = self.deadline_s + effort.seconds * len(candidates)
        try:
            # A soak that goes on is no hang, however slow it is.
            total_s = silence_s * ((1 + effort.soak) * len(candidates) + REFERENCES)
            reports = self.pool.run(job, silence_s, total_s, overlap, until)
        except GroupLost as loss:
            self.restarts += 1
            if len(candidates) == 1:
                return [Measurement(candidates[0], loss.status, str(loss), conditions=conditions[0])]
            return self._without_culprits(problem, candidates, effort, loss, until)
        readings = [report.yardstick for report in reports if report.yardstick is not None]
        yardsticks = [reading.us for reading in readings]
        if readings:
            rates = [round(reading.copy_gbps) for reading in readings]
            yardstick = {"yardstick_us": [round(us, 1) for us in yardsticks], "copy_gbps": rates}
            conditions = [condition | yardstick for condition in conditions]
        notices = self._notices(yardsticks, effort)
        ranks_s = max(report.seconds for report in reports) / len(candidates)
        conditions = [condition | self._code(problem, candidates[i]) for i, condition in enumerate(conditions)]
        measurements = [
            Measurement.merge(candidate, [report.accounts[i] for report in reports], conditions[i])
            for i, candidate in enumerate(candidates)
        ]
        return [replace(measurement, ranks_s=ranks_s, notices=notices) for measurement in measurements]

    def _without_culprits(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, loss: GroupLost, until: float
    ) -> list[Measurement]:
        alone = [self._measure(problem, [candidate], effort, None, until)[0] for candidate in candidates]
        innocent = [i for i, m in enumerate(alone) if m.verified]
        if len(innocent) == len(candidates):
            status = "hang" if loss.status == "hang" else "crash"
            return [replace(m, status=status, error=f"lost only when measured together: {loss}", samples=()) for m in alone]
        again = self._measure(problem, [candidates[i] for i in innocent], effort, None, until)
        return [again[innocent.index(i)] if i in innocent else m for i, m in enumerate(alone)]

    def expect(self, problem: Problem, configs: Sequence[Config], later: Iterable[Config] = ()) -> int:
        """See Runner.expect. Returns the first config that is compiled, or the first of all if none is."""
        if self.compilers is None:
            return 0
        self.compilers.expect(problem, configs)
        self.compilers.fill(problem, later)
        for place, config in enumerate(configs):
            if self.compilers.ready(problem, config):
                return place
        if len(configs) == self.foresight:
            self.foresight = max(self.foresight, min(self.foresight + 1, self.compilers.workers))
        return 0

    def close(self) -> None:
        if self.compilers:
            self.compilers.close()
        self.pool.close()

    def _ensure_running(self, until: float = math.inf, overlap: Callable[[], None] | None = None) -> None:
        if not self.pool.running:
            self._environment = self._start(until, overlap)
            self._news = self._neighbours()

    def _start(self, until: float, overlap: Callable[[], None] | None) -> Environment:
        """Starts the ranks, in several attempts: lost ranks may hold their devices a moment longer."""
        for attempt in range(1, STARTS + 1):
            try:
                return self.pool.start(until, overlap if attempt == 1 else None)
            except GroupLost as loss:
                last = loss
                self.restarts += 1
                if self._environment is None and loss.status == "hang":  # a hang takes minutes and would recur
                    break
                if attempt < STARTS:
                    time.sleep(attempt * PAUSE_S)
        again = "" if self._environment is None else " again"
        raise MachineError(f"the ranks do not start{again} ({last}): run `autotax doctor`, then the same command") from last

    def _notices(self, yardsticks: Sequence[float], effort: Effort) -> tuple[str, ...]:
        """Notices for the user about the machine during the job that has just ended."""
        news, self._news = self._news, ()
        if effort.soak:  # the job of the finalists
            news += self._neighbours()
        return tuple(dict.fromkeys((*news, *(self._watch.note(yardsticks) if yardsticks else ()))))

    def _neighbours(self) -> tuple[str, ...]:
        ours = {os.getpid(), *(rank.child.process.pid for rank in self.pool.ranks)}
        if self.hardware.backend == "cuda":
            return nvidia_notices(device_uuids(self.pool.world_size), ours)
        if self.hardware.backend == "rocm":
            return amd_notices(device_addresses(self.pool.world_size), ours)
        return ()

    def _code(self, problem: Problem, candidate: Candidate) -> dict[str, str]:
        """The digest of the candidate's machine code, where a compiler has compiled it."""
        code = self.compilers.code(problem, candidate.config) if self.compilers else None
        return {"machine_code": code} if code else {}

    def _conditions(self, problem: Problem, candidate: Candidate) -> dict[str, Any]:
        """The conditions of the measurement, as stored with it."""
        place = {"behind": registry.of(problem).behind} if candidate.conditions.in_place else {}
        return candidate.conditions.to_dict() | {"clock": "device" if self.hardware.on_gpu else "wall"} | place
