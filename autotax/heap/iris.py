"""The heap of AMD GPUs that reach each other: one slab in the symmetric heap of ROCm/iris."""

from __future__ import annotations

from types import ModuleType

import torch

from autotax.heap.base import Heap, HeapError
from autotax.heap.joint import agreed, together
from autotax.heap.world import World

SLACK = 32 << 20
"""Bytes that Iris may round up and keep for itself, beside the slab."""

INSTALL = "pip install git+https://github.com/ROCm/iris.git"


class IrisHeap(Heap):
    """Takes all memory from Iris in one piece: each allocation there is collective and may move every rank's base."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world)
        with together(world, "use Iris"):
            iris = _import_iris()
        with together(world, f"allocate slabs of {size} bytes with Iris"):
            context = iris.iris(size + SLACK)
            self.slab = context.empty((size,), dtype=torch.uint8)
            # Only now: the bases that were true before the allocation may be stale.
            heap_bases = [int(base) for base in context.get_heap_bases().tolist()]
            if len(heap_bases) != world.size:
                raise HeapError(f"Iris has {len(heap_bases)} ranks instead of {world.size}")
            offset = self.slab.data_ptr() - heap_bases[world.rank]
        offset = agreed(world, "the offset of the slab in the heap of Iris", offset)
        bases = [base + offset for base in heap_bases]
        self.bases = torch.tensor(bases, dtype=torch.int64, device=self.slab.device)
        self._slabs = [self.slab if rank == world.rank else _view(base, self.slab) for rank, base in enumerate(bases)]
        # The mappings of the peers' memory live as long as the context.
        self._context = context

    def peer_slab(self, rank: int) -> torch.Tensor:
        return self._slabs[rank]

    def close(self) -> None:
        # Iris frees nothing by itself; its heap goes with the last reference to it.
        self._slabs = []
        self.slab = self.slab.new_empty(0)
        self.bases = self.bases.new_empty(0)
        self._context = None


def _import_iris() -> ModuleType:
    try:
        import iris
    except ModuleNotFoundError as error:
        raise HeapError(f"the package {error.name} is not installed; get Iris by `{INSTALL}`") from error
    except OSError as error:
        raise HeapError(f"Iris cannot load the ROCm libraries, {error}; install ROCm on this machine") from error
    if not hasattr(iris, "iris"):
        raise HeapError(
            f"the module {iris.__file__} is another project called iris; `pip uninstall` it, then `{INSTALL}`"
        )
    return iris


def _view(address: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor over the bytes at `address`, which the device of `like` can reach; it owns nothing.

    The device is given, not asked of the driver: the driver names the peer that owns the memory, and a tensor said to
    lie there would be copied from and to by that peer.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, like.device, like.nbytes)
    return like.new_empty(0).set_(storage)
