"""The conformance suite of heaps.

Each check runs on all ranks at once, on a heap of SIZE bytes that is opened for it. It must hold for every heap.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

from autotax.heap import Heap, HeapError, World, open_heap
from autotax.heap.base import ALIGNMENT
from tests.conformance.checks import raises

SIZE = 256 << 10


def run_check(world: World, name: str) -> None:
    """Opens a heap and runs the check of that name on it; called on every rank."""
    with contextlib.closing(open_heap(world, SIZE)) as heap:
        CHECKS[name](heap)
        # No rank may free its memory while another still reads it.
        heap.world.synchronize()
        heap.barrier()


def next_rank(heap: Heap) -> int:
    return (heap.world.rank + 1) % heap.world.size


def previous_rank(heap: Heap) -> int:
    return (heap.world.rank - 1) % heap.world.size


def has_the_size_asked_for(heap: Heap) -> None:
    assert heap.size == SIZE
    assert heap.used == 0
    assert heap.slab.dtype == torch.uint8
    assert heap.slab.shape == (SIZE,)
    assert heap.slab.device == heap.world.device
    assert heap.bases.dtype == torch.int64
    assert heap.bases.shape == (heap.world.size,)
    assert heap.bases.device == heap.world.device


def own_base_is_the_slab(heap: Heap) -> None:
    assert heap.bases[heap.world.rank].item() == heap.slab.data_ptr()
    assert heap.peer_slab(heap.world.rank).data_ptr() == heap.slab.data_ptr()


def bases_are_distinct(heap: Heap) -> None:
    assert len(set(heap.bases.tolist())) == heap.world.size


def peer_sees_what_is_written_to_it(heap: Heap) -> None:
    inbox = heap.zeros((heap.world.size, 5), torch.int32)
    heap.check()
    for rank in range(heap.world.size):
        heap.peer(inbox, rank)[heap.world.rank] = 100 * heap.world.rank + rank
    heap.check()
    expected = [[100 * rank + heap.world.rank] * 5 for rank in range(heap.world.size)]
    assert inbox.tolist() == expected


def peer_can_be_read(heap: Heap) -> None:
    heap.alloc((7,), torch.uint8)
    outbox = heap.alloc((2, 3), torch.float32)
    outbox.fill_(heap.world.rank + 0.5)
    heap.check()
    for rank in range(heap.world.size):
        view = heap.peer(outbox, rank)
        assert view.shape == (2, 3)
        assert view.device == heap.world.device
        assert view.tolist() == [[rank + 0.5] * 3] * 2


def whole_slab_is_reachable(heap: Heap) -> None:
    everything = heap.alloc((SIZE,), torch.uint8)
    everything.fill_(heap.world.rank)
    heap.check()
    peer = next_rank(heap)
    assert heap.peer(everything, peer).eq(peer).all()
    heap.check()
    heap.peer(everything, peer)[-1] = 77
    heap.check()
    assert everything[-1].item() == 77
    assert everything[0].item() == heap.world.rank


def address_on_a_peer_is_own_address_between_bases(heap: Heap) -> None:
    heap.alloc((3,), torch.float16)
    tensor = heap.zeros((4,), torch.int32)
    heap.check()
    peer = next_rank(heap)
    own_base, peer_base = (int(heap.bases[rank].item()) for rank in (heap.world.rank, peer))
    address = tensor.data_ptr() - own_base + peer_base
    assert address == heap.peer(tensor, peer).data_ptr()
    if tensor.device.type == "cpu":
        ctypes.c_int32.from_address(address + 2 * tensor.element_size()).value = heap.world.rank + 1
        heap.check()
        assert tensor.tolist() == [0, 0, previous_rank(heap) + 1, 0]


def allocations_are_aligned_and_apart(heap: Heap) -> None:
    tensors = [heap.alloc((count,), dtype) for count in (1, 33, 1000) for dtype in (torch.uint8, torch.bfloat16)]
    for index, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.view(torch.uint8).fill_(index)
    for index, tensor in enumerate(tensors):
        assert tensor.view(torch.uint8).eq(index).all()


def shapes_and_dtypes_are_kept(heap: Heap) -> None:
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 4)):
        for dtype in (torch.int64, torch.bfloat16, torch.float32, torch.uint8):
            tensor = heap.zeros(shape, dtype)
            assert tensor.shape == shape
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
            assert not tensor.any()
            assert heap.peer(tensor, next_rank(heap)).shape == shape


def full_heap_is_told(heap: Heap) -> None:
    heap.alloc((SIZE // 2,), torch.uint8)
    used = heap.used
    with raises(HeapError, f"{SIZE} bytes does not fit.*{SIZE // 2} of {SIZE}"):
        heap.alloc((SIZE // 4,), torch.float32)
    assert heap.used == used
    heap.alloc((SIZE // 2,), torch.uint8)
    with raises(HeapError, "0 of"):
        heap.alloc((1,), torch.uint8)


def unlike_allocations_are_told_to_all(heap: Heap) -> None:
    heap.alloc((8,), torch.float32)
    heap.check()
    heap.alloc((8 + heap.world.rank,), torch.float32)
    with raises(HeapError, r"did not allocate alike.*rank 0.*rank 1"):
        heap.check()


def another_order_is_told_to_all(heap: Heap) -> None:
    # These sizes end at the same offset, so only the digest shows the difference.
    for count in (10, 20) if heap.world.rank else (20, 10):
        heap.alloc((count,), torch.uint8)
    with raises(HeapError, "did not allocate alike"):
        heap.check()


def a_missing_allocation_is_told_to_all(heap: Heap) -> None:
    if heap.world.rank:
        heap.alloc((1,), torch.uint8)
    with raises(HeapError, "did not allocate alike"):
        heap.check()


def reset_gives_the_same_memory_again(heap: Heap) -> None:
    first = heap.alloc((SIZE,), torch.uint8)
    heap.reset()
    assert heap.used == 0
    again = heap.alloc((SIZE,), torch.uint8)
    assert again.data_ptr() == first.data_ptr()
    heap.check()


def reset_forgets_that_ranks_disagreed(heap: Heap) -> None:
    heap.alloc((1 + heap.world.rank,), torch.uint8)
    heap.reset()
    heap.alloc((1,), torch.uint8)
    heap.check()


def foreign_tensor_has_no_peer(heap: Heap) -> None:
    foreign = torch.zeros(4, device=heap.world.device)
    with raises(HeapError, "does not lie in this heap"):
        heap.peer(foreign, next_rank(heap))


def strided_tensor_has_no_peer(heap: Heap) -> None:
    tensor = heap.alloc((4, 4), torch.float32)
    with raises(HeapError, "not contiguous"):
        heap.peer(tensor.T, next_rank(heap))


def close_twice_is_fine(heap: Heap) -> None:
    heap.barrier()
    heap.close()
    heap.close()
    with raises(HeapError, "does not fit"):
        heap.alloc((1,), torch.uint8)


def two_heaps_do_not_meet(heap: Heap) -> None:
    with contextlib.closing(open_heap(heap.world, SIZE)) as other:
        mine, theirs = heap.zeros((4,), torch.int32), other.zeros((4,), torch.int32)
        other.check()
        other.peer(theirs, next_rank(heap)).fill_(1)
        other.check()
        assert theirs.tolist() == [1] * 4
        assert mine.tolist() == [0] * 4
        with raises(HeapError, "does not lie in this heap"):
            heap.peer(theirs, next_rank(heap))
        heap.barrier()


def sizes_that_cannot_be_are_told_to_all(heap: Heap) -> None:
    for size in (0, -1):
        with raises(HeapError, "must be positive"):
            open_heap(heap.world, size)
    with raises(HeapError, "disagree on the size"):
        open_heap(heap.world, SIZE + heap.world.rank)


def more_than_the_machine_has_is_told_to_all(heap: Heap) -> None:
    with raises(HeapError, r"cannot .*rank 0"):
        open_heap(heap.world, 1 << 60)


CHECKS: dict[str, Callable[[Heap], None]] = {
    check.__name__: check
    for check in (
        has_the_size_asked_for,
        own_base_is_the_slab,
        bases_are_distinct,
        peer_sees_what_is_written_to_it,
        peer_can_be_read,
        whole_slab_is_reachable,
        address_on_a_peer_is_own_address_between_bases,
        allocations_are_aligned_and_apart,
        shapes_and_dtypes_are_kept,
        full_heap_is_told,
        unlike_allocations_are_told_to_all,
        another_order_is_told_to_all,
        a_missing_allocation_is_told_to_all,
        reset_gives_the_same_memory_again,
        reset_forgets_that_ranks_disagreed,
        foreign_tensor_has_no_peer,
        strided_tensor_has_no_peer,
        close_twice_is_fine,
        two_heaps_do_not_meet,
        sizes_that_cannot_be_are_told_to_all,
        more_than_the_machine_has_is_told_to_all,
    )
}
