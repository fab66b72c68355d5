"""Every variant and module on eight CPU ranks, as a host of eight GPUs runs them: right results, and no shared memory stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap import World
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
from tests.nn.conformance import ROWS, Subject, made
from tests.nn.test_conformance import SUBJECTS

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
    AllReduceNorm(3, 64, "bf16", WORLD, k=32),
    AllReduceNorm(3, 64, "bf16", WORLD, k=32, scales="row", quantize="row"),
    GatherAttention(1, 16, 8, 16, 128, "bf16", WORLD),
    GatherAttention(1, 8, 8, 16, 128, "bf16", WORLD, layout="zigzag"),
    GatherAttention(1, 8, 8, 16, 128, "bf16", WORLD, window=20),  # more tokens than a rank has
    GatherAttention(1, 8, 8, 32, 128, "fp16", WORLD, "none", v_dim=16),
]
CASES = [(problem, variant) for problem in PROBLEMS for variant in space_for(problem, detect("cpu")).variants]
AGREED = [
    (problem, variant)
    for problem, variant in CASES
    if (isinstance(problem, AllReduceNorm) and variant != "bsp")
    or (isinstance(problem, GemmReduceScatter) and problem.output == "replicated")
]
"""Problems and variants that promise equal bits on all ranks."""
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


@pytest.mark.parametrize("streams", [2, 4])
def test_keys_go_to_several_peers_at_once(ranks: Ranks, streams: int) -> None:
    problem = GatherAttention(1, 8, 8, 16, 128, "bf16", WORLD, layout="zigzag")
    space = space_for(problem, detect("cpu"))
    config = Config.of("decomposed", space.default("decomposed").values | {"streams": streams})
    assert config in space
    for errors in ranks.run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= tolerance(problem)


@pytest.mark.parametrize(("problem", "variant"), AGREED, ids=str)
def test_eight_ranks_have_equal_bits(ranks: Ranks, problem: Problem, variant: str) -> None:
    config = space_for(problem, detect("cpu")).default(variant)
    digests = ranks.run(conformance.bits_of, problem, config, 2)
    assert len({digest for of_rank in digests for digest in of_rank}) == 1, digests


MODULES = [pytest.param(subject, id=name) for name, subject in SUBJECTS.items() if subject.output != "head_scatter"]


def is_right(world: World, subject: Subject) -> bool:
    subject.world = world
    with made(subject) as module:
        subject.is_right(module, rows=WORLD if subject.linear == "scatter" else ROWS)
        return module.world_size == WORLD


@pytest.mark.parametrize("subject", MODULES)
def test_a_module_is_right_on_eight_ranks(ranks: Ranks, subject: Subject) -> None:
    assert all(ranks.run(is_right, subject, timeout=100))
