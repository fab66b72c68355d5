"""What `import autotax` costs and offers."""

from __future__ import annotations

import sqlite3
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
    heavy = "{'torch', 'triton', 'sqlalchemy', 'alembic', 'optuna', 'numpy'}"
    code = "import sys, autotax; autotax.AllGatherGemm, autotax.FlashDecode, autotax.Config, autotax.UsageError; "
    assert run(code + f"print({heavy} & set(sys.modules))").strip() == "set()"


def test_the_look_up_comes_when_named() -> None:
    code = "import sys, autotax; autotax.lookup, autotax.Answer; print({'sqlalchemy', 'torch'} & set(sys.modules))"
    assert run(code).strip() == "{'sqlalchemy'}"
    assert set(autotax.__all__) <= set(dir(autotax))
    with pytest.raises(AttributeError, match="no attribute 'tune_everything'"):
        _ = autotax.tune_everything


def test_alembic_comes_when_a_database_is_upgraded(tmp_path: Path) -> None:
    open_it = f"from autotax.db import Store; Store.open({str(tmp_path / 'autotax.db')!r}).close(); "
    told = "import sys; print({'alembic', 'optuna', 'torch'} & set(sys.modules))"
    assert run(open_it + told).strip() == "set()"  # made
    assert run(open_it + told).strip() == "set()"  # opened
    tables = (ROOT / "tests" / "db" / "v1.sql").read_text().format(SERIAL="INTEGER", MOMENT="DATETIME", REAL="DOUBLE")
    (tmp_path / "autotax.db").unlink()
    with sqlite3.connect(tmp_path / "autotax.db") as connection:
        connection.executescript(tables)
    connection.close()
    assert run(open_it + told).strip() == "{'alembic'}"


def test_the_version_is_the_packages() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == autotax.__version__
