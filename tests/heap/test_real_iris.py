"""The Iris heap on the host code of Iris itself, over a fake HIP library and over a fake driver of CUDA.

$AUTOTAX_IRIS names a folder with Iris. Without it pip downloads Iris, or the tests are skipped. It is never a part of this
repository.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotax.heap import HeapError, World, open_heap
from autotax.runner.ranks import Ranks
from tests.conformance.heap import CHECKS, SIZE, run_check
from tests.heap import fake_gpus
from tests.heap.fake_gpus import downloaded
from tests.kernels.compilers import compilers
from tests.kernels.releases import faults, instructions, publications
from tests.volume import volume

CHECKOUT = os.environ.get("AUTOTAX_IRIS") or downloaded()
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="Iris cannot be downloaded, and AUTOTAX_IRIS names no folder with it")


@dataclass(frozen=True)
class Fake:
    """A backend and its libraries."""

    backend: str
    libraries: list[Path]


@pytest.fixture(scope="module", params=["rocm", "cuda"])
def fake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return Fake(request.param, fake_gpus.build(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def ranks(fake: Fake) -> Iterator[Ranks]:  # noqa: ARG001 - a process has the libraries of one backend
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.sampled
@pytest.mark.parametrize("name", CHECKS)
def test_conformance(ranks: Ranks, fake: Fake, name: str) -> None:
    ranks.run(_run_check, fake, name)


def test_bases_are_those_of_iris_and_an_offset(ranks: Ranks, fake: Fake) -> None:
    ranks.run(_look_at_the_bases, fake)


@pytest.mark.parametrize("limit", [4096, *volume(8 << 20)])
def test_a_rank_without_memory_is_told_to_all(fake: Fake, limit: int) -> None:
    """With the greater limit Iris's allocators work, and its context fails on that rank alone."""
    with Ranks(2) as ranks:  # of its own: a thread of rank 0 stays in Iris
        messages = ranks.run(_lack_memory_on_rank_1, fake, limit)
    assert len(set(messages)) == 1 and len(messages[0].splitlines()) == 1
    assert re.search(r"rank 1: .*(HIP out of memory|CUDA_ERROR_OUT_OF_MEMORY)", messages[0])


def test_a_closed_heap_is_gone_without_a_collection(ranks: Ranks, fake: Fake) -> None:
    assert ranks.run(_close_without_a_collection, fake) == [0, 0]


@pytest.mark.parametrize("target", volume("hip:gfx942", "hip:gfx950"))
def test_our_signals_hold_beside_the_device_functions_of_iris(tmp_path: Path, target: str) -> None:
    with compilers(1) as pool:  # the compiler may end its process
        listing = pool.submit(_compile_beside_iris, Fake("rocm", fake_gpus.build(tmp_path, "rocm")), target).result()
    first = next(line for line in instructions(listing) if line.startswith("global_atomic"))
    assert any(publications(instructions(listing)))
    assert [fault for fault in faults(listing) if first in fault or "not waited for before" in fault] == []


def _compile_beside_iris(fake: Fake, target: str) -> str:
    _use_iris(fake)
    return str(importlib.import_module("tests.heap.beside_iris").assembly(target))


# Functions that the ranks run.


def _use_iris(fake: Fake) -> ctypes.CDLL:
    """Imports Iris from the checkout, once in a process. Returns the fake library."""
    assert CHECKOUT
    library = fake_gpus.install(fake.libraries)
    folder = str(Path(CHECKOUT).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    iris = importlib.import_module("iris")
    assert iris.__file__ and iris.__file__.startswith(folder), iris.__file__
    with contextlib.suppress(ModuleNotFoundError):  # newer versions check that tensors are of a GPU
        importlib.import_module("iris.host.memory.tensors").throw_if_invalid_device = lambda *_: None  # type: ignore[attr-defined]
    return library


def _on(world: World, fake: Fake) -> World:
    os.environ["AUTOTAX_HEAP"] = "iris"
    return replace(world, backend=fake.backend)


def _run_check(world: World, fake: Fake, name: str) -> None:
    _use_iris(fake)
    run_check(_on(world, fake), name)


def _look_at_the_bases(world: World, fake: Fake) -> None:
    _use_iris(fake)
    heap = open_heap(_on(world, fake), SIZE)
    of_iris = [int(base) for base in heap.context.get_heap_bases().tolist()]  # type: ignore[attr-defined]
    offsets = {mine - base for mine, base in zip(heap.bases.tolist(), of_iris, strict=True)}
    assert len(offsets) == 1
    assert offsets.pop() >= 0
    heap.barrier()
    heap.close()


def _lack_memory_on_rank_1(world: World, fake: Fake, limit: int) -> str:
    _use_iris(fake)
    if world.rank == 1:
        os.environ["FAKE_LIMIT"] = str(limit)
    began = time.monotonic()
    with pytest.raises(HeapError) as raised:
        open_heap(_on(world, fake), SIZE)
    assert time.monotonic() - began < 110  # a rank that waited for the other would wait two minutes
    return str(raised.value)


def _close_without_a_collection(world: World, fake: Fake) -> int:
    """Contexts that are alive when three heaps have been opened and closed, and what CUDA has not got back."""
    library = _use_iris(fake)
    gc.collect()
    in_use = library.fake_in_use if fake.backend == "cuda" else lambda: 0
    before = in_use()
    gc.disable()
    try:
        contexts = []
        for _ in range(3):
            heap = open_heap(_on(world, fake), SIZE)
            contexts.append(weakref.ref(heap.context))  # type: ignore[attr-defined]
            heap.barrier()
            heap.close()
        return sum(context() is not None for context in contexts) + in_use() - before
    finally:
        gc.enable()
