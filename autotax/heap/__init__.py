"""Symmetric memory: one slab per rank that every rank can address, on CUDA, ROCm or the CPU ranks of one host."""

from __future__ import annotations

from autotax.hardware import symmetric_heap
from autotax.heap.base import Heap, HeapError, IrisHeap, SharedHeap, SymmetricHeap
from autotax.heap.world import RankTimeout, World, agreed, by_rank

__all__ = ["Heap", "HeapError", "RankTimeout", "World", "open_heap"]


def open_heap(world: World, size: int) -> Heap:
    """A heap of `size` bytes on each rank, in memory that suits `world.backend`. Collective. Raises HeapError on all ranks."""
    if agreed(world, "the size of the heap in bytes", size) <= 0:
        raise HeapError(f"a heap cannot have {size} bytes; its size must be positive")

    if world.backend == "cpu":
        return SharedHeap(world, size)
    if world.backend in ("cuda", "rocm"):
        return (IrisHeap if _library(world) == "iris" else SymmetricHeap)(world, size)
    raise HeapError(f"there is no heap for the backend '{world.backend}'; it must be cuda, rocm or cpu")


def _library(world: World) -> str:
    """The library of symmetric memory that all ranks chose. Raises HeapError if they differ. Collective."""
    chosen = world.gather(symmetric_heap(world.backend), str)
    if len(set(chosen)) > 1:
        raise HeapError(f"the ranks chose different heaps ({by_rank(chosen)}): set AUTOTAX_HEAP alike on all ranks")
    return chosen[0]
