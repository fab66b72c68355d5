"""Names: classes of a folder and kernel modules have names of their own, and only its own modules name an operator."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import autotax
from autotax.operators import Operator, problems, registry
from autotax.operators.declaration import BASELINE

PACKAGE = Path(autotax.__file__).parent
BUILT_IN = {kind.op: kind.__module__.rpartition(".")[2] for kind in (getattr(problems, name) for name in problems.__all__)}
"""Names of the package's operators, and of their modules."""
OWN = ("operators/", "kernels/", "spaces/")
"""An operator's declaration, kernels and spaces."""
MODULES = ("nn/", "engines/", "torch/")
"""Modules that a model calls are those of an operator, but for the generic one."""
GENERIC = {"nn/base.py", "nn/consensus.py", "nn/groups.py", "nn/prepare.py", "nn/sized.py", "nn/tuned.py"}


@cache
def files() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_two_classes_of_a_folder_share_a_name() -> None:
    """Kernel classes are exempt: a declaration names them together with their operator."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, tree in files().items():
        if path.startswith("kernels/"):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[path.rpartition("/")[0], node.name].append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_modules_of_kernels_share_a_name_only_if_a_variant_has_it() -> None:
    """They may belong to one variant (kernel and space), or to variants of two operators that work alike."""
    variants = {name for operator in _built_in() for name in operator.variants}
    usual = {*variants, *BUILT_IN.values(), "__init__", "peers", "traits"}  # an operator's kernels may be one module
    usual |= {"tiles", "attention"}  # of kernels that share a space
    modules: dict[str, list[str]] = defaultdict(list)
    for path in files():
        if path.startswith(("kernels/", "spaces/")):
            modules[Path(path).stem].append(path)
    assert not {name: paths for name, paths in modules.items() if len(paths) > 1 and name not in usual}


def test_nothing_outside_an_operators_own_modules_names_it() -> None:
    mentions = {path: names for path in files() if not path.startswith(OWN) for names in [_named_in(path)] if names}
    assert not mentions


def _named_in(path: str) -> set[str]:
    """The operators that a file mentions: names of operators, problems and variants in its strings and imports."""
    if path.startswith(MODULES) and path not in GENERIC:
        return set()
    variants = {name for operator in _built_in() for name in operator.variants if name not in (BASELINE, *operator.peers)}
    modules_and_problems = {*BUILT_IN.values(), *problems.__all__}
    texts, names = _words_of(files()[path])
    return texts & {*BUILT_IN, *modules_and_problems, *variants} | names & modules_and_problems


def _words_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Texts but for docstrings; names, and the parts of what is imported."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            texts.add(node.value)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
    return texts, names


def _built_in() -> list[Operator]:
    return [registry.named(op) for op in BUILT_IN]
