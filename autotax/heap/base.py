"""Symmetric memory: one slab per rank, laid out alike on all ranks, that every rank can address.

An address on a peer is `own pointer - own base + peer's base`. That holds only while all ranks allocate the same sizes
in the same order, so the heap keeps a digest of its allocations and `check()` compares it across the ranks.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import logging
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from autotax.core.problem import power_of_two
from autotax.heap.world import HeapError, World, agreed, apart, together

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
        """A tensor in this rank's slab, contents unspecified, by equal calls on all ranks. Raises HeapError for a full slab."""
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
        """Forgets all allocations. Collective: no rank may still use a tensor of this heap. Waits for all ranks."""
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
    """Keeps torch, within this block, from binding the slabs to a multicast object, which no kernel of ours uses."""
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


T = TypeVar("T")
# The heap of GPUs that reach each other in the symmetric memory of Iris (AMD's `iris`, on AMD and NVIDIA GPUs): one slab.

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
        raise HeapError(f"the module {iris.__file__} is another project called iris; `pip uninstall` it, then `{INSTALL}`")
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
