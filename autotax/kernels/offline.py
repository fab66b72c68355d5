"""Compiles kernels without their GPU, and makes Triton's cache keys the same in every process.

Triton hashes a function when it first needs the hash. The hash includes the global constants of called functions only if those
functions are already hashed. So the cache key of a kernel depends on the kernels compiled before it. Here all functions are
hashed once, in one order, before anything is compiled. The keys then agree, and ranks find what the compiler processes cached.
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
from autotax.operators.verification import make_inputs


@functools.cache
def fix_cache_keys() -> None:
    """Hashes every device function of the package, before a process compiles; interpreted kernels are only imported."""
    package = autotax.kernels
    for info in sorted(pkgutil.walk_packages(package.__path__, package.__name__ + "."), key=lambda info: info.name):
        for value in vars(importlib.import_module(info.name)).values():
            # Interpreted kernels call plain functions, which have no hash. Gluon kernels stay JIT functions but cannot be used
            # where kernels are interpreted, so they are not hashed.
            if isinstance(value, JITFunction) and not triton.knobs.runtime.interpret:
                _ = value.cache_key


# Compiling a variant for a GPU that is not in this machine.

META = torch.device("meta")

# Backend, processors, bytes of shared memory: these decide how a kernel compiles and whether it fits. The rest is irrelevant.
_KNOWN = {
    "cuda:90": ("cuda", 132, 232448), "cuda:100": ("cuda", 148, 232448), "hip:gfx942": ("rocm", 304, 64 * 1024),
    "hip:gfx950": ("rocm", 256, LOCAL_DATA_SHARE["gfx950"]),
}  # fmt: skip


TARGETS = tuple(_KNOWN)


def known_hardware(target: str) -> Hardware:
    """Hardware of a target, as search spaces and the compiler see it. Raises KeyError for an unknown target."""
    backend, processors, shared = _KNOWN[target]
    return Hardware(backend, f"any {target}", target, 8, 0, processors, shared, 0, "unknown")


class MetaHeap(Heap):
    """A heap without memory: tensors have only shapes, types and aligned addresses."""

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
    """The part of a Triton driver that compilation uses."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)  # a JIT function caches binaries per device, so each target is one device

    def get_current_stream(self, device: str) -> int:  # noqa: ARG002
        return 0


@contextlib.contextmanager
def pretend(target: str) -> Iterator[None]:
    """Makes Triton compile for this target inside the `with` block."""
    backend, arch = target.split(":")
    wide = 64 if backend == "hip" else 32
    driver = triton.runtime.driver
    before = driver._active  # the property `active` would look for a GPU
    driver.set_active(_Driver(GPUTarget(backend, arch if backend == "hip" else int(arch), wide)))
    try:
        yield
    finally:
        driver.set_active(before)


def compile_offline(problem: Problem, config: Config, hardware: Hardware, kind: type[Context] | None = None) -> list[Compiled]:
    """Compiles all kernels of a config for `hardware.target`, in a context of class `kind`. Raises Triton's errors."""
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
    """Compiles like `compile_offline` and returns the GPU resources of each kernel."""
    resources: list[Resources] = []

    class Inspecting(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            resources.append(resources_of(kernel.__name__, binary))

    compile_offline(problem, config, hardware, Inspecting)
    return resources
