"""`import autotax`: the time it takes, the modules it loads and the names it offers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autotax

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_importing_the_package_is_cheap() -> None:
    heavy = "{'torch', 'triton', 'sqlalchemy', 'optuna', 'numpy'}"
    code = "import sys, autotax; autotax.AllGatherGemm, autotax.FlashDecode, autotax.Config, autotax.UsageError; "
    assert run(code + f"print({heavy} & set(sys.modules))").strip() == "set()"


def test_the_look_up_comes_when_named() -> None:
    code = "import sys, autotax; autotax.lookup, autotax.Answer; print({'sqlalchemy', 'torch'} & set(sys.modules))"
    assert run(code).strip() == "{'sqlalchemy'}"
    assert set(autotax.__all__) <= set(dir(autotax))
    with pytest.raises(AttributeError, match="no attribute 'tune_everything'"):
        _ = autotax.tune_everything


def test_a_look_up_imports_neither_triton_nor_torch() -> None:
    """Only a look-up for a GPU imports torch, for the version of its collectives. A model on a GPU has imported torch already."""
    code = (
        "import sys, autotax; from autotax.hardware import detect; problem = autotax.AllGatherGemm(64, 96, 64, world_size=2); "
        "print(autotax.lookup(problem, hardware=detect('cpu'), db='/nowhere/at.db').match); "
        "print({'torch', 'torch.distributed', 'triton', 'importlib.metadata'} & set(sys.modules))"
    )
    assert run(code).split("\n")[:2] == ["fallback", "{'importlib.metadata'}"]
    assert run("import sys, autotax; print('importlib.metadata' in sys.modules)").strip() == "False", "it takes the longest"


def test_the_version_is_the_packages() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == autotax.__version__
