"""The heap of NVIDIA GPUs that reach each other: torch's symmetric memory, allocated and exchanged once.

Torch has symmetric memory for ROCm too, where it can replace Iris. This was never run on ROCm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed._symmetric_memory as symm_mem

from autotax.heap.base import Heap
from autotax.heap.world import World, agreed, together


class SymmetricHeap(Heap):
    """Maps the slab of every GPU into the address space of this one."""

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world)
        with together(world, f"allocate slabs of {size} bytes of symmetric memory"):
            self.slab = symm_mem.empty(size, dtype=torch.uint8, device=world.device)
        with together(world, "map each other's slabs; all GPUs must be peers, as `autotax doctor` says"):
            with without_multicast():
                handle = symm_mem.rendezvous(self.slab, world.data)
            # torch may carve the slab out of a larger block of its pool; the pointers of the handle are the blocks'.
            offset = self.slab.data_ptr() - handle.buffer_ptrs[world.rank]
        offset = agreed(world, "the offset of the slab in its block", offset)
        self._slabs = [handle.get_buffer(rank, (size,), torch.uint8, offset) for rank in range(world.size)]
        bases = [pointer + offset for pointer in handle.buffer_ptrs]
        self.bases = torch.tensor(bases, dtype=torch.int64, device=world.device)
        # The mappings of the peers' memory live as long as the handle.
        self._handle: object = handle

    def close(self) -> None:
        self._handle = None
        super().close()


@contextmanager
def without_multicast() -> Iterator[None]:
    """Keeps torch from binding the slabs to a multicast object, which no kernel of ours uses.

    The setting is restored, because other users of symmetric memory in this process may need it.
    """
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
