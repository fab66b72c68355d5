"""Properties of AMD GPUs from arithmetic and data sheets, for machines without such a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators import of
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.spaces import space_for
from tests.spaces.drawing import H200, MI300X

DECODE = FlashDecode(1, 64, 8, 128, 131072, "bf16", 8)
GEMM = AllGatherGemm(2048, 7168, 8192, "bf16", "m", 8)


@pytest.mark.parametrize(
    ("hardware", "dies"),
    [
        (MI300X, 8),
        (replace(MI300X, processors=228), 6),  # MI300A
        (replace(MI300X, processors=38), 1),  # a partition of one die
        (replace(MI300X, target="hip:gfx950", processors=256), 8),
        (replace(MI300X, target="hip:gfx90a", processors=104), 1),
        (H200, 1),
    ],
)
def test_programs_go_in_turn_to_the_dies_that_there_are(hardware: Hardware, dies: int) -> None:
    assert hardware.dies == dies
    assert space_for(DECODE, hardware).variants["single"].parameters["chiplets"] == tuple(dict.fromkeys((1, dies)))


def links_us(problem: Problem, hardware: Hardware) -> float | None:
    """The bound of the links."""
    return of(problem).bounds_us(problem, hardware, {}).get("links")


def test_cold_is_colder_than_the_largest_cache() -> None:
    assert MI300X.cache_bytes == 256 << 20 > MI300X.l2_bytes
    assert H200.cache_bytes == H200.l2_bytes


def test_links_of_amd_add_up_over_the_peers() -> None:
    here = replace(MI300X, device="AMD Instinct MI300X")
    assert links_us(GEMM, here) == pytest.approx(256 * 8192 * 2 / 64e3)
    assert links_us(replace(GEMM, world_size=2), here) == pytest.approx(1024 * 8192 * 2 / 64e3)
    assert links_us(replace(GEMM, world_size=1), here) == 0
    assert links_us(GEMM, replace(here, device="AMD Instinct MI210")) is None
