"""The heap of GPUs that reach each other in the symmetric memory of Iris (AMD's `iris`, on AMD and NVIDIA GPUs): one slab."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

from autotax.core.problem import power_of_two
from autotax.heap.base import Heap, HeapError
from autotax.heap.world import World, agreed, apart, together

T = TypeVar("T")
LEAST = 4 << 20
"""Bytes of the heaps that find out which allocators work."""
CHUNK = 256 << 20
"""Iris maps memory in chunks of this size. A smaller heap is one chunk, whose size must be a power of two."""
SLACK = 32 << 20
"""Bytes in addition to the slab, for Iris's rounding and its own use."""

INSTALL = "pip install --no-deps tokenspeed-iris tokenspeed-tritonblas"
"""Installs the packages that the heap and `iris.ops` import. Benchmarks alone use what else tokenspeed-tritonblas names."""


class IrisHeap(Heap):
    """Takes all memory from Iris in one piece: each allocation there is collective and may move every rank's base."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world)

        def allocate(context: Any) -> tuple[Any, torch.Tensor, list[int]]:
            slab = context.empty((size,), dtype=torch.uint8)
            # The bases must be read after the allocation, which may change them.
            heap_bases = [int(base) for base in context.get_heap_bases().tolist()]
            if len(heap_bases) != world.size:
                raise HeapError(f"Iris has {len(heap_bases)} ranks instead of {world.size}")
            return context, slab, heap_bases

        context, self.slab, heap_bases = in_context(world, size, allocate)
        self.allocator = type(getattr(getattr(context, "heap", None), "allocator", None)).__name__
        """The name of the class in Iris that allocated the slab."""
        offset = self.slab.data_ptr() - heap_bases[world.rank]
        offset = agreed(world, "the offset of the slab in the heap of Iris", offset)
        bases = [base + offset for base in heap_bases]
        self.bases = torch.tensor(bases, dtype=torch.int64, device=self.slab.device)
        self._slabs = [self.slab if rank == world.rank else _view(base, self.slab) for rank, base in enumerate(bases)]
        # The mappings of the peers' memory live as long as the context.
        self.context = context

    def close(self) -> None:
        # Iris frees nothing by itself. Its heap is freed with the last reference to it, and its parts refer to each other in
        # cycles.
        super().close()
        if self.context is not None:
            self.context = None
            gc.collect()


def in_context(world: World, nbytes: int, work: Callable[[Any], T]) -> T:
    """The result of `work` with a new context of Iris, whose memory lives as long as something refers to it. Collective.

    Args:
        world: The ranks, which are all ranks of this job.
        nbytes: Bytes that `work` allocates on each rank.
        work: Takes the context; it may call collectives of the context.

    Raises:
        HeapError: on all ranks alike, within seconds of the first failure of a rank.
    """
    with together(world, "use Iris"):
        iris = _import_iris()
    task = f"allocate slabs of {nbytes} bytes with Iris"
    with together(world, task):
        _try_to_allocate(nbytes + SLACK, world.device)
        names = _allocators(iris, world)

    everywhere = set.intersection(*map(set, world.gather(names, list[str])))
    if not everywhere:
        raise HeapError(f"no allocator of Iris works on all ranks; on rank {world.rank} work {', '.join(names)}")
    allocator = next(name for name in names if name in everywhere)
    options = {"allocator_type": allocator} if allocator else {}
    return apart(world, task, lambda: work(iris.iris(_in_chunks(nbytes + SLACK), **options)))


def _import_iris() -> ModuleType:
    try:
        import iris
    except ModuleNotFoundError as error:
        raise HeapError(f"the package {error.name} is not installed; get Iris by `{INSTALL}`") from error
    except OSError as error:
        raise HeapError(f"Iris cannot load the libraries of the GPU, {error}; install ROCm or CUDA on this machine") from error
    if not os.environ.get("IRIS_LOG_LEVEL"):
        logging.getLogger("iris").setLevel(logging.CRITICAL + 1)  # errors reach the user as exceptions
    if not hasattr(iris, "iris"):
        raise HeapError(
            f"the module {iris.__file__} is another project called iris; `pip uninstall` it, then `{INSTALL}`"
        )
    return iris


def _in_chunks(nbytes: int) -> int:
    """The size of a heap in which `nbytes` fit and that Iris can map."""
    return power_of_two(nbytes) if nbytes < CHUNK else nbytes


def _allocators(iris: ModuleType, world: World) -> list[str]:
    """The allocators of Iris that work on this rank's device, the best first; [""] for an Iris without a choice.

    Each is asked for a byte, without its peers. Iris's default maps peers by HIP alone; on NVIDIA GPUs an allocator must map the
    chunks of its peers by the driver of the vendor. Raises HeapError if none works.
    """
    choice = inspect.signature(iris.iris).parameters.get("allocator_type")
    if choice is None:
        return [""]
    module = importlib.import_module("iris.host.memory.allocators")
    names, errors = list[str](), list[str]()
    for kind in (value for value in vars(module).values() if isinstance(value, type) and not inspect.isabstract(value)):
        if world.backend == "rocm" or hasattr(kind, "import_peer_chunk"):
            try:
                allocator = kind(LEAST, world.device.index or 0, 0, 1)
                allocator.allocate(1, torch.uint8)
                getattr(allocator, "close", lambda: None)()
            except Exception as reason:  # Iris raises errors of many kinds
                errors.append(str(reason))
            else:
                names.append(re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Allocator")).lower())
    if not names:
        raise HeapError(f"no allocator of Iris works: {'; '.join(errors) or 'none maps the memory of peers by the driver'}")
    return sorted(names, key=lambda name: name != choice.default)


def _try_to_allocate(nbytes: int, device: torch.device) -> None:
    """Raises torch's error if the device has too little memory. Iris allocates on each rank and then waits for all ranks, so a
    rank that fails inside Iris blocks the others for good. The memory tried here is given back to the device.
    """
    torch.empty(nbytes, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _view(address: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor over the bytes at `address`, which the device of `like` can reach; it owns nothing.

    The device is that of `like`. The driver would name the peer that owns the memory, and then that peer would carry out copies
    of the tensor.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, like.device, like.nbytes)
    return like.new_empty(0).set_(storage)
