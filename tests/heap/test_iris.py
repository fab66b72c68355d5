"""The Iris heap, on a stand-in for Iris: shows that Iris is called as it wants to be, not that Iris itself works."""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from autotax.cli.options import MachineOptions
from autotax.core.errors import UsageError
from autotax.hardware import symmetric_heap
from autotax.heap import HeapError, World, open_heap
from autotax.runner.ranks import Ranks, run_ranks
from tests.conformance.heap import CHECKS, SIZE, run_check

STANDIN = Path(__file__).parent / "iris_standin"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(ranks: Ranks, name: str) -> None:
    ranks.run(_run_check_on_standin, name)


def test_slab_is_not_at_the_base_of_the_iris_heap(ranks: Ranks) -> None:
    ranks.run(_look_at_the_bases_of_iris)


NO_LIBRARY = 'raise OSError("libamdhip64.so: cannot open shared object file")'
ANOTHER_PROJECT = "cube = None"
LACKS_A_PACKAGE = "import iris_needs_this"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NO_LIBRARY, r"cannot load the libraries of the GPU, libamdhip64.so.*; install ROCm"),
        (ANOTHER_PROJECT, r"iris.py is another project called iris.*pip install --no-deps tokenspeed-iris tokenspeed-tritonblas"),
        (LACKS_A_PACKAGE, r"iris_needs_this is not installed"),
        (None, r"the package iris is not installed; get Iris by `pip install --no-deps tokenspeed-iris tokenspeed-tritonblas"),
    ],
    ids=["no library", "another project", "lacks a package", "not installed"],
)
def test_what_iris_lacks_is_reported(ranks: Ranks, tmp_path: Path, source: str | None, message: str) -> None:
    if source:
        tmp_path.joinpath("iris.py").write_text(source)
    ranks.run(_fail_to_open, tmp_path if source else None, message)


def test_one_rank_without_iris_is_told_to_all(ranks: Ranks) -> None:
    ranks.run(_lack_iris_on_rank_1)


def test_a_rank_without_memory_is_told_to_all_before_iris_is_called(ranks: Ranks) -> None:
    ranks.run(_lack_memory_on_rank_1)
    ranks.run(_run_check_on_standin, next(iter(CHECKS)))  # the ranks can go on


def test_a_rank_that_fails_within_iris_alone_is_told_to_all() -> None:
    with Ranks(2) as ranks:  # of its own: a thread of rank 0 stays in the collective that rank 1 never joined
        messages = ranks.run(_fail_within_iris_on_rank_1)
    assert set(messages) == {f"cannot allocate slabs of {SIZE} bytes with Iris (rank 1: HIP out of memory)"}


def test_a_closed_heap_has_given_its_memory_back(ranks: Ranks) -> None:
    assert ranks.run(_close_without_a_collection) == [0, 0]


def test_torch_can_take_the_place_of_iris(ranks: Ranks) -> None:
    ranks.run(_choose_the_heap_of_torch)


# Functions that the ranks run.


def _library(_: World) -> str:
    return symmetric_heap("cuda")


def test_an_option_of_a_command_chooses_the_heap_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTAX_HEAP", "torch")
    MachineOptions(heap="iris").check()
    assert run_ranks(_library, 2, "cpu", timeout=60) == ["iris", "iris"]
    with pytest.raises(UsageError, match="heap is 'mine'; allowed are torch, iris"):
        MachineOptions(heap="mine").check()


def _choose_the_heap_of_torch(world: World) -> None:
    """torch's symmetric memory needs a GPU."""
    asked = mock.Mock()
    heap = mock.patch("autotax.heap.SymmetricHeap", asked)
    with mock.patch.dict(os.environ, {"AUTOTAX_HEAP": "torch"}), heap, _iris_from(None):
        assert open_heap(replace(world, backend="rocm"), SIZE) is asked.return_value
    environ = {"AUTOTAX_HEAP": "mine"}
    with mock.patch.dict(os.environ, environ), pytest.raises(UsageError, match="allowed are iris and torch"):
        open_heap(replace(world, backend="rocm"), SIZE)


def _run_check_on_standin(world: World, name: str) -> None:
    with _iris_from(STANDIN):
        run_check(replace(world, backend="rocm"), name)


def _look_at_the_bases_of_iris(world: World) -> None:
    with _iris_from(STANDIN):
        heap = open_heap(replace(world, backend="rocm"), SIZE)
        of_iris = heap.context.get_heap_bases().to(torch.int64)  # type: ignore[attr-defined]
        offsets = (heap.bases - of_iris).tolist()
        assert offsets[0] > 0
        assert len(set(offsets)) == 1
        heap.barrier()
        heap.close()


def _fail_to_open(world: World, where: Path | None, reason: str) -> None:
    with _iris_from(where), pytest.raises(HeapError, match=rf"cannot use Iris.*rank 0.*{reason}.*rank 1.*{reason}"):
        open_heap(replace(world, backend="rocm"), SIZE)


def _lack_iris_on_rank_1(world: World) -> None:
    where = None if world.rank == 1 else STANDIN
    with _iris_from(where), pytest.raises(HeapError, match=r"cannot use Iris \(rank 1: the package iris is not"):
        open_heap(replace(world, backend="rocm"), SIZE)


def _lack_memory_on_rank_1(world: World) -> None:
    """Limits the memory of the process, so that torch's allocation fails."""
    size, began = 1 << 30, time.monotonic()
    before = resource.getrlimit(resource.RLIMIT_AS)
    if world.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size // 2, before[1]))
    try:
        with _iris_from(STANDIN), pytest.raises(HeapError) as raised:
            open_heap(replace(world, backend="rocm"), size)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert re.match(rf"cannot allocate slabs of {size} bytes with Iris \(rank 1: .*allocate memory", str(raised.value))
    assert "rank 0" not in str(raised.value)
    assert time.monotonic() - began < 110  # a rank that waited for the other would wait two minutes


def _fail_within_iris_on_rank_1(world: World) -> str:
    began = time.monotonic()
    with _iris_from(STANDIN), pytest.raises(HeapError) as raised:
        import iris

        iris.WITHOUT_MEMORY = {1}
        open_heap(replace(world, backend="rocm"), SIZE)
    assert time.monotonic() - began < 110  # a rank that waited for the other would wait two minutes
    return str(raised.value)


def _close_without_a_collection(world: World) -> int:
    """Contexts that are alive when five heaps have been opened and closed."""
    gc.disable()
    try:
        contexts = []
        with _iris_from(STANDIN):
            for _ in range(5):
                heap = open_heap(replace(world, backend="rocm"), SIZE)
                contexts.append(weakref.ref(heap.context))  # type: ignore[attr-defined]
                heap.barrier()
                heap.close()
                heap.close()
        return sum(context() is not None for context in contexts)
    finally:
        gc.enable()


@contextmanager
def _iris_from(where: Path | None) -> Iterator[None]:
    """`import iris` finds the module in that folder, or none."""
    before = list(sys.path)
    if where:
        sys.path.insert(0, str(where))
        sys.modules.pop("iris", None)
    else:
        sys.modules["iris"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.path[:] = before
        sys.modules.pop("iris", None)
