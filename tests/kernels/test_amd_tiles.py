"""On AMD the first configs of large GEMMs do not spill, and the arithmetic that puts others last knows which do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.spaces import space_for
from autotax.spaces.gemm_tiles import MOST_SPILLS, spilled_on_amd
from tests.kernels.compilers import Compilers
from tests.kernels.compilers import compilers as pool_of_compilers
from tests.volume import volume

LARGE = AllGatherGemm(2048, 7168, 8192, "bf16", "m", 8)
OTHERS: tuple[Problem, ...] = (
    AllGatherGemm(8192, 7168, 8192, "bf16", "m", 8),
    AllGatherGemm(4096, 4096, 8192, "fp16", "k", 8),
    GemmReduceScatter(2048, 8192, 3584, "bf16", "scattered", 8),
    GemmReduceScatter(8192, 8192, 3584, "bf16", "replicated", 8, "kn"),
)
FIRST = 3
MI300X = known_hardware("hip:gfx942")
OPTIONS: dict[str, Value] = {"matrix_instr_nonkdim": 16, "waves_per_eu": 0, "kpack": 1}

Kernels = dict[str, tuple[int, int]]
"""Bytes of shared memory and registers that spilled, by kernel."""


@pytest.fixture(scope="module")
def compilers() -> Iterator[Compilers]:
    with pool_of_compilers() as pool:
        yield pool


def _compiled(problem: Problem, config: Config) -> Kernels:
    kernels: Kernels = {}

    class Reading(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", binary.asm["amdgcn"])
            assert spilled
            kernels[kernel.__name__] = binary.metadata.shared, int(spilled[1])

    compile_offline(problem, config, MI300X, Reading)
    return kernels


def _do_not_spill(compilers: Compilers, problem: Problem, first: int = FIRST) -> None:
    space = space_for(problem, MI300X)
    variants = [variant for name, variant in space.variants.items() if name != "bsp"]
    configs = [[seed for seed in variant.seeds if seed in space][:first] for variant in variants]
    asked = {config: compilers.submit(_compiled, problem, config) for several in configs for config in several}
    resources = {str(config): job.result() for config, job in asked.items()}
    spilling = {config: kernels for config, kernels in resources.items() if any(spilled for _, spilled in kernels.values())}
    assert len(asked) >= len(variants)
    assert spilling == {}


@pytest.mark.volume
@pytest.mark.parametrize("first", [1, FIRST])
def test_first_configs_of_a_large_gemm_do_not_spill(compilers: Compilers, first: int) -> None:
    _do_not_spill(compilers, LARGE, first)


@pytest.mark.full
@pytest.mark.parametrize("problem", OTHERS, ids=str)
def test_first_configs_of_other_large_gemms_do_not_spill(compilers: Compilers, problem: Problem) -> None:
    _do_not_spill(compilers, problem)


@pytest.mark.parametrize(
    ("m", "n", "k", "spills"),
    volume((256, 256, 64, True), (256, 256, 32, False), (256, 128, 64, False)),
)
def test_the_estimate_agrees_with_the_compiler(compilers: Compilers, m: int, n: int, k: int, spills: bool) -> None:
    """All are admitted; a pipeline of 256 x 256 x 64 takes the shared memory to the last byte, so a wait may take none."""
    space = space_for(LARGE, MI300X)
    tile: dict[str, Value] = {"block_m": m, "block_n": n, "block_k": k, "num_warps": 8, "num_stages": 2}
    config = Config.of("push", space.default("push").values | OPTIONS | tile)
    assert space.why_not(config) is None
    shared, spilled = compilers.submit(_compiled, LARGE, config).result()["push_kernel"]
    assert shared == (m + n) * k * 2 <= MI300X.shared_memory
    assert (spilled > 0) == (spilled_on_amd(LARGE, m, n, k, 8) > 0) == spills


def test_what_would_spill_much_is_refused_and_what_spills_comes_last() -> None:
    known = replace(known_hardware("hip:gfx950"), shared_memory=1 << 20)  # which would hold it
    space = space_for(LARGE, known)
    large: dict[str, Value] = {"block_m": 256, "block_n": 256, "block_k": 128, "num_warps": 8, "num_stages": 2, "kpack": 1}
    config = Config.of("push", space.default("push").values | large)
    assert spilled_on_amd(LARGE, 256, 256, 128, 8) > MOST_SPILLS
    assert "registers" in (space.why_not(config) or "")

    space = space_for(LARGE, MI300X)
    sizes = ("block_m", "block_n", "block_k", "num_warps")
    tiles = [[int(seed[size]) for size in sizes] for seed in space.variants["push"].seeds if seed in space]
    spilling = [spilled_on_amd(LARGE, *tile) > 0 for tile in tiles]
    assert not any(spilling[:FIRST])
    assert sorted(spilling) == spilling


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_other_vendors_have_none_of_the_options_of_amd(target: str) -> None:
    space = space_for(replace(LARGE, world_size=4), known_hardware(target))
    assert not any(set(OPTIONS) & set(variant.parameters) for variant in space.variants.values())
