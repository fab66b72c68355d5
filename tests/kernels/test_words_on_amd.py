"""The AMD assembly of LL words: they bypass the caches, are never torn, and the voted words are the used ones.

The compiler may end its process on a fatal error, so it runs in processes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from autotax.core.config import Config
from autotax.kernels.primitives import load_whole, store_whole
from autotax.operators import registry
from autotax.spaces import space_for
from tests.kernels.compilers import Compilers
from tests.kernels.compilers import compilers as pool_of_compilers
from tests.kernels.test_compile import AT_ONCE
from tests.kernels.words_on_amd import AMD, Job, compiled, faults, jobs, words

JOBS = jobs()


def wide(job: Job) -> Job:
    """The same job with the most waves per program."""
    target, problem, config = job
    return target, problem, Config.of(config.variant, config.values | {"num_warps": 8})


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    with pool_of_compilers() as pool:
        yield pool


@pytest.fixture(scope="module")
def compiling(compilers: Compilers, request: pytest.FixtureRequest) -> dict[Job, Future[Any]]:
    calls = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return {call["job"]: compilers.submit(compiled, *call["job"]) for call in calls if "job" in call}


def check(kernels: dict[str, tuple[dict[str, str], int]]) -> None:
    assert {name: faults(*kernel) for name, kernel in kernels.items() if faults(*kernel)} == {}
    counts = [words(stages["amdgcn"]) for stages, _ in kernels.values()]
    assert sum(loaded for loaded, _ in counts) > 0
    assert sum(stored for _, stored in counts) > 0


@pytest.mark.sampled(by=lambda job: {"op": job[1].op})
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-{job[1]}-{job[2].variant}")
def test_words_pass_by_the_caches_and_are_whole(compiling: dict[Job, Future[Any]], job: Job) -> None:
    check(compiling[job].result())


@pytest.mark.volume
@pytest.mark.parametrize("job", [wide(job) for job in JOBS], ids=lambda job: f"{job[0]}-{job[1]}-{job[2].variant}")
def test_so_they_are_with_more_waves(compiling: dict[Job, Future[Any]], job: Job) -> None:
    check(compiling[job].result())


def test_words_need_neither_write_back_nor_invalidation(compilers: Compilers, compiling: dict[Job, Future[Any]]) -> None:
    """GEMM + Reduce-Scatter is left out: its programs also count the programs that have left the call, with atomics."""
    alone = [job for job in JOBS if job[2].variant in AT_ONCE and job[1].op != "gemm-reduce-scatter"]
    firsts = {(job[1].op, job[2].variant): job for job in reversed(alone)}.values()
    pending = [compiling.get(job) or compilers.submit(compiled, *job) for job in firsts]
    listings = [stages["amdgcn"] for future in pending for stages, _ in future.result().values()]
    assert len(listings) >= 3
    assert not any("buffer_wbl2" in listing or "buffer_inv" in listing for listing in listings)


@triton.jit
def _ordinary(inbox, out, limit):
    """Polls by a volatile load, which Triton for AMD takes for an ordinary one, and stores as usual."""
    at = tl.arange(0, 1024)
    found = tl.load(inbox + at, volatile=True)
    polls = 0
    while (tl.max((found != 7).to(tl.int32)) != 0) & (polls < limit):
        found = tl.load(inbox + at, volatile=True)
        polls += 1
    tl.store(out + at, found)


@triton.jit
def _few(inbox, out, limit):
    """Polls fewer words than the program has threads: each wave may hold copies of another moment."""
    at = tl.arange(0, 64)
    found = load_whole(inbox + at, at < limit, inbox, 7, "hip")
    polls = 0
    while (tl.max((found != 7).to(tl.int32)) != 0) & (polls < limit):
        found = load_whole(inbox + at, at < limit, inbox, 7, "hip")
        polls += 1
    store_whole(out + at, found, at < limit, "hip")


@triton.jit
def _endless(inbox, out, limit):
    at = tl.arange(0, 1024)
    found = load_whole(inbox + at, at < limit, inbox, 7, "hip")
    while tl.max((found != 7).to(tl.int32)) != 0:
        found = load_whole(inbox + at, at < limit, inbox, 7, "hip")
    store_whole(out + at, found, at < limit, "hip")


@triton.jit
def _right(inbox, out, limit):
    at = tl.arange(0, 1024)
    found = load_whole(inbox + at, at < limit, inbox, 7, "hip")
    polls = 0
    while (tl.max((found != 7).to(tl.int32)) != 0) & (polls < limit):
        found = load_whole(inbox + at, at < limit, inbox, 7, "hip")
        polls += 1
    store_whole(out + at, found, at < limit, "hip")


KERNELS = {kernel.__name__: kernel for kernel in (_ordinary, _few, _endless, _right)}


def _faults_of(name: str) -> list[str]:
    from autotax.kernels.offline import pretend

    arrays: list[Any] = [torch.empty(1024, dtype=torch.int64, device="meta") for _ in range(2)]
    with pretend("hip:gfx942"):
        binary = KERNELS[name].warmup(*arrays, 1000, grid=(1,), num_warps=4)
    return faults({stage: binary.asm[stage] for stage in ("ttir", "ttgir", "llir", "amdgcn")}, 4)


@pytest.mark.parametrize(
    ("kernel", "why"), [("_ordinary", "ordinary access"), ("_few", "64 words for 256 threads"), ("_endless", "without a limit")]
)
def test_the_reading_finds_what_is_wrong(compilers: Compilers, kernel: str, why: str) -> None:
    errors = compilers.submit(_faults_of, kernel).result()
    assert any(why in fault for fault in errors), errors


def test_the_reading_finds_nothing_wrong_with_what_is_right(compilers: Compilers) -> None:
    assert compilers.submit(_faults_of, "_right").result() == []


def test_amd_has_all_variants_by_words_that_nvidia_has() -> None:
    """AMD lacks only those that need warps with roles, and has another in place of one."""
    from autotax.kernels.offline import known_hardware

    for _, problem, _ in JOBS:
        amd, nvidia = (space_for(problem, known_hardware(target)).variants for target in (AMD[0], "cuda:90"))
        others = set(registry.of(problem).peers)  # of torch and NCCL
        roles = {"push_specialized", "push_words", "specialized_words", "push_one_shot"}
        assert set(nvidia) - set(amd) - others <= roles, problem
        assert set(amd) - set(nvidia) <= {"push_packets"}, problem
        assert ("push_words" in nvidia) <= ("push_packets" in amd), problem
