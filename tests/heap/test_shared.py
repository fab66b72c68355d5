"""The heap of CPU ranks: the conformance suite, and the release of its memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from autotax.heap import Heap, HeapError, RankTimeout, World, open_heap
from autotax.runner.ranks import RankFailure, Ranks, run_ranks
from tests.conformance.heap import CHECKS, SIZE, run_check
from tests.volume import volume


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(ranks: Ranks, name: str) -> None:
    ranks.run(run_check, name)


def test_the_file_of_another_process_is_not_taken(ranks: Ranks) -> None:
    ranks.run(_map_the_wrong_file)


def test_closed_heap_leaves_nothing_mapped(ranks: Ranks) -> None:
    ranks.run(_open_and_close)


def test_killed_ranks_leave_nothing() -> None:
    with Ranks(2) as ranks:
        inodes = {inode for of_rank in ranks.run(_keep_a_heap) for inode in of_rank}
        assert len(inodes) == 2
        assert inodes <= _mapped_anywhere()
        for pid in ranks.pids:
            # A named segment would outlive the ranks.
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match="rank 0: died with exit code -9"):
            ranks.run(_keep_a_heap)
    # The kernel frees an anonymous file that no process maps or holds open.
    assert not inodes & _mapped_anywhere()


@pytest.mark.parametrize("late", [2, *volume(0)])
def test_barrier_names_the_late_rank_to_all_others(tmp_path: Path, late: int) -> None:
    messages = run_ranks(_come_late, 3, "cpu", late, tmp_path)
    for rank, message in enumerate(messages):
        assert message == ("" if rank == late else f"rank {rank} waited 1.5 s at a barrier for rank {late}")


# Functions that the ranks run.

_kept: list[Heap] = []


def _map_the_wrong_file(world: World) -> None:
    """One rank announces a wrong file number, like a rank of another host."""
    if world.rank == 1:
        fstat = os.fstat
        os.fstat = lambda fd: os.stat_result([*fstat(fd)[:1], 1, *fstat(fd)[2:]])
    try:
        with pytest.raises(HeapError, match="not a rank of this job"):
            open_heap(world, SIZE)
    finally:
        if world.rank == 1:
            os.fstat = fstat


def _open_and_close(world: World) -> None:
    before = _mapped_files("self")
    heap = open_heap(world, SIZE)
    assert len(_mapped_files("self") - before) == world.size
    heap.barrier()
    heap.close()
    assert _mapped_files("self") == before


def _keep_a_heap(world: World) -> set[str]:
    heap = open_heap(world, SIZE)
    heap.slab.fill_(1)
    _kept.append(heap)
    return _mapped_files("self")


def _come_late(world: World, late: int, gave_up: Path) -> str:
    world.barrier()
    message = ""
    if world.rank == late:
        while len(list(gave_up.iterdir())) < world.size - 1:
            time.sleep(0.05)
        world.barrier()
    else:
        with pytest.raises(RankTimeout) as error:
            world.barrier(timedelta(seconds=1.5))
        message = str(error.value)
        gave_up.joinpath(str(world.rank)).touch()
    # After the late rank has caught up, the ranks are in step again.
    world.barrier()
    return message


def _mapped_files(process: str) -> set[str]:
    """The inodes of the heaps' files that a process maps."""
    maps = Path("/proc", process, "maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:autotax-heap" in line}


def _mapped_anywhere() -> set[str]:
    inodes: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                inodes |= _mapped_files(process.name)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return inodes
