"""The base of alternatives of Iris: memory in a context of Iris, its barriers around a call, and the fastest of a few settings."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from autotax.core.config import Config
from autotax.heap.world import reason_of
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel, P
from autotax.operators import registry
from autotax.operators.inputs import Draw

REPEATS = 5
"""Calls that decide between settings."""


class IrisCall(Kernel[P]):
    """Mixed into a kernel that calls an operator of `iris.ops` or `iris.ccl`.

    Tensors that peers read or write lie in the memory of Iris. Callers' tensors lie elsewhere, so a call copies there and back. The
    operators synchronise on the host, which a graph cannot capture; here the device barriers of Iris do it.
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
    {},
    {"block_size_m": 128, "block_size_n": 128},
    {"block_size_m": 64, "block_size_n": 128, "group_size_m": 8},
    {"block_size_m": 16, "block_size_n": 128},
)
"""Settings of `iris.ops.FusedConfig`: the defaults, and smaller tiles, of which the last is for few rows."""
COPIES: tuple[Mapping[str, Any], ...] = (
    {},
    {"block_size_m": 16, "block_size_n": 256, "comm_sms": 128},
    {"block_size_m": 8, "block_size_n": 512, "comm_sms": 128},
)
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
