"""Looks up operators by name: operators of the package, of installed packages, and of modules that a user loads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.digests import Symbol, has_source, kernel_digest, symbol_digest
from autotax.hardware import content_digest
from autotax.operators.declaration import Operator, Peer
from autotax.operators.loading import broken, declared, fingerprints, import_file, load, load_built_in, load_entry_points, loaded

__all__ = [
    "broken", "fingerprints", "import_file", "known", "load", "load_entry_points", "loaded", "named", "of",
    "operators", "problem_from_dict", "variant_digest",
]  # fmt: skip


def operators() -> Mapping[str, Operator[Any]]:
    """All operators by name, including those of installed packages and of AUTOTAX_LOAD."""
    load_built_in()
    load_entry_points()
    return declared


def named(name: object) -> Operator[Any]:
    """The operator of that name. Raises UsageError if there is none."""
    operator = _find(name)
    if operator is None:
        allowed = f"allowed are {', '.join(operators())}"
        raise UsageError("; ".join([f"op is {name!r}; {allowed}: name one of these, or --load its module", *broken()]))
    return operator


def known(name: object) -> bool:
    """Whether there is such an operator."""
    return _find(name) is not None


def of(problem: Problem) -> Operator[Any]:
    """The operator of a problem."""
    return named(problem.op)


def problem_from_dict(values: Mapping[str, Any]) -> Problem:
    """The inverse of `Problem.to_dict`; raises UsageError on an unknown operator or field."""
    name = values.get("op")
    kind = named(name).problem
    arguments = {field: value for field, value in values.items() if field != "op"}
    allowed = [entry.name for entry in fields(kind)]
    if unknown := sorted(set(arguments) - set(allowed)):
        raise UsageError(f"{name} has no {', '.join(unknown)}; it takes {', '.join(allowed)}: take the others out")
    try:
        return kind(**arguments)
    except TypeError as error:
        raise UsageError(f"{name} takes {', '.join(allowed)}; {str(error).split('__init__() ')[-1]}: give them all") from None


def _find(name: object) -> Operator[Any] | None:
    load_built_in()
    if not isinstance(name, str):
        return None
    if name not in declared:
        load_entry_points()
    return declared.get(name)


@functools.lru_cache(maxsize=1024)
def variant_digest(op: str, variant: str) -> str:
    """Digest of the code that decides what a variant of an operator computes, for instance of `all-gather-gemm`, `push`.

    The digest of a peer covers the version of torch, which it calls. Falls back to `kernel_digest()` for an operator or variant
    that is not declared here.
    """
    operator = _find(op)
    try:
        declaration = operator.implementation(variant) if operator else None
    except UsageError:
        declaration = None
    if declaration is None or not has_source(declaration.module):
        return kernel_digest()
    digest = symbol_digest(Symbol(*declaration.place))
    if not isinstance(declaration, Peer):
        return digest
    from autotax.software import torch_version

    return content_digest({"kernel": digest, "torch": torch_version()})
