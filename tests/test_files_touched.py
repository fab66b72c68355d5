"""The files that a new variant or operator of the package touches: the table of docs/architecture.md.

tests/examples tests operators and variants of users, which touch no file of the package.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import autotax
from autotax.operators import named, problems
from autotax.operators.declaration import BASELINE

PACKAGE = Path(autotax.__file__).parent
EXAMPLE = PACKAGE.parent / "examples/own_operator"
OPERATORS = {kind.op: kind.__module__.rpartition(".")[2] for kind in (getattr(problems, name) for name in problems.__all__)}


@pytest.mark.parametrize("op", OPERATORS)
def test_a_variant_is_a_kernel_a_space_and_a_line_of_the_declaration(op: str) -> None:
    """No other file of the operator has the name of a variant among its texts, unless it is the word of something else."""
    folder = OPERATORS[op]
    variants = [name for name in named(op).variants if name not in (BASELINE, *named(op).peers)]
    mentions: dict[str, set[str]] = defaultdict(set)
    kernels = PACKAGE / "kernels"
    own = [*kernels.glob(f"{folder}.py"), *(kernels / folder).glob("*.py"), *(PACKAGE / "spaces").glob(f"{folder}*.py")]
    for path in (PACKAGE / f"operators/{folder}.py", *own):
        tree = ast.parse(path.read_text())
        keys = {node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)}  # names of parameters
        for node in set(ast.walk(tree)) - keys:
            if isinstance(node, ast.Constant) and node.value in variants:
                mentions[node.value].add(path.relative_to(PACKAGE).as_posix())
    for name in variants:
        space, kernel = _file(str(named(op).variants[name].space)), _file(named(op).variants[name].module)
        assert kernel.startswith(f"kernels/{folder}") and (PACKAGE / kernel).is_file()
        assert space.startswith(f"spaces/{folder}") and mentions[name] <= {f"operators/{folder}.py", kernel, space}, name


def _file(place: str) -> str:
    return place.partition(":")[0].removeprefix("autotax.").replace(".", "/") + ".py"


def test_an_operator_is_two_new_files_at_least_and_a_line(tmp_path: Path) -> None:
    """Moves the example of a user's operator into a copy of the package, which then offers it like the other operators."""
    there = tmp_path / "autotax"
    shutil.copytree(PACKAGE, there, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    for module, place in (("reduce_scatter_add", "operators"), ("reduce_scatter_add_kernels", "kernels")):
        text = (EXAMPLE / f"{module}.py").read_text()
        text = text.replace("from reduce_scatter_add import", "from autotax.operators.reduce_scatter_add import")
        text = text.replace('"reduce_scatter_add_kernels:', '"autotax.kernels.reduce_scatter_add_kernels:')
        text = text.replace('"reduce_scatter_add:', '"autotax.operators.reduce_scatter_add:')
        (there / place / f"{module}.py").write_text(text)
    edited = there / "operators/problems.py"
    line = "from autotax.operators.reduce_scatter_add import ReduceScatterAdd\n"
    edited.write_text(edited.read_text() + line + '__all__ += ["ReduceScatterAdd"]\n')
    command = [sys.executable, "-P", "-m", "autotax", "lookup", "reduce-scatter-add", "--m", "12", "--n", "40"]
    here = os.environ | {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [*command, "--backend", "cpu", "--db", "none.db"], cwd=tmp_path, env=here, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "reduce-scatter-add" in ran.stdout
    code = "import autotax; print(autotax.__file__, autotax.ReduceScatterAdd(12, 40).key)"
    child = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=here, capture_output=True, text=True, check=True)
    assert child.stdout.split() == [str(there / "__init__.py"), "reduce-scatter-add/m=12,n=40,dtype=bf16,world_size=1"]
