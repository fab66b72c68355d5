"""Symmetric memory: one slab per rank, laid out alike on all ranks, that every rank can address.

An address on a peer is `own pointer - own base + peer's base`. That holds only while all ranks allocate the same sizes
in the same order, so the heap keeps a digest of its allocations and `check()` compares it across the ranks.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from autotax.heap.world import World

ALIGNMENT = 1024
"""Bytes; suits 16-byte vector access, TMA descriptors and every backend's pages."""


class HeapError(RuntimeError):
    """The heap is full, or its ranks made different allocations."""


class Heap(ABC):
    """One rank's handle on the slabs of all ranks.

    Implementations provide `slab` (uint8 [size], this rank's memory), `bases` (int64 [world size], on the device: the
    address at which THIS rank sees each rank's slab), `peer_slab` and `close`; the allocator is shared.
    """

    world: World
    slab: torch.Tensor
    bases: torch.Tensor

    def __init__(self, world: World) -> None:
        self.world = world
        self._used = 0
        self._digest = hashlib.sha256()

    @abstractmethod
    def peer_slab(self, rank: int) -> torch.Tensor:
        """uint8 [size]: the slab of `rank` as this rank's device can read and write it."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back; safe to call twice. No tensor of this heap may be used afterwards."""

    @property
    def size(self) -> int:
        return self.slab.numel()

    @property
    def used(self) -> int:
        return self._used

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's slab, its contents unspecified. Raises HeapError when the slab is full.

        Every rank must make the same calls in the same order.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        start, end = self._used, self._used + nbytes
        if end > self.size:
            free = max(0, self.size - start)
            raise HeapError(f"a tensor of {nbytes} bytes does not fit: {free} of {self.size} bytes are free")
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        self._digest.update(f"{start},{nbytes};".encode())
        return self.slab[start:end].view(dtype).view(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Like `alloc`, filled with zeros. Peers may see the zeros only after `check()`."""
        return self.alloc(shape, dtype).zero_()

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The tensor at the same place in the slab of `rank`. `tensor` must come from `alloc` and be contiguous."""
        if not tensor.is_contiguous():
            raise HeapError("the tensor is not contiguous, so it has no like on a peer; pass the one that `alloc` gave")
        if not tensor.numel():
            return tensor  # torch gives an empty tensor no address
        start = tensor.data_ptr() - self.slab.data_ptr()
        nbytes = tensor.numel() * tensor.element_size()
        if not 0 <= start <= start + nbytes <= self.size:
            raise HeapError("the tensor does not lie in this heap")
        return self.peer_slab(rank)[start : start + nbytes].view(tensor.dtype).view(tensor.shape)

    def check(self) -> None:
        """Waits for all ranks and their devices; raises HeapError if they did not allocate alike. Collective."""
        self.world.synchronize()
        mine = (self._digest.hexdigest()[:16], self._used)
        others = self.world.gather(mine, tuple[str, int])
        if any(other != mine for other in others):
            layouts = "; ".join(f"rank {rank}: {digest}, {used} bytes" for rank, (digest, used) in enumerate(others))
            raise HeapError(f"the ranks did not allocate alike ({layouts})")

    def reset(self) -> None:
        """Forgets all allocations. Collective: no rank may still use a tensor of this heap.

        Returns when every rank has called it.
        """
        self.world.synchronize()
        self.barrier()
        self._used = 0
        self._digest = hashlib.sha256()

    def barrier(self) -> None:
        """Waits for all ranks (bounded; raises RankTimeout naming the missing ones)."""
        self.world.barrier()
