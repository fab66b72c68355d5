"""The heap of CPU ranks on one host: an anonymous memory file per rank that every rank maps.

The files have no name in any file system: the kernel frees each file when the last process that maps it ends, even by a crash.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from typing import NamedTuple

import torch

from autotax.heap.base import Heap
from autotax.heap.collective_errors import together
from autotax.heap.world import World


class SharedHeap(Heap):
    """Maps the slab of every rank into this process, at addresses that differ from process to process."""

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

    def peer_slab(self, rank: int) -> torch.Tensor:
        return self._slabs[rank]

    def close(self) -> None:
        # A slab is unmapped with the last tensor that views it, so a tensor kept by mistake cannot crash the process.
        self._slabs = []
        self.slab = torch.empty(0, dtype=torch.uint8)
        self.bases = torch.empty(0, dtype=torch.int64)


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
