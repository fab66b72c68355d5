"""The heaps of the GPUs that are here: the conformance suite of all heaps, and what only a GPU can show."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from autotax.hardware import has_iris
from autotax.heap import World, open_heap
from autotax.heap.base import INSTALL
from autotax.runner.ranks import Ranks
from tests.conformance.heap import CHECKS, SIZE, run_check

BACKEND = "rocm" if torch.version.hip else "cuda"
WITH_IRIS = pytest.mark.skipif(not has_iris(), reason=f"Iris is not installed: {INSTALL}")


@pytest.fixture(scope="module", params=["torch", pytest.param("iris", marks=WITH_IRIS)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks that keep their heaps in the memory of one library."""
    with mock.patch.dict(os.environ, {"AUTOTAX_HEAP": request.param}), Ranks(torch.cuda.device_count(), BACKEND) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(ranks: Ranks, name: str) -> None:
    ranks.run(run_check, name)


def test_kernels_see_what_peers_wrote_before_a_check(ranks: Ranks) -> None:
    ranks.run(_exchange_large_blocks)


@pytest.mark.skipif(BACKEND != "cuda", reason="is about torch's symmetric memory")
def test_slab_may_lie_inside_a_larger_block(ranks: Ranks) -> None:
    ranks.run(_open_after_another_slab_is_freed)


@pytest.mark.skipif(BACKEND != "cuda", reason="is about torch's symmetric memory")
def test_settings_of_the_process_are_left_alone(ranks: Ranks) -> None:
    ranks.run(_compare_the_environment)


# Functions that the ranks run.


def _exchange_large_blocks(world: World) -> None:
    count = 16 << 20
    with contextlib.closing(open_heap(world, 2 * world.size * count)) as heap:
        inbox = heap.zeros((world.size, count), torch.uint8)
        heap.check()
        for rank in range(world.size):
            block = torch.full((count,), 10 * world.rank + rank, dtype=torch.uint8, device=world.device)
            heap.peer(inbox, rank)[world.rank].copy_(block)
        heap.check()
        for rank in range(world.size):
            assert inbox[rank].eq(10 * rank + world.rank).all()
        heap.barrier()


def _open_after_another_slab_is_freed(world: World) -> None:
    """torch's pool may place a small heap anywhere in a large freed block."""
    large = symm_mem.empty(8 << 20, dtype=torch.uint8, device=world.device)
    del large
    kept = symm_mem.empty(1 << 20, dtype=torch.uint8, device=world.device)
    run_check(world, "address_on_a_peer_is_own_address_between_bases")
    run_check(world, "peer_sees_what_is_written_to_it")
    del kept


def _compare_the_environment(world: World) -> None:
    before = dict(os.environ)
    with contextlib.closing(open_heap(world, SIZE)) as heap:
        heap.barrier()
    assert dict(os.environ) == before
