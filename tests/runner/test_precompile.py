"""Compilation in advance for a GPU of another machine: its cache entries, and its reaction to bad configs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators.problems import AllGatherGemm
from autotax.runner.local_runner import FORESIGHT, LiveRunner
from autotax.runner.precompile import CompileAhead
from autotax.spaces import space_for

H200 = Hardware("cuda", "NVIDIA H200", "cuda:90", 4, 140, 132, 232448, 60 << 20, "peer access 12/12 pairs")
GEMM = AllGatherGemm(256, 256, 256, "bf16", "m", 4)
DEADLINE_S = 20.0
"""Deadline in seconds of a config that never compiles."""
PATIENCE_S = 120.0
"""Deadline in seconds of other configs, which may be slow on a busy machine."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def ahead(cache: Path, request: pytest.FixtureRequest) -> Iterator[CompileAhead]:  # noqa: ARG001 - compilers inherit its environment
    deadline_s = getattr(request, "param", PATIENCE_S)
    compilers = CompileAhead(H200, 1, modules=("tests.runner.bad_to_compile",), deadline_s=deadline_s)
    yield compilers
    compilers.close()
    compilers.close()


def kernels_in(cache: Path) -> set[str]:
    return {path.stem for path in cache.rglob("*.cubin")}


def test_what_is_expected_is_in_the_cache_when_it_is_ready(ahead: CompileAhead, cache: Path) -> None:
    config = space_for(GEMM, H200).default("push")
    ahead.expect(GEMM, [config])
    assert not ahead.ready(GEMM, config), "nobody waits for a compiler"
    assert ahead.outcome(GEMM, config).error is None
    assert ahead.ready(GEMM, config)
    assert kernels_in(cache) == {"push_kernel"}
    before = sorted(cache.iterdir())
    assert ahead.outcome(GEMM, config).error is None
    assert sorted(cache.iterdir()) == before, "nothing is compiled twice"


@pytest.mark.volume
def test_what_comes_later_is_given_to_idle_compilers_only(ahead: CompileAhead, cache: Path) -> None:
    space = space_for(GEMM, H200)
    first, second = space.default("push"), space.default("pull")
    ahead.fill(GEMM, [first, second])  # one compiler
    ahead.fill(GEMM, [second])
    assert ahead.outcome(GEMM, first).error is None
    assert kernels_in(cache) == {"push_kernel"} and not ahead.ready(GEMM, second), "nothing waits in line behind a compiler"
    ahead.fill(GEMM, [first, second])
    assert ahead.outcome(GEMM, second).error is None


class Slow(CompileAhead):
    """Many compilers, none of which has answered yet."""

    done: tuple[Config, ...] = ()

    def pump(self, timeout: float = 0.0) -> None:
        pass

    def ready(self, problem: Problem, config: Config) -> bool:
        return config in self.done


def test_more_is_asked_for_in_advance_each_time_ranks_have_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    runner = LiveRunner(H200, 4)
    runner.compilers = compilers = Slow(H200, 10)
    configs = list(space_for(GEMM, H200).seeds())
    assert runner.foresight == FORESIGHT == 8
    assert runner.expect(GEMM, configs[:3]) == 0 and runner.foresight == 8, "there were no more"
    compilers.done = (configs[5],)
    assert runner.expect(GEMM, configs[:8]) == 5 and runner.foresight == 8, "nobody has to wait"
    compilers.done = ()
    for wanted in (9, 10, 10):
        assert runner.expect(GEMM, configs[: runner.foresight]) == 0 and runner.foresight == wanted


COMPILE = """
import sys
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.spaces import space_for

hardware = known_hardware("cuda:90")
problems = {"gemm": AllGatherGemm(256, 256, 256, "bf16", "m", 4), "decode": FlashDecode(1, 8, 2, 64, 512, "bf16", 4)}
for name in sys.argv[1:]:
    problem, variant = problems[name.split(".")[0]], name.split(".")[1]
    compile_offline(problem, space_for(problem, hardware).default(variant), hardware)
"""


def compile_in_new_process(*names: str) -> None:
    subprocess.run([sys.executable, "-c", COMPILE, *names], check=True, timeout=280)


@pytest.mark.volume
def test_what_one_process_compiled_another_finds_whatever_each_did_before(cache: Path) -> None:
    compile_in_new_process("decode.single", "gemm.pull", "gemm.push")
    before = sorted(cache.iterdir())
    compile_in_new_process("gemm.push")
    compile_in_new_process("gemm.push", "decode.single", "gemm.pull")
    assert sorted(cache.iterdir()) == before


@pytest.mark.parametrize(
    ("ahead", "variant", "lost", "words"),
    [
        (PATIENCE_S, "does_not_compile", False, "CompilationError"),
        (PATIENCE_S, "aborts", True, "was killed by SIGABRT"),
        pytest.param(
            DEADLINE_S, "never_ends", True, f"no answer from the compiler within {DEADLINE_S:g} s", marks=pytest.mark.volume
        ),
    ],
    indirect=["ahead"],
)
def test_a_bad_config_costs_its_compiler_only(ahead: CompileAhead, variant: str, lost: bool, words: str) -> None:
    bad, good = Config(variant), space_for(GEMM, H200).default("pull")
    started = time.monotonic()
    ahead.expect(GEMM, [bad, good])
    outcome = ahead.outcome(GEMM, bad)
    assert words in (outcome.error or "") and outcome.lost == lost
    assert time.monotonic() - started < DEADLINE_S + 500
    assert ahead.outcome(GEMM, good).error is None


def test_closing_leaves_no_compiler_behind(ahead: CompileAhead) -> None:
    ahead.expect(GEMM, [Config("never_ends")])
    (compiler,) = ahead._compilers
    process = psutil.Process(compiler.child.process.pid)
    ahead.close()
    assert not process.is_running()


@pytest.mark.usefixtures("cache")
def test_where_no_compiler_starts_the_ranks_are_left_to_compile() -> None:
    broken = CompileAhead(H200, 2, modules=("no.such.module",))
    configs = [space_for(GEMM, H200).default(variant) for variant in ("push", "pull", "copy_engine")]
    broken.expect(GEMM, configs)
    outcomes = [broken.outcome(GEMM, config) for config in configs]
    assert all(outcome.error and not outcome.lost for outcome in outcomes)
    broken.close()
