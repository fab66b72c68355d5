"""The Iris heap on the host code of Iris itself, over a fake HIP library.

$AUTOTAX_IRIS names a folder with Iris. Without it pip downloads Iris, or the tests are skipped. It is never a part of this
repository.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from autotax.heap import HeapError, World, open_heap
from autotax.runner.ranks import Ranks
from tests.conformance.heap import CHECKS, SIZE, run_check
from tests.heap import fake_rocm
from tests.heap.fake_rocm import downloaded
from tests.kernels.releases import faults, instructions, publications

CHECKOUT = os.environ.get("AUTOTAX_IRIS") or downloaded()
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="Iris cannot be downloaded, and AUTOTAX_IRIS names no folder with it")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_rocm.build(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(ranks: Ranks, library: Path, name: str) -> None:
    ranks.run(_run_check, library, name)


def test_bases_are_those_of_iris_and_an_offset(ranks: Ranks, library: Path) -> None:
    ranks.run(_look_at_the_bases, library)


def test_a_rank_without_memory_is_told_to_all(library: Path) -> None:
    with Ranks(2) as ranks:  # of its own: a thread of rank 0 stays in Iris
        told = ranks.run(_lack_memory_on_rank_1, library)
    assert len(set(told)) == 1
    assert re.search(r"rank 1: .*HIP out of memory", told[0])


def test_a_closed_heap_is_gone_without_a_collection(ranks: Ranks, library: Path) -> None:
    assert ranks.run(_close_without_a_collection, library) == [0, 0]


@pytest.mark.parametrize("target", ["hip:gfx942", "hip:gfx950"])
def test_our_signals_hold_beside_the_device_functions_of_iris(library: Path, target: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # the compiler may end its process
        listing = pool.submit(_compile_beside_iris, library, target).result()
    first = next(line for line in instructions(listing) if line.startswith("global_atomic"))
    assert any(publications(instructions(listing)))
    assert [fault for fault in faults(listing) if first in fault or "not waited for before" in fault] == []


def _compile_beside_iris(library: Path, target: str) -> str:
    _use_iris(library)
    return str(importlib.import_module("tests.heap.beside_iris").assembly(target))


# Functions that the ranks run.


def _use_iris(library: Path) -> None:
    """Iris is imported from the checkout, once in a process."""
    assert CHECKOUT
    fake_rocm.install(library)
    folder = str(Path(CHECKOUT).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    iris = importlib.import_module("iris")
    assert iris.__file__ and iris.__file__.startswith(folder), iris.__file__
    with contextlib.suppress(ModuleNotFoundError):  # newer versions check that tensors are of a GPU
        importlib.import_module("iris.host.memory.tensors").throw_if_invalid_device = lambda *_: None  # type: ignore[attr-defined]


def _run_check(world: World, library: Path, name: str) -> None:
    _use_iris(library)
    run_check(replace(world, backend="rocm"), name)


def _look_at_the_bases(world: World, library: Path) -> None:
    _use_iris(library)
    heap = open_heap(replace(world, backend="rocm"), SIZE)
    of_iris = [int(base) for base in heap.context.get_heap_bases().tolist()]  # type: ignore[attr-defined]
    offsets = {mine - base for mine, base in zip(heap.bases.tolist(), of_iris, strict=True)}
    assert len(offsets) == 1
    assert offsets.pop() >= 0
    heap.barrier()
    heap.close()


def _lack_memory_on_rank_1(world: World, library: Path) -> str:
    _use_iris(library)
    if world.rank == 1:
        os.environ["FAKE_HIP_LIMIT"] = "4096"
    began = time.monotonic()
    with pytest.raises(HeapError) as raised:
        open_heap(replace(world, backend="rocm"), SIZE)
    assert time.monotonic() - began < 60  # a rank that waited for the other would wait two minutes
    return str(raised.value)


def _close_without_a_collection(world: World, library: Path) -> int:
    """Contexts that are alive when three heaps have been opened and closed."""
    _use_iris(library)
    gc.collect()
    gc.disable()
    try:
        contexts = []
        for _ in range(3):
            heap = open_heap(replace(world, backend="rocm"), SIZE)
            contexts.append(weakref.ref(heap.context))  # type: ignore[attr-defined]
            heap.barrier()
            heap.close()
        return sum(context() is not None for context in contexts)
    finally:
        gc.enable()
