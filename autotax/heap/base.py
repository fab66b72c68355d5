"""Symmetric memory: one slab per rank, laid out alike on all ranks, that every rank can address.

An address on a peer is `own pointer - own base + peer's base`. That holds only while all ranks allocate the same sizes
in the same order, so the heap keeps a digest of its allocations and `check()` compares it across the ranks.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from autotax.heap.world import HeapError, World, agreed, together

ALIGNMENT = 1024
"""Bytes; suits 16-byte vector access, TMA descriptors and every backend's pages."""


class Heap:
    """One rank's handle on the slabs of all ranks. Constructors of subclasses set the attributes below."""

    world: World
    slab: torch.Tensor
    """uint8 [size]: this rank's memory."""
    bases: torch.Tensor
    """int64 [world size], on the device: the address at which this rank sees each rank's slab."""
    _slabs: list[torch.Tensor]
    """The slabs of all ranks, as this rank's device can read and write them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._used = 0
        self._digest = hashlib.sha256()

    def peer_slab(self, rank: int) -> torch.Tensor:
        """uint8 [size]: the slab of `rank`."""
        return self._slabs[rank]

    def close(self) -> None:
        """Gives the memory back; safe to call twice. No tensor of this heap may be used afterwards."""
        self._slabs = []
        self.slab, self.bases = self.slab.new_empty(0), self.bases.new_empty(0)

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


# The heap of CPU ranks on one host: an anonymous memory file per rank that every rank maps.

class SharedHeap(Heap):
    """Maps the slab of every rank into this process, at addresses that differ from process to process.

    The files have no name in any file system. The kernel frees each when the last process that maps it ends, even by a crash. A
    slab is unmapped with the last tensor that views it, so a tensor kept by mistake cannot crash the process.
    """

    def __init__(self, world: World, size: int) -> None:
        super().__init__(world)
        with ExitStack() as on_exit:
            with together(world, f"create slabs of {size} bytes in shared memory"):
                fd = os.memfd_create("autotax-heap")
                on_exit.callback(os.close, fd)
                os.ftruncate(fd, size)
            files = world.gather(_File(os.getpid(), fd, os.fstat(fd).st_ino), _File)
            # The end of the block waits for all ranks, so no file is closed before every rank has mapped it.
            with together(world, "map each other's slabs; CPU ranks must run as one user on one host"):
                self._slabs = [_map(file, size) for file in files]
        self.slab = self._slabs[world.rank]
        self.bases = torch.tensor([slab.data_ptr() for slab in self._slabs], dtype=torch.int64)


class _File(NamedTuple):
    """The address of a memory file for other processes of this host. The inode proves that they opened the right file."""

    pid: int
    fd: int
    inode: int


def _map(file: _File, size: int) -> torch.Tensor:
    """uint8 [size]: the memory of `file`, mapped for as long as a tensor views it."""
    fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDWR)
    try:
        if os.fstat(fd).st_ino != file.inode:
            raise OSError(f"process {file.pid} is not a rank of this job")
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)


class SymmetricHeap(Heap):
    """The heap of NVIDIA GPUs that reach each other, in torch's symmetric memory: maps the slab of every GPU into this process.

    Torch has symmetric memory for ROCm too, where it can replace Iris. This was never run on ROCm.
    """

    def __init__(self, world: World, size: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

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
