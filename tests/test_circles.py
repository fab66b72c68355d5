"""Imports between the modules of the package form no circle; imports in functions and for type checkers count."""

from __future__ import annotations

import ast
from collections.abc import Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import autotax

PACKAGE = Path(autotax.__file__).parent


def test_imports_form_no_circle() -> None:
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: _imports(path, modules.keys()) - {name} for name, path in modules.items()}
    assert graph["autotax.operators.verification"] >= {"autotax.operators.registry", "autotax.core.problem"}
    circle = ""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
    assert not circle, circle


def _imports(path: Path, modules: Set[str]) -> set[str]:
    targets = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets |= {name if name in modules else node.module for name in names}
    return targets & set(modules)
