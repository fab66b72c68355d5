"""The scripts of results/: all that they import from this package and its tests exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "results"
OURS = ("autotax", "tests")


def imported(script: Path) -> list[tuple[str, str | None]]:
    """(module, name in it) of every import of ours, but for those that serve an older checkout."""
    found: list[tuple[str, str | None]] = []
    tree = ast.parse(script.read_text())
    elsewhere = {each for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if node in elsewhere:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            found += [(node.module, each.name) for each in node.names]
        elif isinstance(node, ast.Import):
            found += [(each.name, None) for each in node.names if each.name.split(".")[0] in OURS]
    return found


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
