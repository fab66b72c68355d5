"""What peers take from libraries: torch's symmetric memory, and communicators of NCCL with settings of their own."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel

_workspaces: dict[int, Any] = {}
"""Torch's workspaces so far, by address. Torch replaces a workspace that is too small, but captured graphs still use it."""
_groups: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Further groups of the ranks of a group, by their settings."""


def group_name(context: Context) -> Any:
    """The name of the ranks' group in torch's operators; empty offline."""
    return context.world.data.group_name if not context.heap.slab.is_meta else ""


def symmetric(context: Context, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that torch's operators can read on all ranks; its contents are unspecified. Collective."""
    if context.heap.slab.is_meta:
        return context.empty(shape, dtype)
    import torch.distributed._symmetric_memory as symm_mem

    from autotax.heap.base import without_multicast

    memory = symm_mem.empty(tuple(shape), dtype=dtype, device=context.heap.slab.device)
    with without_multicast():
        symm_mem.rendezvous(memory, group_name(context))
    return memory


def pipeline(context: Context, nbytes: int) -> Any:
    """Torch's module of pipelined operators, with a workspace of at least `nbytes` bytes. Collective; None offline."""
    if context.heap.slab.is_meta:
        return None
    import torch.distributed._symmetric_memory as symm_mem

    from autotax.heap.base import without_multicast

    with without_multicast():
        symm_mem.get_symm_mem_workspace(group_name(context), nbytes)
    return symm_mem


def keep_workspace(symm_mem: Any, name: Any) -> None:
    """Keeps the workspace that torch uses now: a graph that is being captured holds its address only."""
    workspace = symm_mem._group_name_to_workspace_tensor[name]
    _workspaces.setdefault(workspace.data_ptr(), workspace)


class Nccl(Kernel[Any]):
    """Mixed into a bulk-synchronous kernel: its collectives use a protocol that NCCL might not choose by itself."""

    PROTOCOL: ClassVar[str]

    def __init__(self, problem: Any, config: Config, context: Context) -> None:
        super().__init__(problem, config, with_settings(context, {"NCCL_PROTO": self.PROTOCOL}))
        self.outer = context

    def __call__(self, *tensors: Any) -> None:
        if not self.outer.dry:  # the context with settings is a copy, which does not know
            super().__call__(*tensors)  # type: ignore[safe-super]


def with_settings(context: Context, settings: Mapping[str, str]) -> Context:
    """The same services with a communicator of NCCL that has `settings`, variables of NCCL's environment. Collective.

    NCCL reads these variables when it makes a communicator, so only that is done with them.
    """
    if context.heap.slab.is_meta:
        return context
    world, known = context.world, _groups.setdefault(context.world.data, {})
    name = " ".join(f"{variable}={value}" for variable, value in sorted(settings.items()))
    if name not in known:
        with _environment(settings):
            ranks = dist.get_process_group_ranks(world.data)
            known[name] = dist.new_group(ranks, backend="nccl", use_local_synchronization=True, device_id=world.device)
            dist.all_reduce(torch.zeros(1, device=world.device), group=known[name])
            world.synchronize()
    other = copy.copy(context)
    other.world = replace(world, data=known[name])
    return other


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {variable: os.environ.get(variable) for variable in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
