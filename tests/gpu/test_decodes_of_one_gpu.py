"""Flash Decode with a cache of 8 bits, sinks, a window and several query tokens, on ranks that share one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.operators.problems import FlashDecode
from autotax.operators.verification import TOLERANCE
from autotax.spaces import space_for
from tests.gpu import ranks_of_one_gpu
from tests.spaces.drawing import drawn

pytestmark = pytest.mark.gpu

REPLAYS = 300
LONG = 10_000
NARROW: Any = {"kv_dtype": "e4m3fnuz" if "gfx942" in detect().target else "e4m3"}
PROBLEMS = [
    FlashDecode(3, 32, 4, 128, 4099, "bf16", 4, **NARROW),
    FlashDecode(3, 12, 4, 80, 1001, "fp16", 2, "head_scatter", 16, **NARROW),
    FlashDecode(5, 64, 8, 64, 4099, "bf16", 4, sinks="learned", window=128),
    FlashDecode(2, 32, 4, 128, 2051, "bf16", 2, "head_scatter", 64, window=1500, queries=3),
    FlashDecode(2, 32, 8, 128, 4099, "bf16", 4, "replicated", 16, **NARROW, sinks="learned", window=3000, queries=4),
]
VARIANTS = ("gather", "fine_grained", "fused", "single", "resident", "compact")
MANY_THAT_WAIT = ("fine_grained", "fused")
"""Variants with one program for each row, which waits for peers. Programs of three ranks must leave processors for the fourth."""


def shared(problem: FlashDecode, variant: str) -> FlashDecode:
    """The problem, or one whose programs of all ranks fit on one GPU together."""
    if variant not in MANY_THAT_WAIT or problem.world_size < 4:
        return problem
    fewer = 2 if problem.queries == 1 else 4
    return replace(problem, batch=1, q_heads=problem.q_heads // fewer, kv_heads=problem.kv_heads // fewer)


CASES = [(shared(problem, variant), variant) for problem in PROBLEMS for variant in VARIANTS]


def run(problem: FlashDecode, config: Config, replays: int = REPLAYS) -> None:
    worst, wrong = ranks_of_one_gpu.replay(problem, config, replays)
    assert worst <= TOLERANCE[problem.dtype]
    assert wrong == 0


def default(problem: FlashDecode, variant: str) -> Config:
    space = space_for(problem, ranks_of_one_gpu.share_of(problem.world_size))
    if variant not in space.variants:
        pytest.skip(f"{problem.key} has no {variant}")
    return space.default(variant)


@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_replays_a_graph_with_late_ranks_and_never_errs(problem: FlashDecode, variant: str) -> None:
    run(problem, default(problem, variant))


@pytest.mark.full
@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_replays_it_ten_thousand_times(problem: FlashDecode, variant: str) -> None:
    run(problem, default(problem, variant), LONG)


@pytest.mark.parametrize("name", "abcdef")
@pytest.mark.parametrize("variant", ["fused", "resident"])
def test_configs_drawn_at_random_never_err(variant: str, name: str) -> None:
    problem = shared(PROBLEMS[ord(name) % len(PROBLEMS)], variant)
    default(problem, variant)
    run(problem, drawn(space_for(problem, ranks_of_one_gpu.share_of(problem.world_size)), variant, name))
