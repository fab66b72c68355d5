"""The Iris heap, on a stand-in for Iris: shows that Iris is called as it wants to be, not that Iris itself works."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotax.heap import HeapError, World, open_heap
from tests.heap.suite import CHECKS, SIZE, run_check
from tests.ranks import Ranks

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
    ("source", "told"),
    [
        (NO_LIBRARY, r"cannot load the ROCm libraries, libamdhip64.so.*; install ROCm"),
        (ANOTHER_PROJECT, r"iris.py is another project called iris.*pip install git\+https://github.com/ROCm/iris"),
        (LACKS_A_PACKAGE, r"iris_needs_this is not installed"),
        (None, r"the package iris is not installed; get Iris by `pip install git\+https://github.com/ROCm/iris"),
    ],
    ids=["no library", "another project", "lacks a package", "not installed"],
)
def test_what_iris_lacks_is_told(ranks: Ranks, tmp_path: Path, source: str | None, told: str) -> None:
    if source:
        tmp_path.joinpath("iris.py").write_text(source)
    ranks.run(_fail_to_open, tmp_path if source else None, told)


def test_one_rank_without_iris_is_told_to_all(ranks: Ranks) -> None:
    ranks.run(_lack_iris_on_rank_1)


# What the ranks run.


def _run_check_on_standin(world: World, name: str) -> None:
    with _iris_from(STANDIN):
        run_check(replace(world, backend="rocm"), name)


def _look_at_the_bases_of_iris(world: World) -> None:
    with _iris_from(STANDIN):
        heap = open_heap(replace(world, backend="rocm"), SIZE)
        of_iris = heap._context.get_heap_bases().to(torch.int64)  # type: ignore[attr-defined]
        offsets = (heap.bases - of_iris).tolist()
        assert offsets[0] > 0
        assert len(set(offsets)) == 1
        heap.barrier()
        heap.close()


def _fail_to_open(world: World, where: Path | None, told: str) -> None:
    with _iris_from(where), pytest.raises(HeapError, match=rf"cannot use Iris.*rank 0.*{told}.*rank 1.*{told}"):
        open_heap(replace(world, backend="rocm"), SIZE)


def _lack_iris_on_rank_1(world: World) -> None:
    where = None if world.rank == 1 else STANDIN
    with _iris_from(where), pytest.raises(HeapError, match=r"cannot use Iris \(rank 1: the package iris is not"):
        open_heap(replace(world, backend="rocm"), SIZE)


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
