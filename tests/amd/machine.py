"""GPUs that run listings: workgroups of all ranks advance in turn, a few instructions of one wave at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tests.amd.access import memory_access
from tests.amd.listing import Listing
from tests.amd.memory import Array, Die, Memory
from tests.amd.scalar import scalar
from tests.amd.vector import vector
from tests.amd.wave import LANES, MASK32, Action, Group, Wave

T = TypeVar("T")
DIES = 2
"""Dies of each GPU. Workgroups go to the dies in turn."""
RESIDENT = 8
"""The most workgroups that run on a GPU at a time."""
LONGEST = 120
"""The most instructions of a wave in one turn."""
SPELL = 600
"""The most turns for which one rank, and one wave of each workgroup, are preferred to the others."""
LDS = 64 << 10


class Program:
    """A listing, made ready to run."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.actions: list[Action] = []
        for instruction in listing.code:
            name = instruction.name
            if name.startswith("s_") and not name.startswith("s_load"):
                self.actions.append(scalar(instruction, listing.labels))
            elif name.startswith("v_"):
                self.actions.append(vector(instruction))
            else:
                self.actions.append(memory_access(instruction))

    def waves(self, group: Group, workgroup: int, arguments: Array) -> list[Wave]:
        """The waves of a workgroup before their first instruction, by the calling convention of kernels."""
        settings = self.listing.settings
        address = int(arguments.ctypes.data)
        assert not any(settings.get(f"user_sgpr_{name}") for name in ("dispatch_ptr", "queue_ptr", "dispatch_id"))
        preloaded = settings.get("user_sgpr_kernarg_preload_length", 0)
        user = [address & MASK32, address >> 32, *arguments.view(np.uint32)[:preloaded].tolist()]
        count = settings["user_sgpr_count"]
        user = (user + [0] * count)[:count]
        waves = []
        for number in range(self.listing.waves):
            wave = Wave(group)
            wave.s[:count] = user
            ids = [workgroup if axis == "x" else 0 for axis in "xyz" if settings.get(f"system_sgpr_workgroup_id_{axis}")]
            wave.s[count : count + len(ids)] = ids
            wave.v[0] = np.arange(number * LANES, (number + 1) * LANES)
            wave.scratch = np.zeros((LANES, settings.get("private_segment_fixed_size", 0)), np.uint8)
            waves.append(wave)
        return waves


@dataclass(eq=False)
class Job:
    """A launch on one rank."""

    rank: int
    program: Program
    arguments: Array
    todo: list[int]
    shared: int
    live: list[list[Wave]] = field(default_factory=list)
    error: BaseException | None = None
    done: bool = False


class Machine:
    """The GPUs of all ranks. Ranks are threads; the machine runs while all of them wait for it or for each other."""

    def __init__(self, ranks: int, memory: Memory, seed: int) -> None:
        self.memory = memory
        self.random = random.Random(seed)
        self.gpus: list[list[Die]] = [[memory.die() for _ in range(DIES)] for _ in range(ranks)]
        self.executed = 0
        self.turn = threading.Condition()
        self.busy = ranks
        self.jobs: list[Job] = []
        self.meeting: dict[int, object] = {}
        self.ranks = ranks
        self.ended = 0
        self.failed: BaseException | None = None
        self.spell, self.ahead = 0, (0, 0, 0)

    # For the threads of ranks

    def launch(self, rank: int, program: Program, grid: int, arguments: Array, shared: int) -> None:
        """Runs a kernel; returns when it is done."""
        job = Job(rank, program, arguments, list(range(grid)), shared)
        with self.turn:
            self.jobs.append(job)
            self.jobs.sort(key=lambda entry: entry.rank)
            self.busy -= 1
            self.turn.notify_all()
            self.turn.wait_for(lambda: job.done or self.failed)
            if self.failed:
                raise RuntimeError("the machine stopped") from self.failed
        if job.error:
            raise job.error

    def exchange(self, rank: int, value: object) -> list[object]:
        """Waits until every rank has given a value, then returns all values by rank."""
        with self.turn:
            met = self.meeting
            met[rank] = value
            if len(met) == self.ranks:
                self.meeting = {}
                self.busy += self.ranks - 1
            else:
                self.busy -= 1
                self.turn.notify_all()
                self.turn.wait_for(lambda: len(met) == self.ranks or self.failed)
            self.turn.notify_all()
            if len(met) < self.ranks:
                raise RuntimeError("the machine stopped") from self.failed
            return [met[index] for index in range(self.ranks)]

    def leave(self, error: BaseException | None = None) -> None:
        """A rank has ended."""
        with self.turn:
            self.busy -= 1
            self.ended += 1
            self.failed = self.failed or error
            self.turn.notify_all()

    def check(self) -> None:
        """Raises the error of a rank that failed."""
        if self.failed:
            raise self.failed

    # For the thread that runs the GPUs

    def run(self) -> None:
        """Runs the GPUs until all ranks have ended or one has failed."""
        with np.errstate(all="ignore"):
            while True:
                with self.turn:
                    self.turn.wait_for(lambda: self.busy == 0 or self.failed)
                    if self.failed or self.ended == self.ranks:
                        return
                    if not self.jobs:
                        self.failed = RuntimeError("all ranks wait for each other")
                        self.turn.notify_all()
                        return
                    jobs = list(self.jobs)
                for _ in self.until_one_is_done(jobs):
                    pass

    def until_one_is_done(self, jobs: list[Job]) -> Iterator[None]:
        while not any(job.done for job in jobs):
            if not self.spell:
                self.spell = self.random.randrange(1, SPELL)
                self.ahead = self.random.randrange(self.ranks), self.random.randrange(RESIDENT), self.random.randrange(16)
            self.spell -= 1
            job = self.one_of(sorted(jobs, key=lambda entry: entry.rank != self.ahead[0]), 0)
            try:
                self.advance(job)
            except BaseException as error:
                job.error, job.done = error, True
            yield
        with self.turn:
            for job in jobs:
                if job.done:
                    self.jobs.remove(job)
                    self.busy += 1
            self.turn.notify_all()

    def advance(self, job: Job) -> None:
        dies = self.gpus[job.rank]
        while job.todo and len(job.live) < RESIDENT:
            number = job.todo.pop(0)
            if not number:
                for die in dies:
                    self.memory.drain(die)
            group = Group(self.memory, dies[number % DIES], np.full(max(job.shared, 4), 0xFF, np.uint8))
            job.live.append(job.program.waves(group, number, job.arguments))
        waves = self.one_of(job.live, self.ahead[1])
        wave = self.one_of([wave for wave in waves if not (wave.ended or wave.at_barrier)], self.ahead[2])
        self.memory.passes(wave.group.die)
        if wave.issued and self.random.random() < 0.2:
            wave.complete(len(wave.issued) - 1)
        # Most turns are short, so that any two instructions of two waves may stand beside each other.
        count = self.random.randrange(1, LONGEST) if self.random.random() < 0.5 else self.random.randrange(1, 6)
        self.step(wave, job.program, count)
        if wave.ended:
            wave.take_stores()  # only the end of the kernel waits for write-backs that are still running
        if all(member.ended or member.at_barrier for member in waves):
            for member in waves:
                member.at_barrier = False
            if all(member.ended for member in waves):
                job.live.remove(waves)
        if not job.todo and not job.live:
            for die in dies:
                self.memory.drain(die)
            job.done = True

    def one_of(self, several: list[T], ahead: int) -> T:
        """Picks one of several: mostly the preferred one."""
        return several[ahead % len(several)] if self.random.random() < 0.9 else self.random.choice(several)

    def step(self, wave: Wave, program: Program, count: int) -> None:
        actions, code = program.actions, program.listing.code
        for _ in range(count):
            at = wave.pc
            wave.pc = at + 1
            try:
                actions[at](wave)
            except Exception as error:
                error.add_note(f"at {code[at].text}")
                raise
            self.executed += 1
            if wave.ended or wave.at_barrier:
                break
