"""A rank at work: carries out jobs in lockstep with its peers.

Stages are pieces of work between two agreements. A candidate goes on only if a stage went well on all ranks, so that no rank
waits in a kernel for a peer that has given up.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from autotax.core.errors import LONGEST, described
from autotax.core.settings import TRIAL_STATUSES
from autotax.digests import kernel_digest
from autotax.hardware import Hardware, detect
from autotax.heap import HeapError, World, open_heap
from autotax.heap.collectives import reduce_scatter
from autotax.heap.triton_interpreter import CPU_POLL_LIMIT, patch_interpreter
from autotax.heap.world import meet
from autotax.kernels.alignment import Aligner, delay
from autotax.kernels.context import Context
from autotax.kernels.offline import fix_cache_keys
from autotax.operators.registry import fingerprints, load, variant_digest
from autotax.runner.benchmark import SAMPLE_US, VERIFIED, Bench, InputCache, KernelTimeout, Outcome, Soak, Trial, WrongResult
from autotax.runner.measurement import RankReport
from autotax.runner.messages import Fatal, Hello, Job, Raised, RankSetup, Report, Stage
from autotax.runner.processes import die_with_parent, full_disk
from autotax.runner.sampling import Sampler, Yardstick
from autotax.runner.yardsticks import Reading
from autotax.software import environment

LOCAL = ("inputs", "compile")
"""Stages in which no rank waits for another."""


class Fault(Exception):
    """A device error after which this process cannot go on."""


class Stages:
    """Carries out stages in step with the peers; `tell` receives each stage before it begins, and each error raised."""

    def __init__(self, world: World, tell: Callable[[Stage | Raised], None]) -> None:
        self.world = world
        self._tell = tell

    def tell(self, stage: str) -> None:
        """Reports the current stage of this rank."""
        self._tell(Stage(stage))

    def run(self, stage: str, action: Callable[[], Any], label: str | None = None) -> Outcome:
        """Does one stage and agrees with the peers on how it went. Collective. Raises Fault, and errors about a full disk."""
        self.tell(label or stage)
        status, message, figure = "ok", None, None
        started = time.perf_counter()
        try:
            figure = action()
        except Exception as error:
            if full_disk(error):
                raise
            status = _classify(error, stage)
            of_code = status in ("crash", "compile_error")
            message = f"{stage}: " + (described(error) if of_code else f"{type(error).__name__}: {str(error)[-LONGEST:]}")
            if status in ("crash", "out_of_resources") and stage not in LOCAL:  # after other errors no peer waits
                self._tell(Raised(status, message))
            if status == "crash" and self.world.device.type == "cuda" and not _device_answers():
                raise Fault(message) from error
        seconds = time.perf_counter() - started
        value = figure if isinstance(figure, float) else math.nan
        statuses, values = zip(*self.world.gather((status, value), tuple[str, float]), strict=True)
        gravest = max(statuses, key=TRIAL_STATUSES.index)
        if gravest == "out_of_resources":
            free_device_memory(self.world)
        # Reports errors of the ranks with the worst status only; the others merely timed out.
        return Outcome(gravest, message if status == gravest else None, seconds, values)


def free_device_memory(world: World) -> None:
    """Gives unused memory from torch back to the device, because collectives, graphs and libraries allocate there."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _classify(error: Exception, stage: str) -> str:
    """The status for an exception of a stage."""
    if isinstance(error, WrongResult):
        return "wrong_result"
    if isinstance(error, KernelTimeout):
        return "hang"
    if isinstance(error, HeapError | torch.OutOfMemoryError) or type(error).__name__ == "OutOfResources":
        return "out_of_resources"
    return "compile_error" if stage == "compile" else "crash"


def _device_answers() -> bool:
    """Whether the device can still be used. After an illegal access it cannot be used in this process."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


HEAP_STEP = 2 << 20
"""Bytes of a page of device memory."""


def open_context(world: World, hardware: Hardware, heap_bytes: int, polls: int | None = None) -> Context:
    """The services of this rank, on a new heap that the caller closes. Collective.

    Args:
        world: The ranks.
        hardware: The machine that they run on.
        heap_bytes: The size of the heap on each rank. Half of the free memory is taken where that is less.
        polls: How often a wait polls before it gives up; by default for about four seconds, longer on CPU ranks.
    """
    if hardware.on_gpu:  # a server that has winners proven may hold most of the memory
        free, _ = torch.cuda.mem_get_info(world.device)
        heap_bytes = min(world.gather(min(heap_bytes, free // 2 & -HEAP_STEP), int))
    return Context(world, open_heap(world, heap_bytes), hardware, polls or (None if hardware.on_gpu else CPU_POLL_LIMIT))


class OutOfStep(RuntimeError):
    """The ranks are not doing the same step, so the group must end."""


class Session:
    """One rank of a group, from joining to leaving."""

    def __init__(self, world: World, hardware: Hardware, heap_bytes: int, tell: Callable[[Stage | Raised], None]) -> None:
        if hardware.on_gpu:
            fix_cache_keys()
        else:
            patch_interpreter()
        self.world = world
        self.hardware = hardware
        self.context = open_context(world, hardware, heap_bytes)
        self.heap = self.context.heap
        self.stages = Stages(world, tell)
        self.yardstick = Yardstick(world)
        self._inputs: InputCache | None = None

    def close(self) -> None:
        self._inputs = None
        self.heap.close()

    def run(self, job: Job) -> Report:
        """One account for each candidate of the job. Collective. Raises OutOfStep, Fault."""
        self._agree(job)
        self.heap.reset()
        drawn = self.stages.run("inputs", partial(self._draw, job))
        if drawn.status != "ok":
            self._inputs = None
            free_device_memory(self.world)
            return Report(tuple(RankReport(drawn.status, drawn.error) for _ in job.candidates))
        inputs = self._inputs
        assert inputs is not None
        aligner = Aligner(self.context)
        ready = self.stages.run("compile", partial(self._compile_common, aligner, job))
        if ready.status != "ok":
            raise OutOfStep(f"the ranks cannot be aligned: {ready.error or 'another rank says why'}")
        trials = self.trials(job, inputs)
        for index, trial in enumerate(trials):
            self._prepare(index, trial)
        yardstick = self._sample(trials, aligner, job)
        for index, trial in enumerate(trials):
            if trial.alive:
                trial.take(self._stage(index, "recheck", trial.bench.recheck))
            if trial.alive and not trial.given_up and job.effort.soak:
                self._soak(index, trial, job)
        if any(trial.status in ("wrong_result", "hang", "crash") for trial in trials):
            self._inputs = None  # the failed candidate may have overwritten the inputs
        return Report(tuple(trial.report() for trial in trials), yardstick)

    def trials(self, job: Job, inputs: InputCache) -> list[Trial]:
        """A trial for each candidate of a job, in order."""
        return [Trial(Bench(job.problem, candidate, self.context, inputs)) for candidate in job.candidates]

    def _agree(self, job: Job) -> None:
        steps = self.world.gather(_step(job), dict[str, str])
        differing = [
            f"{name} is {', '.join(f'{step[name]} on rank {rank}' for rank, step in enumerate(steps))}"
            for name in steps[0]
            if len({step[name] for step in steps}) > 1
        ]
        if differing:
            raise OutOfStep(f"the ranks are out of step: {'; '.join(differing)}")

    def _draw(self, job: Job) -> None:
        if self._inputs is None or self._inputs.problem != job.problem:
            self._inputs = None  # frees the memory of the previous problem before the new one allocates
            summed = partial(reduce_scatter, group=self.world.data)
            self._inputs = InputCache(job.problem, self.world.rank, self.world.device, self.hardware, summed)
        self._inputs.draw(job.candidates, job.effort, self.stages.tell)

    def _compile_common(self, aligner: Aligner, job: Job) -> None:
        self.heap.check()
        with self.context.rehearsal():
            aligner()
            if job.effort.soak or any(candidate.conditions.skew_us for candidate in job.candidates):
                delay(self.context, 1.0)

    def _prepare(self, index: int, trial: Trial) -> None:
        """Runs all stages before the first sample, as long as they succeed on all ranks."""
        bench = trial.bench
        for stage, action in (("allocate", bench.allocate), ("check", bench.context.heap.check), ("compile", bench.compile)):
            trial.take(self._stage(index, stage, action), on_device=False)
            if not trial.alive:
                return
        # Runs two different input sets through the same workspaces, twice. The ranks agree after each call: a rank with a wrong
        # output must not leave the others waiting in the next call.
        for seed in VERIFIED * 2:
            trial.take(self._stage(index, f"verify {seed}", partial(bench.verify, seed)))
            if not trial.alive:
                return
        self.stages.tell(f"candidate {index}: rehearse")
        started = time.perf_counter()
        estimate_us = bench.rehearse()  # a rank that raises here leaves its peers in the middle of calls: the group is lost
        trial.device_s += time.perf_counter() - started
        trial.estimate_us = max(self.world.gather(estimate_us, float))
        calls = bench.least_calls(trial.estimate_us)
        trial.take(self._stage(index, "capture", partial(bench.capture, calls, trial.estimate_us)))
        if trial.alive and bench.lengthens_samples:  # the first estimate is from eager calls
            replayed = self._stage(index, "replay", bench.replay)
            trial.take(replayed)
            if trial.alive:
                call_us = max(replayed.values)
                calls = max(bench.least_calls(call_us), math.ceil(SAMPLE_US / call_us))
                trial.take(self._stage(index, "capture", partial(bench.capture, calls, call_us)))

    def _sample(self, trials: Sequence[Trial], aligner: Aligner, job: Job) -> Reading | None:
        """Times the trials that are still alive. Returns the reading of this rank's yardstick, or None if no trial is alive."""
        alive = [trial for trial in trials if trial.alive]
        if not alive:
            return None
        self.stages.tell("sampling")
        before = self.yardstick.measure()
        sampler = Sampler(self.context, aligner, job.seed, partial(self.stages.tell, "sampling"))
        sampler.sample(alive, job.effort)
        if failure := aligner.failure():
            raise OutOfStep(f"the ranks could not be aligned: {failure}")
        return before.best(self.yardstick.measure())

    def _soak(self, index: int, trial: Trial, job: Job) -> None:
        soak = Soak(trial.bench, job.effort.soak, job.seed, trial.estimate_us)
        trial.take(self._stage(index, "soak", soak.prepare))
        while trial.alive and soak.left:
            trial.take(self._stage(index, "soak", soak.go_on, f"after {soak.done} of {soak.replays}"))
        trial.soaked = soak.done if trial.alive else 0

    def _stage(self, index: int, stage: str, action: Callable[[], float | None], progress: str = "") -> Outcome:
        return self.stages.run(stage, action, f"candidate {index}: {stage} {progress}".rstrip())


def _step(job: Job) -> dict[str, str]:
    """The facts that must be equal on all ranks before a job begins."""
    step = {
        "number of the job": job.sequence,
        "problem": job.problem.key,
        "configs": tuple(candidate.config.digest for candidate in job.candidates),
        "conditions": tuple(candidate.conditions.key for candidate in job.candidates),
        "effort": job.effort,
        "kernel digest": kernel_digest(),
        "sources": tuple(variant_digest(job.problem.op, candidate.config.variant) for candidate in job.candidates),
        "seed": job.seed,
    }
    return {name: str(value) for name, value in step.items()}


# A rank process: `python -m autotax.runner.rank_worker FD`, or a fork, serves jobs from the pipe FD until it closes.

def serve(pipe: Connection) -> None:
    # The pool has set the environment variable that tells Triton whether to interpret kernels.
    fix_cache_keys()
    try:
        setup = pipe.recv()
    except EOFError:
        return
    assert isinstance(setup, RankSetup)
    for name in setup.modules:
        load(name)
    hardware = detect(setup.backend)
    world = World.join(meet(setup.meeting), setup.rank, setup.world_size, setup.backend)
    session = Session(world, hardware, setup.heap_bytes, pipe.send)
    pipe.send(Hello(environment(setup.backend), fingerprints()))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        assert isinstance(job, Job)
        started = time.perf_counter()
        report = session.run(job)
        pipe.send(replace(report, seconds=time.perf_counter() - started))


def main() -> None:
    die_with_parent("autotax-rank")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except Exception as error:
        pipe.send(Fatal(full_disk(error) or f"{type(error).__name__}: {error}"))
        with suppress(OSError):  # the disk may be full
            traceback.print_exc()
        os._exit(1)  # after an error of the device or the group, an orderly shutdown may hang
    os._exit(0)


if __name__ == "__main__":
    main()
