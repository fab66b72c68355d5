"""Kernel signatures use only features that every supported version of Triton accepts."""

from __future__ import annotations

import ast
from pathlib import Path

import autotax


def test_no_device_function_has_a_word_for_a_default() -> None:
    """Triton 3.6 fails to compile a call that leaves such an argument to its default."""
    functions = []
    for path in (Path(autotax.__file__).parent / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                words = [word for word in node.args.defaults if isinstance(word, ast.Constant) and isinstance(word.value, str)]
                functions += [f"{path.name}: {node.name}"] * len(words)
    assert not functions
