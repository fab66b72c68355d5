"""The same keys in Triton's cache for every process, whatever it compiled before.

Triton hashes a function when it is first needed, and takes over the global constants of the functions it calls only if those
have been hashed already: the key of a kernel depends on which kernels came before it. Hashing all functions once, in one order,
before anything is compiled makes keys agree, so that ranks find what compilers left for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import autotax.kernels
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import LOCAL_DATA_SHARE, Hardware
from autotax.heap.base import Heap
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Compiled, Context
from autotax.kernels.resources import Resources, resources_of
from autotax.operators.calls import make_inputs


@functools.cache
def fix_cache_keys() -> None:
    """Hashes every device function of this package. Call it before the first compilation of a process; where kernels are
    interpreted it imports them and does no more.
    """
    package = autotax.kernels
    for info in sorted(pkgutil.walk_packages(package.__path__, package.__name__ + "."), key=lambda info: info.name):
        for value in vars(importlib.import_module(info.name)).values():
            # Interpreted, kernels call plain functions, which have no hash; those in Gluon, which are not, cannot be used then.
            if isinstance(value, JITFunction) and not triton.knobs.runtime.interpret:
                _ = value.cache_key


# Compiling a variant for a GPU that is not in this machine.

META = torch.device("meta")

# What decides how a kernel compiles and what fits; the rest of a Hardware does not matter here.
_KNOWN = {
    "cuda:90": ("cuda", 132, 232448),
    "cuda:100": ("cuda", 148, 232448),
    "hip:gfx942": ("rocm", 304, 64 * 1024),
    "hip:gfx950": ("rocm", 256, LOCAL_DATA_SHARE["gfx950"]),
}


TARGETS = tuple(_KNOWN)


def known_hardware(target: str) -> Hardware:
    """A stand-in for hardware of a target, for spaces and compilation. Raises KeyError for an unknown target."""
    backend, processors, shared = _KNOWN[target]
    return Hardware(backend, f"any {target}", target, 8, 0, processors, shared, 0, "unknown")


class MetaHeap(Heap):
    """A heap without memory: tensors have shapes, types and (aligned) addresses, nothing else."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world)
        self.slab = torch.empty(size, dtype=torch.uint8, device=META)
        self.bases = torch.empty(world.size, dtype=torch.int64, device=META)

    def peer_slab(self, rank: int) -> torch.Tensor:  # noqa: ARG002
        return self.slab

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:  # noqa: ARG002
        return tensor

    def close(self) -> None:
        pass


class _Driver:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)  # a JIT function keeps what it compiled by device: one device a target

    def get_current_stream(self, device: str) -> int:  # noqa: ARG002
        return 0


@contextlib.contextmanager
def pretend(target: str) -> Iterator[None]:
    """Triton compiles for this target meanwhile."""
    backend, arch = target.split(":")
    wide = 64 if backend == "hip" else 32
    driver = triton.runtime.driver
    before = driver._active  # the property `active` would look for a GPU
    driver.set_active(_Driver(GPUTarget(backend, arch if backend == "hip" else int(arch), wide)))
    try:
        yield
    finally:
        driver.set_active(before)


def compile_offline(
    problem: Problem, config: Config, hardware: Hardware, kind: type[Context] | None = None
) -> list[Compiled]:
    """Compiles all kernels of a config for `hardware.target`, in a context of another `kind` if one is given. Raises what Triton
    raises when one does not compile.
    """
    fix_cache_keys()
    nobody: Any = None
    world = World(0, problem.world_size, "meta", META, nobody, nobody, nobody)
    context = (kind or Context)(world, MetaHeap(world, 1 << 40), hardware)
    operator = prepare(problem, config, context)
    call = make_inputs(problem, 0, 0, META)
    with pretend(hardware.target), context.rehearsal() as compiled:
        operator(*call.tensors, call.out)
    return compiled


def resources_offline(problem: Problem, config: Config, hardware: Hardware) -> list[Resources]:
    """The same, with what each kernel takes of the GPU."""
    found: list[Resources] = []

    class Inspecting(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            found.append(resources_of(kernel.__name__, binary))

    compile_offline(problem, config, hardware, Inspecting)
    return found
