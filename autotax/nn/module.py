"""What the modules share: a handle by which operators of torch.ops find them, checks of what a call brings, and their end."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.errors import UsageError
from autotax.hardware import Hardware
from autotax.heap.world import World
from autotax.nn.agree import all_or_none, deployed_as, require_alike
from autotax.problem import Problem

if TYPE_CHECKING:
    from autotax.kernels.operator import Operator
    from autotax.nn.prepare import Prepared

P = TypeVar("P", bound=Problem)
K = TypeVar("K")
V = TypeVar("V")

VECTOR_BYTES = 16
"""What kernels rely on at the start of a tensor."""
MOST_KNOWN = 4096
"""Sets of sizes that a module remembers. A server may bring new ones for years: pages of the longest sequence, for instance."""
NO_KERNELS = "kernels cannot run on these ranks: CPU ranks need TRITON_INTERPRET=1 in the environment, GPUs must not have it"

_modules: WeakValueDictionary[int, Module] = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class Choice:
    """What runs for calls up to the size of `problem`; `config` is None where it is bulk-synchronous."""

    problem: Problem
    config: Config | None


def module_of(handle: int) -> Any:
    """The module with a handle. Raises UsageError if it is gone."""
    module = _modules.get(handle)
    if module is None:
        raise UsageError(f"there is no autotax module number {handle} any more; keep the module as long as what was made from it")
    return module


def world_of(group: dist.ProcessGroup | None, device: torch.device) -> World | None:
    """The ranks of a group; None where there is only this one."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    world = World.of(group, device)
    return world if world.size > 1 else None


def kernels_run_here(world: World, on_gpu: bool) -> bool:
    """Whether all ranks can run kernels: compiled on GPUs, interpreted on CPUs. Collective."""
    try:
        import triton

        here = bool(triton.knobs.runtime.interpret) != on_gpu
    except ImportError:
        here = False
    return all(world.gather(here))


class Module(torch.nn.Module):
    """A module of this package on one rank."""

    def __init__(self, world: World | None, device: torch.device) -> None:
        super().__init__()
        self.handle = next(_numbers)
        """Names this module to torch.ops.autotax.*; the same on all ranks only if all have made the same modules."""
        self.choices: tuple[Choice, ...] = ()
        """What runs, by size, the same on all ranks."""
        self.world_size = world.size if world else 1
        self._world = world
        self._device = device
        self._prepared: Prepared | None = None
        self._closed = False
        _modules[self.handle] = self

    def _agreed(self, problems: Callable[[], list[P]], conditions: Conditions | None) -> tuple[list[P], Conditions]:
        """The problems to prepare for and the conditions of calls, the same on all ranks; bulk-synchronous until something is
        prepared. Collective.
        """
        on_gpu = self._device.type != "cpu"
        found, deployed = all_or_none(self._world, lambda: (problems(), deployed_as(conditions, on_gpu)))
        keys = ", ".join(problem.key for problem in found)
        require_alike(self._world, type(self).__name__, f"{keys}, deployed as {deployed.key}")
        self.choices = tuple(Choice(problem, None) for problem in found)
        return found, deployed

    def _ready(self, wanted: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Operator[Any]]:
        """Operators for what of `wanted` can be had; `notes` then say what cannot. Collective."""
        assert self._world is not None
        if wanted and not kernels_run_here(self._world, hardware.on_gpu):
            notes.append(NO_KERNELS)
            wanted = []
        if not wanted:
            return []
        from autotax.nn.prepare import Prepared

        self._prepared = Prepared(self._world, hardware, wanted, self._rehearsals)
        notes += self._prepared.notes
        return [operator for operator in self._prepared.operators if operator]

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """Calls of every kind of size that the operator of `problem` can come to make."""
        raise NotImplementedError

    def failure(self) -> str | None:
        """Why results since construction cannot be trusted, or None: a rank was waited for in vain, for ten minutes.

        Waits for the device. Afterwards the module is unusable.
        """
        operators = self._prepared.operators if self._prepared else []
        return next((note for operator in operators if operator and (note := operator.failure())), None)

    def close(self) -> None:
        """Gives the memory back. Collective over the group; no call may follow. Safe to call twice, and not to call at all."""
        if self._closed:
            return
        self._closed = True
        _modules.pop(self.handle, None)
        try:
            if self._world and self._prepared:
                self._world.synchronize()
                self._world.barrier()
                self._prepared.heap.close()
        finally:  # a call of what could not be closed in order must be refused too
            self._prepared = None
            self._forget()

    def _forget(self) -> None:
        """Drops workspaces."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"this {type(self).__name__} was closed: make another")

    def _warn(self, notes: list[str]) -> None:
        if notes:
            name = type(self).__name__
            warnings.warn(f"{name} takes bulk-synchronous there: {'; '.join(notes)}", RuntimeWarning, stacklevel=4)


def require_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError unless a tensor has this type and shape, contiguous and aligned."""
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        given = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise UsageError(f"{name} is {given}; it must be {dtype} {list(shape)} on {device}: give such a tensor")
    if not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
        raise UsageError(
            f"{name} is not contiguous or does not begin at a multiple of {VECTOR_BYTES} bytes; kernels need both: "
            "give a clone(memory_format=torch.contiguous_format)"
        )


def remember(known: dict[K, V], key: K, value: V) -> V:
    """Adds to what a module knows, which begins anew when it is full; the value."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = value
    return value


def first_size(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def require_no_grad(*tensors: Tensor) -> None:
    """Raises UsageError where torch would record the call for a backward."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor.requires_grad:
            raise UsageError("an input or the weight requires a gradient; there is no backward: call this under torch.no_grad()")


def sizes_up_to(most: int, step: int, given: Any) -> list[int]:
    """Sizes to prepare for: step, 2 step, 4 step ... and `most`, or those that are given and `most`."""
    if given is None:
        return sorted({step << i for i in range((most // step).bit_length())} | {most})
    wrong = [size for size in given if type(size) is not int or not 1 <= size <= most or size % step]
    if wrong:
        raise UsageError(
            f"sizes has {', '.join(map(repr, wrong))}; a size must be a multiple of {step} from {step} to {most}: give others"
        )
    return sorted({*given, most})
