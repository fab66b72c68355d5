"""Operators and variants from outside the package: tuned, looked up and run like built-in ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import autotax
from autotax.core.problem import Problem
from autotax.heap.world import World
from autotax.nn import Tuned
from autotax.operators import load, operators
from autotax.operators.registry import variant_digest
from autotax.operators.verification import make_inputs, reference, relative_error
from autotax.runner.ranks import Ranks
from autotax.testing import check_operator
from tests.volume import volume

EXAMPLES = Path(__file__).parents[2] / "examples"
VARIANT = str(EXAMPLES / "own_variant/push_whole.py")


@pytest.fixture(scope="module", autouse=True)
def outside() -> None:
    """Loads both examples in this process, which forgets them afterwards."""
    sys.path.insert(0, str(EXAMPLES / "own_operator"))
    load("reduce_scatter_add")
    load(VARIANT)


def run_module(world: World, problem: Problem, db: str) -> tuple[str, float]:
    """The variant that a generic module takes, and the error of a call, and of one with fewer rows."""
    module = Tuned(problem, device="cpu", db=db)
    error = 0.0
    for seed in (0, 1):
        call = make_inputs(problem, seed, world.rank, world.device)
        error = max(error, relative_error(module(*call.tensors), reference(problem, seed, world.rank, world.device)))
    chosen = module.choices[0].config
    module.close()
    return (chosen.variant if chosen else "bsp"), error


def test_an_operator_is_a_package_of_at_most_120_lines_beside_its_words() -> None:
    files = [*(EXAMPLES / "own_operator").glob("*.py"), EXAMPLES / "own_operator/pyproject.toml"]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    assert len(lines) <= 120


@pytest.mark.volume
def test_the_conformance_suite_takes_an_operator_of_ones_own() -> None:
    checked = check_operator("reduce-scatter-add", targets=())
    assert checked.calls > 20 and checked.refusals == 16


@pytest.mark.parametrize(
    ("op", "sizes", "variants"),
    [
        pytest.param("reduce-scatter-add", {"m": 12, "n": 40}, ["push"], marks=pytest.mark.volume),
        ("all-gather-gemm", {"m": 64, "n": 96, "k": 64}, ["push_whole"]),
    ],
)
def test_tuned_looked_up_and_run(tmp_path: Path, op: str, sizes: dict[str, int], variants: list[str]) -> None:
    problem = operators()[op].problem(**sizes, dtype="fp32", world_size=2)
    db = str(tmp_path / "own.db")
    progress = []
    verdict = autotax.tune(
        problem, trials=3, variants=variants, soak=2, db=db, backend="cpu", on_progress=lambda now: progress.append(now.done)
    )
    assert verdict.winner is not None and progress
    answer = autotax.lookup(problem, hardware=verdict.hardware, db=db)
    assert answer.match == "exact" and answer.variant == verdict.winner.measurement.config.variant
    with Ranks(2, modules=("reduce_scatter_add", VARIANT)) as ranks:
        for variant, error in ranks.run(run_module, problem, db, timeout=120):
            assert variant == answer.variant
            assert error < 1e-5


def test_an_edit_makes_its_own_winners_stale_and_nobody_elses() -> None:
    own = variant_digest("reduce-scatter-add", "push"), variant_digest("all-gather-gemm", "push_whole")
    assert len({*own, variant_digest("all-gather-gemm", "push")}) == 3
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES / 'own_operator')!r})\n"
        "from autotax.operators import load; from autotax.operators.registry import variant_digest as digest\n"
        f"load('reduce_scatter_add'); load({VARIANT!r})\n"
        "print(digest('reduce-scatter-add', 'push'), digest('all-gather-gemm', 'push_whole'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert tuple(ran.stdout.split()) == own


def test_the_command_line_takes_what_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotax", "lookup", "reduce-scatter-add", "--m", "12", "--n", "40", "--backend", "cpu"]
    command += ["--db", str(tmp_path / "none.db"), "--load", "reduce_scatter_add"]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": f"{EXAMPLES / 'own_operator'}:{EXAMPLES.parent}"}
    )
    assert ran.returncode == 0, ran.stderr
    assert "reduce-scatter-add" in ran.stdout


@pytest.mark.volume
def test_a_file_finds_the_modules_beside_it_wherever_the_command_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotax", "compile", "reduce-scatter-add", "--m", "4096", "--n", "8192", "--trials", "1"]
    command += ["--target", "cuda:90", "--variants", "push", "--load", str(EXAMPLES / "own_operator/reduce_scatter_add.py")]
    here = {"PYTHONPATH": str(EXAMPLES.parent), "TRITON_CACHE_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=here, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 config: 1 ok" in ran.stdout


def test_what_cannot_be_loaded_is_told_in_one_line() -> None:
    with pytest.raises(autotax.UsageError, match="no_such_module cannot be loaded"):
        load("no_such_module")


CALLABLES = {"triton_kernel": "triton", "local_kernel": "triton", "helion_kernel": "helion"}
"""Examples of one-off kernels, and the package that each needs."""


@pytest.mark.parametrize("name", volume("triton_kernel", "local_kernel", "helion_kernel"))
def test_functions_of_a_script_are_tuned_without_a_declaration(tmp_path: Path, name: str) -> None:
    pytest.importorskip(CALLABLES[name])
    script = EXAMPLES / f"callables/{name}.py"
    code = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import {name}; v = {name}.main(trials=2, soak=2)\n"
    code += "print(v.problem.op, v.winner is not None, sorted({s.measurement.config.variant for s in v.standings}))"
    here = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "AUTOTAX_DB": str(tmp_path / "one.db")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=here, check=False)
    op = "exchange" if name == "triton_kernel" else f"{name.replace('_', '-')}-make"
    assert ran.stdout.strip() == f"{op} True ['bsp', 'tuned']", ran.stderr


def test_a_function_that_ranks_cannot_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "callables")
    one_off = importlib.import_module("triton_kernel")
    with pytest.raises(autotax.UsageError, match=r"make is .*move it to the top of one"):
        autotax.tune_callable(
            lambda *_: None, tunables={"programs": [1]}, inputs=one_off.inputs, reference=one_off.reference,
            baseline=one_off.baseline, backend="cpu", db=str(tmp_path / "one.db"),
        )  # fmt: skip


@pytest.mark.volume
def test_what_a_declaration_lacks_is_told_and_nbytes_has_a_default() -> None:
    code = """
from dataclasses import dataclass
from typing import ClassVar
import torch, autotax.operators as op
from autotax.testing import check_operator

@dataclass(frozen=True)
class Mine(op.Problem):
    n: int = op.size("elements")
    dtype: str = op.dtype()
    world_size: int = op.ranks()
    op: ClassVar[str] = "mine"

operator = op.Operator(Mine)
try:
    check_operator("mine")
except AssertionError as error:
    print(error)
operator.inputs(lambda problem, draw: op.Call((draw.normal(problem.n, tensor=1),), draw.empty(problem.n)))
print(Mine(100).nbytes, Mine(100, "fp32").nbytes)
"""
    here = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=here, check=True)
    *lacking, sizes = ran.stdout.splitlines()
    assert [line.partition(":")[0] for line in lacking] == [
        "mine lacks inputs", "mine lacks a reference", "mine lacks a baseline", "mine lacks a variant to search",
        "mine lacks an example",
    ]  # fmt: skip
    assert sizes == "400 800"
