"""A STAND-IN for ROCm/iris on CPU ranks, NOT Iris: its call signatures and its awkward sides, over shared memory.

Like Iris, a context has one heap per rank; tensors are carved out of it and never freed; each allocation is collective
and maps the peers anew, so that bases read before it are stale; and a base is that of the heap, not of any tensor. A rank
that has no memory fails alone, before the collectives in which the others then wait; and a context is part of a cycle of
references.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ALIGNMENT = 1024
OWN = 3 * ALIGNMENT
"""Bytes that the context takes for itself before it serves anybody."""


WITHOUT_MEMORY: set[int] = set()
"""Ranks on which a context cannot be made."""


class Iris:
    def __init__(self, heap_size: int) -> None:
        self.cur_rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.fd = -1
        self.itself = self
        if self.cur_rank in WITHOUT_MEMORY:
            raise MemoryError("HIP out of memory")
        self.heap_size = heap_size
        self.fd = os.memfd_create("iris-standin")
        os.ftruncate(self.fd, heap_size)
        self.pool = torch.frombuffer(mmap.mmap(self.fd, heap_size), dtype=torch.uint8)
        self.used = OWN
        self.refresh_peer_access()

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`empty(2, 3)`, `empty((2, 3))` and `empty([2, 3])` are the same."""
        while len(size) == 1 and isinstance(size[0], tuple | list):
            size = tuple(size[0])
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(size) * dtype.itemsize
        if self.used + nbytes > self.heap_size:
            raise MemoryError("Heap out of memory")
        start = self.used
        self.used += math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
        self.refresh_peer_access()
        return self.pool[start : start + nbytes].view(dtype).reshape(size)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.empty(*size, dtype=dtype).zero_()

    def get_heap_bases(self) -> torch.Tensor:
        return torch.from_numpy(np.array([pool.data_ptr() for pool in self.pools], dtype=np.uint64))

    def get_rank(self) -> int:
        return self.cur_rank

    def get_num_ranks(self) -> int:
        return self.num_ranks

    def refresh_peer_access(self) -> None:
        # The former mappings go only after the new ones are there, so no peer keeps its address.
        self.pools = [self.pool if rank == self.cur_rank else peer for rank, peer in enumerate(self.map_peers())]

    def map_peers(self) -> list[torch.Tensor]:
        files: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(files, (os.getpid(), self.fd))
        pools = []
        for pid, fd in files:
            with Path(f"/proc/{pid}/fd/{fd}").open("r+b", buffering=0) as file:
                pools.append(torch.frombuffer(mmap.mmap(file.fileno(), self.heap_size), dtype=torch.uint8))
        dist.barrier()
        return pools


def iris(heap_size: int = 1 << 30) -> Iris:
    """A context, as the Iris of 2025 makes it: without a choice of allocators."""
    return Iris(heap_size)
