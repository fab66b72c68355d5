"""Parts of other libraries that alternatives use: symmetric memory of torch, communicators of NCCL, DeepGEMM, Iris."""

from __future__ import annotations

import copy
import math
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.heap.world import reason_of
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel, P
from autotax.operators import registry
from autotax.operators.inputs import Draw

_workspaces: dict[int, Any] = {}
"""Torch's workspaces so far, by address. Torch replaces a workspace that is too small, but captured graphs still use it."""
_groups: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Further groups of the ranks of a group, by their protocols."""


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
        super().__init__(problem, config, _with_protocol(context, self.PROTOCOL))
        self.outer = context

    def __call__(self, *tensors: Any, **added: Any) -> None:
        if not self.outer.dry:  # the context with the protocol is a copy, which does not know
            super().__call__(*tensors, **added)  # type: ignore[safe-super]


def _with_protocol(context: Context, protocol: str) -> Context:
    """The same services with a communicator of NCCL that uses `protocol`, which NCCL reads only when it makes one. Collective."""
    if context.heap.slab.is_meta:
        return context
    world, groups = context.world, _groups.setdefault(context.world.data, {})
    if protocol not in groups:
        before = os.environ.get("NCCL_PROTO")
        os.environ["NCCL_PROTO"] = protocol
        try:
            ranks = dist.get_process_group_ranks(world.data)
            groups[protocol] = dist.new_group(ranks, backend="nccl", use_local_synchronization=True, device_id=world.device)
            dist.all_reduce(torch.zeros(1, device=world.device), group=groups[protocol])
            world.synchronize()
        finally:
            if before is None:
                del os.environ["NCCL_PROTO"]
            else:
                os.environ["NCCL_PROTO"] = before
    other = copy.copy(context)
    other.world = replace(world, data=groups[protocol])
    return other


class DeepGemm:
    """Replaces a `ScaledProduct` for scales of blocks and C in bf16. Version 2 of DeepGEMM renamed the function."""

    def __init__(self, context: Context) -> None:
        deep_gemm = import_module("deep_gemm")
        self.context = context
        self.multiply: Any = getattr(deep_gemm, "fp8_gemm_nt", None) or deep_gemm.gemm_fp8_fp8_bf16_nt

    def __call__(self, a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        if not self.context.dry:
            self.multiply((a, scales_a), (b, scales_b), out)

REPEATS = 5
"""Calls that decide between settings."""


class IrisCall(Kernel[P]):
    """A kernel that calls an operator of `iris.ops` or `iris.ccl`, with the fastest of a few settings where it is `tuned`.

    Tensors that peers read or write lie in the memory of Iris. Callers' tensors lie elsewhere, so a call copies there and back.
    The operators synchronise on the host, which a graph cannot capture; here the device barriers of Iris do it.
    """

    CHOICES: ClassVar[tuple[Mapping[str, Any], ...]]
    """Settings of the operator: its defaults, then what its users might try by hand."""
    tuned: ClassVar[bool] = False
    """Whether to take the fastest of `CHOICES` instead of the defaults."""

    def __init__(self, problem: P, config: Config, context: Context) -> None:
        choices = self.CHOICES if self.tuned else self.CHOICES[:1]
        self.rooms: dict[str, Tensor] = {}
        """Tensors in the memory of Iris."""
        self.iris: Any = None
        self.workspace: Any = None
        self.choice = choices[0]
        if not context.heap.slab.is_meta:
            self._open(problem, context, len(choices))
        super().__init__(problem, config, context)
        if self.iris is not None:
            self._choose(choices)

    @abstractmethod
    def shapes(self, problem: P) -> dict[str, Sequence[int]]:
        """The shapes of `rooms` by name. All have the problem's dtype."""

    def workspace_elements(self, problem: P) -> int:  # noqa: ARG002
        """The most elements of a workspace that the operator allocates for one setting."""
        return 0

    def _open(self, problem: P, context: Context, choices: int) -> None:
        from autotax.heap.base import in_context  # loads libraries of the GPU

        shapes, dtype = self.shapes(problem), context.dtype(problem)
        elements = sum(map(math.prod, shapes.values())) + choices * self.workspace_elements(problem)

        def allocate(iris: Any) -> tuple[Any, dict[str, Tensor]]:
            rooms = {name: iris.zeros(tuple(shape), dtype=dtype) for name, shape in shapes.items()}
            iris.device_barrier()  # its first call allocates
            return iris, rooms

        iris, self.rooms = in_context(context.world, elements * dtype.itemsize, allocate)
        self.iris = _Capturable(iris)

    def _choose(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Takes the fastest setting that works on all ranks. Collective. Raises RuntimeError if none works."""
        problem, world = self.problem, self.context.world
        call = registry.of(problem).draw(problem, Draw(self.context.dtype(problem), 0, world.rank, world.device))
        measured, reasons = list[tuple[float, Mapping[str, Any], Any]](), list[str]()
        for choice in choices:
            self.choice, self.workspace = choice, None
            cause: Exception | None = None
            try:
                self(*call.tensors, call.out)
                world.synchronize()
            except Exception as error:  # Iris raises errors of many kinds
                cause = error
            failed = [reason for reason in world.gather(reason_of(cause), str | None) if reason]
            reasons += failed[:1]
            if not failed:
                us = max(world.gather(self._microseconds(*call.tensors, call.out), float))
                measured.append((us, choice, self.workspace))
        if not measured:
            raise RuntimeError(f"Iris fails: {reasons[0]}")
        _, self.choice, self.workspace = min(measured, key=lambda row: row[0])

    def _microseconds(self, *tensors: Tensor) -> float:
        started = time.perf_counter()
        for _ in range(REPEATS):
            self(*tensors)
        self.context.world.synchronize()
        return (time.perf_counter() - started) / REPEATS * 1e6

    @contextmanager
    def barriers(self) -> Iterator[None]:
        """The operator runs after the inputs of all ranks are in place, and ends before one of them writes there again."""
        self.iris.device_barrier()
        yield
        self.iris.device_barrier()


class _Capturable:
    """A context of Iris, whose barrier is on the device and can be captured in a graph."""

    def __init__(self, iris: Any) -> None:
        self._iris = iris

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iris, name)

    def barrier(self, *_: Any, **__: Any) -> None:
        self._iris.device_barrier()


TILES: tuple[Mapping[str, Any], ...] = (
    {}, {"block_size_m": 128, "block_size_n": 128}, {"block_size_m": 64, "block_size_n": 128, "group_size_m": 8},
    {"block_size_m": 16, "block_size_n": 128},
)  # fmt: skip
"""Settings of `iris.ops.FusedConfig`: the defaults, and smaller tiles, of which the last is for few rows."""
COPIES: tuple[Mapping[str, Any], ...] = (
    {}, {"block_size_m": 16, "block_size_n": 256, "comm_sms": 128}, {"block_size_m": 8, "block_size_n": 512, "comm_sms": 128},
)  # fmt: skip
"""Settings of `iris.ccl.Config`."""


class IrisSum(IrisCall[P]):
    """Adds up the ranks' `partial` into `sum` on all ranks, by iris.ccl.all_reduce."""

    CHOICES = ({}, *({**copies, "all_reduce_variant": "one_shot"} for copies in COPIES))

    def add_up(self) -> None:
        """Enqueues the sum, with the barriers before and after."""
        from iris.ccl.all_reduce import all_reduce
        from iris.ccl.config import Config

        config = Config(**self.choice) if self.choice else None
        with self.barriers():
            self.workspace = all_reduce(
                self.rooms["sum"], self.rooms["partial"], self.iris, async_op=True, config=config, workspace=self.workspace
            )
