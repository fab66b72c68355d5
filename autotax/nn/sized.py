"""Sizes of calls: those to prepare for, the memory of those that came, and the base of modules with one varying size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.hardware import Hardware
from autotax.nn.base import Module, Request
from autotax.nn.consensus import DTYPES, warn_of_sizes
from autotax.operators import registry

K = TypeVar("K")
V = TypeVar("V")

MOST_KNOWN = 4096
"""The most sets of sizes that a module remembers. A server may bring new ones for years, such as numbers of pages."""


class SizedModule(Module):
    """A module for calls of one varying size, such as a batch. A call uses the config of the next greater size prepared for."""

    SIZE: str
    """The field of its problems that varies."""
    _dtype: torch.dtype
    _limits: dict[str, Any]
    """The fields of the problem of the greatest size."""
    _request: Request
    _most: Any
    """The problem of the greatest size."""
    _plain: Any
    """The call in plain torch."""
    _calls: dict[Any, Callable[..., Any]]
    """Calls by their size."""
    _known: dict[Any, Any]
    """Calls and their checks by the shapes of tensors."""
    _made: dict[int, list[Any]]
    """Kernels by the sizes for which they were prepared."""

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_calls": {}, "_known": {}, "_made": {}, "_most": None, "_plain": None}

    def _greatest(self, dtype: str) -> Any:
        """The problem of the greatest size. Raises UsageError."""
        raise NotImplementedError

    def _make_plain(self) -> Any:
        """The call in plain torch. Collective."""
        raise NotImplementedError

    def _make(self) -> None:
        conditions, config, sizes = self._request

        def problems_here() -> list[Any]:
            if self._dtype not in DTYPES:
                raise UsageError(f"dtype is {self._dtype}; allowed are {', '.join(map(str, DTYPES))}: give one of these")
            most = self._greatest(DTYPES[self._dtype])
            size = getattr(most, self.SIZE)
            return [replace(most, **{self.SIZE: some}) for some in sizes_up_to(size, 1, [size] if config else sizes)]

        problems, deployed = self._agreed(problems_here, conditions)
        if self._world:
            warn_of_sizes(type(self).__name__)
        self._most = problems[-1]
        self._plain = self._make_plain()
        self._look_up(problems, deployed, config)

    def _baselines(self, pairs: list[tuple[Any, Config | None]], hardware: Hardware) -> list[tuple[Any, Config]]:
        """On GPUs that of the greatest problem: one bulk-synchronous kernel serves every size."""
        problem, _ = pairs[-1]
        return [(problem, registry.of(problem).fallback(problem, hardware))] if hardware.on_gpu else []

    def _store(self, operators: list[Any], notes: list[str]) -> None:  # noqa: ARG002
        for operator in operators:
            self._made.setdefault(getattr(operator.problem, self.SIZE), []).append(operator)

    def _of_greatest(self) -> list[Any]:
        """Bulk-synchronous kernels, which serve every size."""
        return [kernel for kernel in self._made.get(getattr(self._most, self.SIZE), []) if kernel.config.variant == "bsp"]

    def tuned_for(self, size: int) -> bool:
        """Whether calls of this size run a tuned config that is not bulk-synchronous. All ranks have the same answer."""
        bucket = next((choice for choice in self._choices if size <= getattr(choice.problem, self.SIZE)), None)
        return bucket is not None and bucket.config is not None and bucket.config.variant != "bsp"

    def _fitting(self, size: int) -> Callable[..., Any]:
        """The call for a size: with the tuned config, else bulk-synchronous."""
        bucket = next(choice for choice in self._choices if size <= getattr(choice.problem, self.SIZE))
        kernels = self._made.get(getattr(bucket.problem, self.SIZE), []) if bucket.config else []
        chosen = [kernel for kernel in kernels if kernel.config == bucket.config]
        fits = (kernel.fitted(replace(self._most, **{self.SIZE: size})) for kernel in [*chosen, *self._of_greatest()])
        call: Callable[..., Any] = next((fit for fit in fits if fit), self._plain)
        return call


def nothing(*_: Any) -> None:
    """An empty call."""


def remember(memory: dict[K, V], key: K, value: V) -> V:
    """Stores a value in a module's memory, which is cleared first when it is full. Returns the value."""
    if len(memory) >= MOST_KNOWN:
        memory.clear()
    memory[key] = value
    return value


def first_size(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def several(sizes: Any) -> tuple[Any, ...]:
    """The sizes that were given. Raises UsageError for what is no list."""
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise UsageError(f"sizes is {sizes!r}; it must be a list of whole numbers: give one, or none")
    return tuple(sizes)


def greatest_rows(max_m: Any, unit: int) -> int:
    """The greatest number of rows up to `max_m` that the unit divides. Raises UsageError."""
    if isinstance(max_m, bool) or not isinstance(max_m, int) or max_m < unit:
        least = f"{unit}, the number of ranks" if unit > 1 else "1"
        raise UsageError(f"max_m is {max_m!r}; it must be a whole number from {least}: give a greater one")
    return max_m // unit * unit


def sizes_up_to(most: int, step: int, sizes: Any) -> list[int]:
    """Sizes to prepare for: step, 2 step, 4 step ... and `most`, or the given sizes and `most`."""
    if sizes is None:
        return sorted({step << i for i in range((most // step).bit_length())} | {most})
    wrong = [size for size in several(sizes) if type(size) is not int or not 1 <= size <= most or size % step]
    if wrong:
        raise UsageError(
            f"sizes has {', '.join(map(repr, wrong))}; a size must be a multiple of {step} from {step} to {most}: give others"
        )
    return sorted({*sizes, most})
