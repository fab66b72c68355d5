"""Registration of our implementations of torch's operators, for torch's schemas in SCHEMAS, and of the attention of its context
parallelism.

Torch declares torch.ops.symm_mem.*. Only the implementations for CUDA and CPU are replaced. Compilers use the Meta
implementations, which stay torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_symm_mem

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.torch import context_parallel, plans, scaled, symm_mem
from autotax.torch.plans import Status, forget_counts, note_operators, status
from autotax.torch.symm_mem import GATHER, REDUCE, SCATTER

OPERATORS: dict[str, Callable[..., Any]] = {
    GATHER: symm_mem.all_gather_matmul,
    SCATTER: symm_mem.matmul_reduce_scatter,
    **scaled.OPERATORS,
}
SCHEMAS = {
    GATHER: "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
    SCATTER: "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
}
"""Schemas of torch 2.11 to 2.15."""
ALL = (*SCHEMAS, *scaled.ARGUMENTS, context_parallel.ATTENTION)
METAS = scaled.FALLBACKS | {GATHER: "_fused_all_gather_matmul_fallback", SCATTER: "_fused_matmul_reduce_scatter_fallback"}
OWN = scaled.TORCHS | {GATHER: "_fused_all_gather_matmul", SCATTER: "_fused_matmul_reduce_scatter"}
KEYS = ("CUDA", "CPU")

_library: torch.library.Library | None = None


def _declare() -> torch.library.Library:
    """Declares torch.ops.autotax.fused_*: the same operators under names that `install` does not change."""
    library = torch.library.Library("autotax", "FRAGMENT")
    quantised = "Tensor A, Tensor B, Tensor? A_scale, Tensor B_scale, str quantize, str collective, str group_name, "
    quantised += "float? scale_ub=None"
    own: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
        name: (SCHEMAS[name], OPERATORS[name], getattr(torch_symm_mem, METAS[name])) for name in SCHEMAS
    }
    own[REDUCE] = (
        "(Tensor A, Tensor B, str group_name, bool batch_invariant=False) -> Tensor", symm_mem.matmul_all_reduce,
        lambda a, b, *_: a.new_empty(*a.shape[:-1], b.shape[1]),
    )  # fmt: skip
    own[scaled.QUANTISED] = f"({quantised}) -> Tensor", scaled.quantised_matmul, scaled.meta_of_quantised_matmul
    for name, (schema, function, meta) in own.items():
        library.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order,))
        for key in KEYS:
            library.impl(name, function, key)
        library.impl(name, meta, "Meta")
    return library


def lack(name: str) -> str:
    """The reason why an operator of this torch cannot be replaced, in one line; empty if it can."""
    if name == context_parallel.ATTENTION:
        return context_parallel.lack()
    missing = [attribute for attribute in (METAS[name], OWN[name]) if not hasattr(torch_symm_mem, attribute)]
    if missing:
        return f"torch {torch.__version__} has no {' and no '.join(missing)} to fall back to"
    overload = getattr(getattr(torch.ops.symm_mem, name, None), "default", None)
    if overload is None:
        return f"torch {torch.__version__} has no symm_mem::{name}"
    if name in scaled.ARGUMENTS:  # torch has renamed types in these schemas; the names of the arguments say what they are
        names = tuple(argument.name for argument in overload._schema.arguments)
        return "" if names == scaled.ARGUMENTS[name] else f"torch {torch.__version__} declares {overload._schema}"
    expected, declared = f"symm_mem::{name}{SCHEMAS[name]}", str(overload._schema)
    return "" if declared == expected else f"torch {torch.__version__} declares {declared}, not {expected}"


def install(
    db: str | Path | None = None, ops: Sequence[str] = ALL, *, conditions: Conditions | None = None, prove: bool | float = False
) -> Status:
    """Makes torch's fused operators run tuned kernels where a winner exists. Replaces an earlier installation.

    Every rank must install the same between the same calls. Nothing is looked up until an operator is called: the first call of a
    shape is collective over its group.

    An operator whose schema in this torch is another one stays torch's, with a RuntimeWarning.

    Args:
        db: The database, a path or a URL. Default: yours.
        ops: The operators to replace, names of ALL.
        conditions: The conditions of the calls. Default: the usual ones on this hardware.
        prove: At the first call of a shape, prove its winner again if it is stale only in software: see AllGatherLinear.

    Returns:
        The operators that are replaced, and the calls so far.

    Raises:
        UsageError: An operator that is not in ALL.
    """
    if unknown := [name for name in ops if name not in ALL]:
        raise UsageError(f"ops has {', '.join(map(repr, unknown))}; allowed are {', '.join(ALL)}: give some of these")
    uninstall()
    plans.use(plans.Deployment(db, conditions, prove))
    states = {name: lack(name) or "autotax" if name in ops else "torch, not asked for" for name in ALL}
    global _library
    _library = torch.library.Library("symm_mem", "IMPL")
    for name in ops:
        if states[name] != "autotax":
            warnings.warn(f"autotax: {name} stays torch's own: {states[name]}", RuntimeWarning, stacklevel=2)
            continue
        if name == context_parallel.ATTENTION:
            context_parallel.install()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its CUDA implementation is overridden, which is intended
            for key in KEYS:
                _library.impl(name, OPERATORS[name], key, allow_override=True)
    note_operators(states)
    return status()


def uninstall() -> None:
    """Restores torch's operators, drops the prepared kernels and resets the counts. Safe to call twice."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    context_parallel.uninstall()
    note_operators({})
    plans.use(plans.Deployment())
    forget_counts()


_own = _declare()
