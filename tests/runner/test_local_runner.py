"""The live runner on CPU ranks: its measurements, and the faults that it survives."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.digests import kernel_digest
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources, machine_code
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.runner import Candidate, Effort, LiveRunner
from autotax.runner.local_runner import GroupLost
from autotax.runner.measurement import TimeIsUp
from autotax.runner.messages import CompilerAnswer
from autotax.runner.precompile import CompileAhead
from autotax.runner.processes import Child, ForkServer
from autotax.spaces import space_for
from tests.runner.small import CPU, GEMM, QUICK, measure

BSP = Candidate(Config("bsp"), ON_CPU)

RAISED = "ValueError: as the test wants it"
FATES = {
    "wrong_element": ("wrong_result", "relative error"),
    "wrong_shape": ("wrong_result", "rank 1: the result is of shape [47, 40], its reference [48, 40]"),
    "skips_tile": ("wrong_result", "relative error inf"),
    "loses_small": ("wrong_result", "input set 1"),
    "loses_nan": ("wrong_result", "relative error inf on input set 1"),
    "only_first_input": ("wrong_result", "input set 1"),
    "stale": ("wrong_result", "input set 1"),
    "raises": ("crash", RAISED),
    "exits": ("crash", "rank 1 exited with code 3"),
    "killed": ("crash", "rank 1 was killed by SIGKILL"),
    "stopped": ("hang", "rank 1 at 'candidate 0: verify 0'"),
    "sleeps": ("hang", "rank 1 at 'candidate 0: verify 0'"),
    "late": ("crash", f"rank 1 failed at 'candidate 0: rehearse': {RAISED}"),
    "spoils_inputs": ("wrong_result", "input set 0"),
    "kernel_hang": ("hang", "rank 1 waited for flag 0 of rank 0: needed 1, saw 0"),
    "no_memory": ("out_of_resources", "does not fit"),
    "does_not_compile": ("compile_error", "expected something else"),
}
FATE_LIKE = {"exits": "killed", "sleeps": "stopped", "late": "raises"}
"""Faults that look alike to the other ranks. Each costs a group of ranks."""
HASTE_S = 5.0
PATIENCE_S = 120.0
"""A busy machine does in this time what takes a second."""


@pytest.fixture(autouse=True)
def _no_haste(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a short deadline only for candidates that hang: on a busy machine correct candidates may be slow."""
    if "runner" in request.fixturenames:
        monkeypatch.setattr(request.getfixturevalue("runner"), "deadline_s", 2 * PATIENCE_S)


DECODE = pytest.param(FlashDecode(1, 4, 2, 16, 40, "fp32", 2), marks=pytest.mark.volume)


@pytest.mark.parametrize("problem", [GEMM, DECODE], ids=str)
def test_measures_every_variant_verified_and_interleaved(runner: LiveRunner, problem: AllGatherGemm) -> None:
    space = space_for(problem, CPU)
    candidates = [Candidate(space.default(variant), ON_CPU) for variant in space.variants]
    for measurement in runner.measure(problem, candidates, QUICK):
        assert (measurement.status, measurement.error) == ("ok", None)
        assert measurement.relative_error is not None and measurement.relative_error < 1e-5
        assert len(measurement.samples) == 2 and len(measurement.rounds) >= 3


def test_a_trial_has_the_machine_code_that_a_compiler_made(runner: LiveRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compilers(CompileAhead):
        def outcome(self, problem: Problem, config: Config) -> CompilerAnswer:
            kernels = (Resources("push_kernel", 0, code="0123"),) if config.variant == "push" else ()
            return CompilerAnswer(None, kernels=kernels)

        def ready(self, problem: Problem, config: Config) -> bool:
            return True

    monkeypatch.setattr(runner, "compilers", Compilers(CPU, 1))
    push, bsp = measure(runner, "push", "bsp")
    assert push.conditions["machine_code"] == machine_code([Resources("push_kernel", 9, code="0123")])
    assert "machine_code" not in bsp.conditions, "it has no kernel of its own"
    assert machine_code([Resources("push_kernel", 0, code="0123"), Resources("open_slot", 0)]) is None


@pytest.mark.sampled(by=lambda fault: {"fate": FATE_LIKE.get(fault, fault)})
@pytest.mark.parametrize("fault", FATES)
def test_a_bad_candidate_costs_one_trial_and_says_why(runner: LiveRunner, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status, cause = FATES[fault]
    started = time.monotonic()
    # A kernel gives up by itself. Within the shorter deadline a busy machine may not come as far as the fault.
    deadlines = (HASTE_S, PATIENCE_S) if status == "hang" and fault != "kernel_hang" else (runner.deadline_s,)
    for deadline_s in deadlines:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "deadline_s", deadline_s)
            (bad,) = measure(runner, fault)
        if cause in (bad.error or ""):
            break
    assert time.monotonic() - started < 2 * PATIENCE_S, "the deadline"
    assert (bad.status, bad.verified) == (status, False), bad.error
    assert cause in (bad.error or "") and not (bad.error or "").startswith("rank 0"), bad.error
    assert not bad.samples and bad.latency_us is None
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


def test_a_job_ends_when_its_time_is_up_and_the_ranks_start_again(runner: LiveRunner) -> None:
    measure(runner, "bsp")
    for within_s in (1.0, HASTE_S, PATIENCE_S):
        with pytest.raises(TimeIsUp) as ended:
            measure(runner, "sleeps", effort=replace(QUICK, within_s=within_s))
        if "verify 0" in str(ended.value):  # a busy machine does not come as far at once
            break
    assert "rank 1 at 'candidate 0: verify 0'" in str(ended.value)
    (after,) = measure(runner, "bsp", effort=replace(QUICK, within_s=PATIENCE_S))
    assert after.status == "ok", after.error


def test_a_rank_that_raises_is_not_waited_for_and_is_the_cause(runner: LiveRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(runner, "bsp")
    started = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr("autotax.runner.local_runner.GRACE_S", 1.5)
        (waited,) = measure(runner, "raises_early")
    assert time.monotonic() - started < 2 * PATIENCE_S, "the deadline"
    message, _, traceback = (waited.error or "").partition("\nTraceback (most recent call last):\n")
    assert waited.status == "crash"
    assert message.startswith(f"rank 1 failed at 'candidate 0: verify 0': verify 0: {RAISED} (faults.py:")
    assert 'raise ValueError("as the test wants it")' in traceback and "faults.py" in traceback
    restarts = runner.restarts
    (gave_up,) = measure(runner, "lacks_memory")
    assert (gave_up.status, gave_up.error) == ("out_of_resources", "verify 0: OutOfMemoryError: as the test wants it")
    assert runner.restarts == restarts, "the ranks agreed on it"


@pytest.mark.parametrize("fault", ["exits", "killed"])
def test_an_error_has_no_words_of_an_earlier_candidate(runner: LiveRunner, fault: str) -> None:
    (noisy,) = measure(runner, "noisy")
    restarts = runner.restarts
    (bad,) = measure(runner, fault)
    assert (noisy.status, bad.status, runner.restarts) == ("ok", "crash", restarts + 1), "the same ranks ran both"
    assert ": it printed nothing (at 'candidate 0: verify 0')" in (bad.error or ""), bad.error


def test_a_bad_candidate_among_good_ones_harms_nobody_else(runner: LiveRunner) -> None:
    statuses = [m.status for m in measure(runner, "bsp", "wrong_element", "raises", "bsp")]
    assert statuses == ["ok", "wrong_result", "crash", "ok"]


@pytest.mark.volume
def test_a_candidate_that_kills_the_group_is_singled_out(runner: LiveRunner) -> None:
    first, killer, last = measure(runner, "bsp", "exits", "bsp")
    assert (first.status, killer.status, last.status) == ("ok", "crash", "ok")
    assert len(first.rounds) == len(last.rounds), "the innocent are measured together again"


def test_a_hopeless_candidate_is_given_up_but_verified(runner: LiveRunner) -> None:
    (measurement,) = runner.measure(GEMM, [BSP], Effort(samples=50, give_up_us=0.001))
    assert measurement.status == "pruned" and measurement.verified
    assert len(measurement.rounds) == 3


def test_a_good_candidate_outlives_a_disturbed_sample(runner: LiveRunner) -> None:
    (measurement,) = runner.measure(GEMM, [Candidate(Config("hiccup"), ON_CPU)], Effort(samples=5, give_up_us=0.5e6))
    assert measurement.status == "ok" and max(measurement.rounds) > 0.5e6


def test_a_rank_that_comes_seconds_later_is_waited_for(runner: LiveRunner) -> None:
    (measurement,) = measure(runner, "arrives_late")
    assert (measurement.status, measurement.error) == ("ok", None)


def test_a_rank_that_dies_idle_is_not_blamed_on_the_next_candidate(runner: LiveRunner) -> None:
    measure(runner, "bsp")
    os.kill(runner.pool.ranks[1].child.process.pid, signal.SIGKILL)
    runner.pool.ranks[1].child.process.wait()
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


def test_an_interrupted_job_leaves_no_answer_to_the_next(runner: LiveRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    measure(runner, "bsp")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("autotax.runner.local_runner.wait", interrupted)
        measure(runner, "raises")
    (after,) = measure(runner, "bsp")
    assert after.status == "ok", after.error


def test_what_is_done_meanwhile_is_done_while_the_ranks_start() -> None:
    live = LiveRunner(CPU, 2)
    stages: list[str] = []
    try:
        started = live.start(lambda: stages.extend(rank.stage for rank in live.pool.ranks))
        assert started == live.environment and stages == ["starting", "starting"]
        live.start(stages.clear)
        assert stages, "they had started"
    finally:
        live.close()


@pytest.mark.volume
def test_files_in_the_folder_of_the_user_do_not_get_in_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('not the random you think of')\n")
    monkeypatch.chdir(tmp_path)
    live = LiveRunner(CPU, 1)
    try:
        assert live.environment.kernels == kernel_digest()
    finally:
        live.close()


def test_ranks_that_differ_refuse_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A site hook gives the first rank another kernel digest, as if its code differed. Without a fork server the ranks are new
    processes, which run site hooks.
    """

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ECONNREFUSED, "no server")

    monkeypatch.setattr(ForkServer, "_connect", refuse)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('AUTOTAX_TEST_ODD') and 'autotax.runner.rank_worker' in ' '.join(sys.orig_argv):\n"
        "    import autotax.digests as h\n"
        "    try:\n"
        "        os.mkdir(os.environ['AUTOTAX_TEST_ODD'])\n"
        "    except FileExistsError:\n"
        "        pass\n"
        "    else:\n"
        "        h.kernel_digest = lambda: 'something else'\n"
    )
    monkeypatch.setenv("AUTOTAX_TEST_ODD", str(tmp_path / "odd"))
    monkeypatch.syspath_prepend(str(tmp_path))
    live = LiveRunner(CPU, 2)
    try:
        with pytest.raises(UsageError) as refusal:
            live._ensure_running()
    finally:
        live.close()
    said = str(refusal.value)
    assert "\n" not in said and kernel_digest() in said and "something else" in said


def test_more_ranks_than_gpus_are_refused() -> None:
    two = Hardware("cuda", "some GPU", "cuda:90", 2, 80, 132, 232448, 1 << 20, "peer access 2/2 pairs")
    with pytest.raises(UsageError, match="world size is 4; this machine has 2 GPUs: give --world-size 2 or less"):
        LiveRunner(two, 4)


def test_closing_leaves_no_process_and_no_memory() -> None:
    before = set(Path("/dev/shm").iterdir())
    live = LiveRunner(CPU, 2)
    measure(live, "bsp")
    pids = [rank.child.process.pid for rank in live.pool.ranks]
    live.close()
    live.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    new = {path.name for path in set(Path("/dev/shm").iterdir()) - before}  # of other tests as well
    assert not [name for name in new if any(str(pid) in name for pid in (os.getpid(), *pids))]


def test_a_message_that_stops_in_the_middle_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotax.runner.processes.MESSAGE_S", 1)
    code = "import os, sys, time; os.write(int(sys.argv[1]), (1000).to_bytes(4, 'big') + b'half'); time.sleep(1000)"
    monkeypatch.setattr("autotax.runner.processes.python_of", lambda _, pipe: [sys.executable, "-c", code, pipe])
    child = Child.start("anything", (), {})
    try:
        started = time.monotonic()
        with pytest.raises(OSError):
            child.pipe.recv()
        assert time.monotonic() - started < 500
    finally:
        child.kill()


@pytest.mark.volume
def test_ranks_that_do_not_start_again_at_once_are_given_another_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotax.runner.local_runner.PAUSE_S", 0.01)
    live = LiveRunner(CPU, 2)
    measure(live, "bsp")
    start, refusals = live.pool.start, [GroupLost("crash", "no memory yet"), GroupLost("crash", "no memory yet")]

    def reluctant(*until: float) -> object:
        if refusals:
            raise refusals.pop()
        return start(*until)

    monkeypatch.setattr(live.pool, "start", reluctant)
    live.pool.kill()
    (after,) = measure(live, "bsp")
    assert after.status == "ok", after.error
    refusals += [GroupLost("crash", "no memory for ever")] * 3
    live.pool.kill()
    with pytest.raises(MachineError, match="do not start again"):
        measure(live, "bsp")
    live.close()


def test_what_is_done_meanwhile_is_done_while_the_ranks_work(runner: LiveRunner) -> None:
    measure(runner, "bsp")
    at_work: list[bool] = []

    def look() -> None:
        at_work.extend(rank.child.pipe.poll(PATIENCE_S) for rank in runner.pool.ranks)  # their first stages

    (measurement,) = runner.measure(GEMM, [BSP], QUICK, look)
    assert measurement.status == "ok" and at_work == [True, True]
    assert measurement.ranks_s > measurement.device_s > 0.0
