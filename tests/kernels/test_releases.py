"""On AMD no release may publish data that is still on its way: the assembly of every variant says so, under any Triton.

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

from autotax.kernels.primitives import count, settle, signal
from tests.kernels.compilers import Compilers
from tests.kernels.compilers import compilers as pool_of_compilers
from tests.kernels.releases import AMD, Job, faults, instructions, jobs, listings, publications
from tests.kernels.test_compile import AT_ONCE

QUICK = jobs()
FULL = [job for job in jobs(everything=True) if job not in QUICK]


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    with pool_of_compilers() as pool:
        yield pool


@pytest.fixture(scope="module")
def compiling(compilers: Compilers, request: pytest.FixtureRequest) -> dict[Job, Future[dict[str, str]]]:
    """Starts the compilations of all selected tests of both sets at once, so that they run in parallel."""
    calls = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {call["job"] for call in calls if "job" in call}
    return {job: compilers.submit(listings, *job) for job in QUICK + FULL if job in wanted}


def check(kernels: dict[str, str]) -> None:
    assert kernels
    assert {name: faults(listing) for name, listing in kernels.items() if faults(listing)} == {}


@pytest.mark.sampled(by=lambda job: {"target": job[0], "op": job[1].op})
@pytest.mark.parametrize("job", QUICK, ids=lambda job: f"{job[0]}-{job[1].op}-{job[2]}")
def test_every_release_is_waited_for(compiling: dict[Job, Future[dict[str, str]]], job: Job) -> None:
    kernels = compiling[job].result()
    check(kernels)
    if job[2].variant not in ("bsp", *AT_ONCE):  # variants that exchange only LL words publish nothing
        assert any(any(publications(instructions(listing))) for listing in kernels.values()), "nothing to audit"


@pytest.mark.full
@pytest.mark.parametrize("job", FULL, ids=lambda job: f"{job[0]}-{job[1]}-{job[2]}")
def test_every_release_of_other_configs_is_waited_for(compiling: dict[Job, Future[dict[str, str]]], job: Job) -> None:
    check(compiling[job].result())


@triton.jit
def _bare(data, flag, scope: tl.constexpr):
    """Writes back and does not wait, as LLVM before its change 178316 does."""
    tl.store(data + tl.arange(0, 256), 1)
    settle("hip")
    tl.inline_asm_elementwise("buffer_wbl2 sc0 sc1\ns_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.atomic_add(flag, 1, sem="relaxed", scope=scope)


@triton.jit
def _relaxed(data, flag, scope: tl.constexpr):
    """Publishes without any write-back."""
    tl.store(data + tl.arange(0, 256), 1)
    settle("hip")
    tl.atomic_add(flag, 1, sem="relaxed", scope=scope)


@triton.jit
def _unsettled(data, flag, scope: tl.constexpr):
    """One wave writes back while others may still store."""
    tl.store(data + tl.arange(0, 256), 1)
    tl.inline_asm_elementwise(
        "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\ns_mov_b32 $0, 0", "=s", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.atomic_add(flag, 1, sem="relaxed", scope=scope)


@triton.jit
def _signalled(data, flag, scope: tl.constexpr):
    tl.store(data + tl.arange(0, 256), 1)
    signal(flag, 1, "hip", scope)


@triton.jit
def _counted(data, flag, scope: tl.constexpr):
    tl.store(data + tl.arange(0, 256), 1)
    tl.store(data, count(flag, "hip", scope))


KERNELS = {kernel.__name__: kernel for kernel in (_bare, _relaxed, _unsettled, _signalled, _counted)}


def _assembly(target: str, name: str, scope: str, warps: int) -> str:
    from autotax.kernels.offline import pretend

    words: list[Any] = [torch.empty(1024, dtype=torch.int32, device="meta") for _ in range(2)]
    with pretend(target):
        return KERNELS[name].warmup(*words, scope, grid=(1,), num_warps=warps).asm["amdgcn"]


@pytest.mark.parametrize("scope", ["sys", "gpu"])
@pytest.mark.parametrize(
    ("kernel", "why"), [("_bare", "not waited for"), ("_relaxed", "no write-back"), ("_unsettled", "all waves")]
)
def test_the_audit_finds_what_is_wrong(compilers: Compilers, kernel: str, why: str, scope: str) -> None:
    errors = faults(compilers.submit(_assembly, "hip:gfx942", kernel, scope, 4).result())
    assert any(why in fault for fault in errors), errors


@pytest.mark.sampled
@pytest.mark.parametrize("warps", [1, 4, 16])
@pytest.mark.parametrize("target", AMD)
@pytest.mark.parametrize(("kernel", "scope"), [("_signalled", "sys"), ("_signalled", "gpu"), ("_counted", "gpu")])
def test_releases_hold_and_one_wave_writes_back(
    compilers: Compilers, target: str, kernel: str, scope: str, warps: int
) -> None:
    listing = compilers.submit(_assembly, target, kernel, scope, warps).result()
    code = instructions(listing)
    assert faults(listing) == []
    assert [bits for _, bits in publications(code)] == ["sc0 sc1" if scope == "sys" else "sc1"]
    backs = [at for at, line in enumerate(code) if line.startswith("buffer_wbl2")]
    assert all(code[at - 1].startswith("s_cbranch_vccz .Ldone") for at in backs)  # passed by but by the first thread's wave
