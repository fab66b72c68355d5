"""A rank at work: carries out jobs in lockstep with its peers.

After every stage the ranks tell each other how it went, and a candidate goes on only if it went well everywhere. So no rank
waits in a kernel for a peer that has given up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from autotax.hardware import Hardware, kernel_digest
from autotax.heap import HeapError, World, open_heap
from autotax.kernels.align import Aligner
from autotax.kernels.context import Context
from autotax.kernels.keys import fix_cache_keys
from autotax.problem import Problem
from autotax.runner.bench import Bench, KernelTimeout, WrongResult
from autotax.runner.inputs import InputCache
from autotax.runner.measurement import STATUSES, Candidate, Effort, RankReport
from autotax.runner.protocol import Job

WARM_UP_SAMPLES = 2
FIRST_SAMPLES = 3
"""Samples after which a hopeless candidate is given up."""
LONGEST_ERROR = 600


class OutOfStep(RuntimeError):
    """The ranks are not doing the same thing; the group is of no use any more."""


class Fault(Exception):
    """A device error after which this process cannot go on."""


def _classify(error: Exception, stage: str) -> str:
    """The status that an exception of a stage stands for."""
    if isinstance(error, WrongResult):
        return "wrong_result"
    if isinstance(error, KernelTimeout):
        return "hang"
    if isinstance(error, HeapError | torch.OutOfMemoryError) or type(error).__name__ == "OutOfResources":
        return "out_of_resources"
    return "compile_error" if stage == "compile" else "crash"


class Session:
    """One rank of a group, from joining to leaving."""

    def __init__(self, world: World, hardware: Hardware, heap_bytes: int, tell: Callable[[str], None]) -> None:
        if hardware.on_gpu:
            fix_cache_keys()
        self.world = world
        self.hardware = hardware
        self.heap = open_heap(world, heap_bytes)
        self.context = Context(world, self.heap, hardware)
        self.tell = tell
        self._inputs: InputCache | None = None

    def close(self) -> None:
        self._inputs = None
        self.heap.close()

    def run(self, job: Job) -> list[RankReport]:
        """One account for each candidate of the job. Collective. Raises OutOfStep, Fault."""
        self._agree(job)
        self.heap.reset()
        inputs = self._inputs_of(job.problem)
        aligner = Aligner(self.context)
        self._stage(0, "compile", lambda: self._compile_aligner(aligner))
        trials = [_Trial(Bench(job.problem, candidate, self.context, inputs), candidate) for candidate in job.candidates]
        for index, trial in enumerate(trials):
            self._prepare(index, trial)
        self._sample([trial for trial in trials if trial.alive], aligner, job.effort)
        if failure := aligner.failure():
            raise OutOfStep(f"the ranks could not be aligned: {failure}")
        for index, trial in enumerate(trials):
            if trial.alive:
                trial.outcome(self._stage(index, "recheck", trial.bench.recheck))
        if any(trial.status in ("wrong_result", "hang", "crash") for trial in trials):
            self._inputs = None  # what went wrong may have written over them
        return [trial.report() for trial in trials]

    def _agree(self, job: Job) -> None:
        step = (job.sequence, job.problem.key, tuple(c.config.digest for c in job.candidates), kernel_digest())
        steps = self.world.gather(step)
        if any(other != step for other in steps):
            raise OutOfStep(f"the ranks are out of step: {'; '.join(f'rank {r}: {s}' for r, s in enumerate(steps))}")

    def _inputs_of(self, problem: Problem) -> InputCache:
        if self._inputs is None or self._inputs.problem != problem:
            self._inputs = None  # the former problem's memory is free before the new one's is taken
            self._inputs = InputCache(problem, self.world.rank, self.world.device, self.hardware)
        return self._inputs

    def _compile_aligner(self, aligner: Aligner) -> None:
        self.heap.check()
        with self.context.rehearsal():
            aligner()

    def _prepare(self, index: int, trial: _Trial) -> None:
        """Everything before the first sample, stage after stage, as long as it goes well on all ranks."""
        bench = trial.bench
        stages: list[tuple[str, Callable[[], None]]] = [
            ("allocate", bench.allocate),
            ("check", self.heap.check),
            ("compile", bench.compile),
            # Two different input sets through the same workspaces, twice; agreed on after each, since a rank that found
            # its output wrong must not leave the others waiting in the next call.
            *((f"verify {seed}", partial(bench.verify, seed)) for seed in (0, 1, 0, 1)),
        ]
        for stage, action in stages:
            trial.outcome(self._stage(index, stage, action))
            if not trial.alive:
                return
        estimates = self.world.gather(bench.rehearse_timing())
        trial.estimate_us = max(estimates)
        trial.outcome(self._stage(index, "capture", lambda: bench.capture(trial.estimate_us)))

    def _stage(self, index: int, stage: str, action: Callable[[], None]) -> tuple[str, str | None]:
        """Does one stage and agrees with the peers on how it went: the gravest status, with this rank's own cause."""
        self.tell(f"candidate {index}: {stage}")
        status, error = "ok", None
        try:
            action()
        except Exception as problem:
            status = _classify(problem, stage)
            error = f"{stage}: {type(problem).__name__}: {problem}"[-LONGEST_ERROR:]
            if status == "crash" and self.world.device.type == "cuda" and not _device_answers():
                raise Fault(error) from problem
        gravest = max(self.world.gather(status), key=STATUSES.index)
        return gravest, error

    def _sample(self, trials: list[_Trial], aligner: Aligner, effort: Effort) -> None:
        """Takes samples of all candidates in turn, so that whatever disturbs the machine disturbs them alike."""
        if not trials:
            return
        self.tell("sampling")
        self._take(trials, aligner, WARM_UP_SAMPLES)
        for trial in trials:
            trial.samples.clear()
        self._take(trials, aligner, FIRST_SAMPLES)
        # The median: one disturbed sample must not end a good candidate.
        typical: list[list[float]] = self.world.gather([statistics.median(trial.samples) for trial in trials])
        first_us = [max(ranks) for ranks in zip(*typical, strict=True)]
        if effort.give_up_us is not None:
            for trial, us in zip(trials, first_us, strict=True):
                trial.given_up = us > effort.give_up_us
        going_on = [trial for trial in trials if not trial.given_up]
        round_s = sum(us * len(trial.bench.calls) for trial, us in zip(trials, first_us, strict=True)) / 1e6
        rounds = min(effort.samples - FIRST_SAMPLES, max(0, int(effort.seconds * len(trials) / max(round_s, 1e-9))))
        if going_on and rounds > 0:
            self._take(going_on, aligner, rounds)

    def _take(self, trials: list[_Trial], aligner: Aligner, rounds: int) -> None:
        timers = [(trial, self._timed(trial, aligner)) for r in range(rounds) for trial in _rotated(trials, r)]
        self.world.synchronize()
        for trial, elapsed_us in timers:
            trial.samples.append(elapsed_us() / len(trial.bench.calls))

    def _timed(self, trial: _Trial, aligner: Aligner) -> Callable[[], float]:
        """Runs (or enqueues) one sample; the result, asked for after synchronizing, is its microseconds."""
        if self.world.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            aligner()
            start.record()
            trial.bench.run()
            end.record()
            return lambda: start.elapsed_time(end) * 1e3
        self.world.barrier()
        started = time.perf_counter()
        trial.bench.run()
        elapsed = (time.perf_counter() - started) * 1e6
        return lambda: elapsed


class _Trial:
    """The fate of one candidate on this rank."""

    def __init__(self, bench: Bench, candidate: Candidate) -> None:
        self.bench = bench
        self.candidate = candidate
        self.status = "ok"
        self.error: str | None = None
        self.estimate_us = 0.0
        self.samples: list[float] = []
        self.given_up = False

    @property
    def alive(self) -> bool:
        return self.status == "ok"

    def outcome(self, told: tuple[str, str | None]) -> None:
        self.status, self.error = told

    def report(self) -> RankReport:
        status = "pruned" if self.alive and self.given_up else self.status
        samples = tuple(self.samples) if self.alive else ()
        checked = self.bench.relative_error if self.status in ("ok", "wrong_result") else None
        return RankReport(status, self.error, samples, self.bench.compile_s, checked)


def _rotated(trials: list[_Trial], by: int) -> Iterator[_Trial]:
    return (trials[(i + by) % len(trials)] for i in range(len(trials)))


def _device_answers() -> bool:
    """Whether the device can still be used: after an illegal access it cannot, in this process."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True

