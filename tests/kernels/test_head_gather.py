"""Head gather beyond what every variant must do: every bit, late ranks, fewer tokens between more, missing ranks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.hardware import detect
from autotax.heap import World
from autotax.operators.problems import HeadGather
from autotax.operators.verification import Calls, make_inputs
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.volume import volume

WORLD = 3
PROBLEM = HeadGather(5, 12, 64, "bf16", WORLD)
WAYS: list[tuple[str, dict[str, Value]]] = [
    ("bsp", {}),
    ("push", {"senders": 2, "block": 512, "num_warps": 4}),
    ("words", {"block": 128, "num_warps": 4, "per_processor": 1}),
]
TOKENS = (5, 1, 2, 5, 1, 1, 1, 1, 1, 1, 5, 4)
PATIENCE = 1500


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as three:
        yield three


def mixed(world: World, config: Config, tokens: tuple[int, ...]) -> bool:
    """Whether all bits of all calls are right, those of NaNs too."""
    context, kernel = conformance.ready(world, PROBLEM, config)
    late, right = random.Random(world.rank), True
    for seed, some in enumerate(tokens):
        case = replace(PROBLEM, batch=some)
        call = make_inputs(case, seed, world.rank, world.device)
        call.tensors[0].view(torch.int16)[0, 0, :3] = torch.tensor([-1, 32767, -32767 + world.rank], dtype=torch.int16)
        call.poison()
        time.sleep(late.uniform(0, 0.01))
        fitted = kernel.fitted(case)
        assert fitted is not None
        fitted(*call.tensors, call.out)
        assert kernel.failure() is None, kernel.failure()
        parts = [other.tensors[0].view(torch.int16) for other in Calls(case, seed, world.device)]
        for rank, part in enumerate(parts):
            part[0, 0, :3] = torch.tensor([-1, 32767, -32767 + rank], dtype=torch.int16)
        right &= torch.equal(call.out.view(torch.int16), torch.cat(parts, 1))
    context.heap.close()
    return right


@pytest.mark.parametrize(("variant", "way"), WAYS, ids=str)
def test_every_bit_arrives_whoever_is_late(ranks: Ranks, variant: str, way: dict[str, Value]) -> None:
    config = Config.of(variant, way)
    assert config in space_for(PROBLEM, detect("cpu"))
    assert ranks.run(mixed, config, TOKENS) == [True] * WORLD


@pytest.mark.parametrize(("variant", "way"), [WAYS[1], *volume(*WAYS[2:])], ids=str)
def test_a_rank_that_never_calls_is_named_by_all_others(ranks: Ranks, variant: str, way: dict[str, Value]) -> None:
    missing = 2
    said = ranks.run(conformance.note_without, PROBLEM, Config.of(variant, way), missing, PATIENCE)
    for rank, line in enumerate(said):
        if rank != missing:
            assert re.match(f"rank {rank} waited for flag .* of rank {missing}:", str(line))
