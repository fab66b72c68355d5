"""The scripts of results/: their imports from autotax exist and are public, and their files are complete."""

from __future__ import annotations

import ast
import importlib
import lzma
import runpy
from contextlib import suppress
from pathlib import Path

import pytest

from autotax.db import Store, formats
from tests.db.conftest import PUSH, keep_winner

RESULTS = Path(__file__).parents[1] / "results"
OURS = ("autotax", "tests")


def imported(script: Path) -> list[tuple[str, str | None]]:
    """(module, name in it) of every import of ours, but for those that serve an older checkout."""
    imports: list[tuple[str, str | None]] = []
    tree = ast.parse(script.read_text())
    elsewhere = {child for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if node in elsewhere:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            imports += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(alias.name, None) for alias in node.names if alias.name.split(".")[0] in OURS]
    return imports


@pytest.mark.parametrize("script", sorted(RESULTS.rglob("*.py")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_script_imports_what_exists(script: Path) -> None:
    for module, name in imported(script):
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] in OURS:
                raise
            pytest.skip(f"{module} needs {error.name}, which is not installed")
        if name is not None and not hasattr(loaded, name):
            importlib.import_module(f"{module}.{name}")
        assert not any(part.startswith("_") for part in f"{module}.{name}".split(".")), f"{module}.{name} is not public"


def exported(folder: Path, speedup: float, name: str, keep: bool) -> float:
    """The speed-up of the only winner of a host's folder, after the export of a database that holds one of `speedup`."""
    with Store.open(database := folder / name) as store:
        keep_winner(store, config=PUSH, speedup=speedup, interval_low=speedup - 0.05, interval_high=speedup + 0.05)
    runpy.run_path(str(RESULTS / "export.py"))["main"](folder, [database], keep)
    (entry,) = formats.read(folder / "winners.json.xz")
    return entry.winner.speedup


def test_a_kept_export_takes_the_later_figure_though_it_is_less(tmp_path: Path) -> None:
    assert exported(tmp_path, 1.3, "first.db", keep=False) == 1.3
    assert exported(tmp_path, 1.2, "proven.db", keep=True) == 1.2


def test_a_large_page_is_packed(tmp_path: Path) -> None:
    exported(tmp_path, 1.3, "first.db", keep=False)
    script = runpy.run_path(str(RESULTS / "page.py"))
    script["main"](tmp_path)
    whole = (tmp_path / "report.html").read_bytes()
    script["main"].__globals__["LARGEST"] = len(whole) - 1
    script["main"](tmp_path)
    packed = lzma.decompress((tmp_path / "report.html.xz").read_bytes())
    assert b"1.30x" in packed and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("script", sorted(RESULTS.rglob("*.py")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_script_reads_attributes_that_its_modules_have(script: Path) -> None:
    modules = {}
    tree = ast.parse(script.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            for alias in node.names:
                with suppress(ImportError):
                    modules[alias.asname or alias.name] = importlib.import_module(f"{node.module}.{alias.name}")
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    names = [(node.value.id, node.attr) for node in read if isinstance(node.value, ast.Name)]
    assert [(module, name) for module, name in names if module in modules and not hasattr(modules[module], name)] == []
