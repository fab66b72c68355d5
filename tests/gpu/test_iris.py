"""On the memory of Iris: kernels of every operator, and the operators of Iris that comparisons have as alternatives.

tests/gpu/test_heap.py runs the conformance suite of heaps on Iris.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect, has_iris
from autotax.heap import World
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, GemmReduceScatter
from autotax.operators.verification import TOLERANCE
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.gpu.test_heap import WITH_IRIS
from tests.gpu.test_kernels import CASES, WORLD, compile_ahead, run

pytestmark = [pytest.mark.gpu, WITH_IRIS]

OTHERS = (DecodeMerge(16, 64, 128, "bf16", WORLD, "head_scatter"), AllReduceNorm(16, 8192, "bf16", WORLD))
ALL = [*((problem, variant) for problem in OTHERS for variant in space_for(problem, detect()).variants), *CASES]
IN_THE_HEAP = [case for case in ALL if registry.of(case[0]).variants[case[1]].role in ("search", "ladder")]
COUNT = 40
KERNELS = [IN_THE_HEAP[place * len(IN_THE_HEAP) // COUNT] for place in range(COUNT)]
"""Cases from all operators, types and variants that keep something in the heap."""
PROBLEMS = (
    AllGatherGemm(512, 1024, 2048, "bf16", "k", WORLD),
    AllGatherGemm(512, 1024, 2048, "bf16", "m", WORLD),
    GemmReduceScatter(256 * WORLD, 1024, 1024, "bf16", "scattered", WORLD),
    GemmReduceScatter(256, 1024, 1024, "bf16", "replicated", WORLD),
    AllReduceNorm(16, 1024, "bf16", WORLD),
)
OPERATORS = [
    (problem, peer.name)
    for problem in PROBLEMS
    for peer in registry.of(problem).peers.values()
    if peer.name.startswith("iris_") and peer.where(problem, detect())
]
ON_AMD_ONLY = {"iris_all_gather", "iris_all_gather_tuned", "iris_all_reduce"}
"""Their launches name an option of AMD's compiler, which Triton for NVIDIA refuses; the tuned all-reduce has other ways."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    compile_ahead([(problem, space_for(problem, detect()).default(variant)) for problem, variant in KERNELS])
    with mock.patch.dict(os.environ, {"AUTOTAX_HEAP": "iris"}), Ranks(WORLD, detect().backend) as pool:
        yield pool


def test_iris_is_here() -> None:
    assert has_iris() and len(set(KERNELS)) == COUNT and OPERATORS


@pytest.mark.parametrize(("problem", "variant"), KERNELS, ids=str)
def test_kernels_replay_and_never_err(ranks: Ranks, problem: Problem, variant: str) -> None:
    run(ranks, problem, space_for(problem, detect()).default(variant))


@pytest.mark.parametrize(("problem", "name"), OPERATORS, ids=str)
def test_operators_of_iris_are_right_or_say_why_not(ranks: Ranks, problem: Problem, name: str) -> None:
    for errors, reason in ranks.run(errors_or_reason, problem, name, timeout=120):
        if detect().backend == "cuda" and name in ON_AMD_ONLY:
            assert reason.startswith("Iris fails: ") and "waves_per_eu" in reason
        else:
            assert not reason and max(errors) <= TOLERANCE["bf16"]


def errors_or_reason(world: World, problem: Problem, name: str) -> tuple[list[float], str]:
    """The errors of three calls, or why there are none. All ranks fail alike, and can go on."""
    try:
        return conformance.errors_of(world, problem, Config(name), 3), ""
    except RuntimeError as error:
        return [], str(error)
