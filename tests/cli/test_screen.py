"""Terminal output: help, widths, times and the last line; a mistake is reported at once."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotax import __version__
from autotax.cli.tune import flags_of
from autotax.core.conditions import ON_CPU, Conditions
from autotax.operators import operators
from tests.cli.conftest import GPUS, Ranks, Run, Tuner

ROOT = Path(__file__).parents[2]
GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--dtype", "fp32"]
BIG = ["all-gather-gemm", "--m", "512", "--n", "7168", "--k", "8192"]
HEAVY = ("torch", "triton", "numpy", "optuna", "rich.table")


def test_help_and_version(run: Run) -> None:
    assert run("--version").out == f"autotax {__version__}\n"
    assert run("-h").out == run("--help").out and "refresh" in run("-h").out
    for operator in operators().values():
        text = " ".join(run("tune", operator.name, "-h").out.split())
        assert f"Example: autotax tune {operator.name} --" in text and "Default: 60." in text
        assert all(f"--{name.replace('_', '-')} " in text for name in operator.problem.required())
    assert "--kv-len" not in run("tune", "all-gather-gemm", "-h").out and "--shapes" not in run("tune", *GEMM[:1], "-h").out
    assert "Sizes depend on the operator: autotax lookup all-gather-gemm --help" in " ".join(run("lookup", "-h").out.split())


def test_completion_knows_commands_and_operators() -> None:
    for words, at, wanted in (("autotax ref", "1", "refresh"), ("autotax tune fla", "2", "flash-decode")):
        code = "import sys; sys.argv = ['autotax']; from autotax.cli.app import main; main()"
        words_here = {"_AUTOTAX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": at, "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=words_here, timeout=280)
        assert wanted in ended.stdout.split(), ended


@pytest.mark.usefixtures("tuner")
@pytest.mark.parametrize("columns", ["80", "132", None])
def test_output_in_a_pipe_is_as_wide_as_asked_or_as_its_content(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    lines = run("tune", *GEMM).out.splitlines()
    won = next(line for line in lines if "1.25x [1.20" in line)
    assert won.rstrip().endswith("winner") and "1.25x [1.20, 1.30]" in won, "the verdict is never cut"
    if columns:
        assert max(map(len, lines)) <= int(columns)
    else:
        assert "block_m=64 comm=16" in won, "nothing is folded"


def test_the_last_line_says_where_it_is_and_what_is_next(run: Run, tuner: Tuner, db: Path, tmp_path: Path) -> None:
    last = run("tune", *GEMM).err.splitlines()[-1]
    assert last.startswith(f"autotax: stored in {db}; next: autotax lookup all-gather-gemm --m 64 ") and last.endswith("--pin")
    shapes = tmp_path / "shapes.toml"
    shapes.write_text("[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\n[[all-gather-gemm]]\nm = 32\nn = 96\nk = 64\n")
    several = run("tune", "--shapes", shapes)
    assert "problem 1 of 2: " in several.err and "problem 2 of 2: " in several.err and " for all" in several.err
    assert "1.25x" in several.out and several.err.splitlines()[-1].endswith("autotax winners")
    tuner.how = "nothing"
    assert run("tune", *GEMM).err.splitlines()[-1].endswith("next: autotax trials")


def test_the_next_command_works_on_the_same(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    given = ["--backend", "cpu", "--db", tmp_path / "its own.db", "--load", ROOT / "examples/own_variant/push_whole.py"]
    again = f" --backend cpu --db '{tmp_path / 'its own.db'}' --load {ROOT / 'examples/own_variant/push_whole.py'}"
    following = run("tune", *GEMM, *given).err.splitlines()[-1].partition("next: autotax ")[2]
    assert following.endswith(f"{again} --pin")
    assert run(*shlex.split(following)).out.startswith("autotax.Config.of(")
    tuner.how = "nothing"
    ended = run("tune", *GEMM, *given).err.splitlines()
    assert ended[-1].endswith(f"next: autotax trials{again}") and f"{again}` shows why each trial failed" in ended[-2]
    assert flags_of(Conditions("eager", "warm", 20.0), GPUS) == " --mode eager --l2 warm --skew 20.0"
    assert flags_of(Conditions(), GPUS) == " --mode graph"
    assert flags_of(Conditions.usual(on_gpu=True), GPUS) == "" == flags_of(ON_CPU, replace(GPUS, backend="cpu"))


def test_names_of_checks_are_never_folded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("doctor").out.splitlines()
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in line for line in lines) and max(map(len, lines)) <= 80


@pytest.mark.usefixtures("tuner")
@pytest.mark.parametrize("command", ["tune", "compare"])
def test_slow_cpu_ranks_are_announced(run: Run, ranks: Ranks, command: str) -> None:
    stderr = run(command, *BIG).err
    assert "CPU ranks interpret kernels, which is slow" in stderr and "autotax tune all-gather-gemm --m 64" in stderr
    assert ranks.started, "a warning, no refusal"
    quick = [*GEMM, "--trials", 10] if command == "tune" else GEMM
    assert "CPU ranks interpret" not in run(command, *quick).err


@pytest.mark.sampled(by=lambda arguments: {"heavy": arguments[0] in ("tune", "compile", "lookup", "fleet") and arguments[0]})
@pytest.mark.parametrize(
    "arguments",
    [
        ["tunes"],
        ["lookup"],
        ["lookup", "all-gather-gemm", "--m", "0", "--n", "96", "--k", "64"],
        ["tune", *GEMM, "--sampler", "cma"],
        ["compare", *GEMM, "--mode", "lazy"],
        ["compile", *GEMM, "--target", "cuda:1"],
        ["trials", "--sort", "size"],
        ["doctor", "--backend", "tpu"],
        ["tune", "--m", "64"],
        ["lookup", *GEMM, "--backend", "cpu", "--mode", "graph"],
        ["taxes", *GEMM, "--backend", "cpu", "--world-size", "65"],
        ["trials", *GEMM, "--backend", "cpu", "--world-size", "65"],
        ["fleet", "tune", "--hosts", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_heavy_is_imported_before_a_mistake_is_told(arguments: list[str]) -> None:
    code = f"import sys; from autotax.cli.app import main; main({arguments!r}); print([m for m in {HEAVY} if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert ended.stdout == "[]\n", ended
    assert ended.stderr.startswith("autotax: ") and ended.stderr.count("\n") == 1
