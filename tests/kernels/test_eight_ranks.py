"""Every variant on eight CPU ranks, as a host of eight GPUs runs it: right results at every call, and no shared memory stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.operators.problems import (
    AllGatherGemm,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    GemmReduceScatter,
    HeadGather,
)
from autotax.operators.verification import tolerance
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance

WORLD = 8
PROBLEMS: list[Problem] = [
    AllGatherGemm(17, 24, 40, "bf16", "m", WORLD),  # ranks of unlike numbers of rows, one without any
    AllGatherGemm(16, 16, 32, "e4m3", "m", WORLD, scales="row"),
    GemmReduceScatter(20, 24, 40, "fp32", "scattered", WORLD),
    GemmReduceScatter(3, 32, 48, "bf16", "replicated", WORLD),
    GemmReduceScatter(16, 128, 128, "e4m3", "replicated", WORLD, scales="block"),
    FlashDecode(2, 8, 2, 16, 130, "bf16", WORLD),
    FlashDecode(1, 16, 8, 16, 40, "fp32", WORLD, "head_scatter"),
    DecodeMerge(2, 8, 16, "bf16", WORLD, "head_scatter"),
    HeadGather(2, 16, 16, "bf16", WORLD),
    AllReduceNorm(9, 64, "bf16", WORLD, quant="row"),
    AllReduceNorm(3, 64, "bf16", WORLD, k=32, scales="row", quantize="row"),
    GatherAttention(1, 16, 8, 16, 128, "bf16", WORLD),
]
CASES = [(problem, variant) for problem in PROBLEMS for variant in space_for(problem, detect("cpu")).variants]
CALLS = 3

pytestmark = [pytest.mark.volume, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    before = set(Path("/dev/shm").iterdir())
    with Ranks(WORLD) as eight:
        yield eight
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "autotax" in path.name]


@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_is_right_on_eight_ranks(ranks: Ranks, problem: Problem, variant: str) -> None:
    config = space_for(problem, detect("cpu")).default(variant)
    for errors in ranks.run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= tolerance(problem)
