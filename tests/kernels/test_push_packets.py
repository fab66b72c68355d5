"""`push_packets` beyond what all variants do: every bit, late and missing ranks, fewer rows between more, epochs that wrap."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels.all_gather_gemm.push_packets import PushPackets
from autotax.kernels.offline import known_hardware
from autotax.kernels.primitives import EPOCH
from autotax.operators.problems import AllGatherGemm
from autotax.operators.verification import TOLERANCE, make_inputs, reference, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance

WORLD = 3
SHARDED: dict[str, AllGatherGemm] = {
    "m": AllGatherGemm(22, 45, 336, "bf16", "m", WORLD),  # shards of two pieces, one short; the last rows are padding
    "k": AllGatherGemm(22, 45, 336, "fp16", "k", WORLD),  # two pieces too
}
ROWS = (22, 1, 7, 22, 2, 3, 21, 22)
LOOKS = 500
LAST = 2**31 - 1
"""The greatest call number; the least one follows."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as three:
        yield three


def config_of(problem: AllGatherGemm, **more: int) -> Config:
    space = space_for(problem, detect("cpu"))
    config = Config.of("push_packets", space.default("push_packets").values | {"block_m": 16, "block_k": 32} | more)
    assert config in space
    return config


CASES = [("m", 1), ("k", 2)]


@pytest.mark.parametrize(("shard", "splits"), CASES)
def test_calls_of_fewer_rows_may_come_between_others(ranks: Ranks, shard: str, splits: int) -> None:
    problem = SHARDED[shard]
    smaller = [replace(problem, m=m) for m in ROWS]
    for errors in ranks.run(conformance.errors_of_sizes, problem, config_of(problem, splits=splits), smaller):
        assert max(errors) <= TOLERANCE[problem.dtype]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_sends_is_named_by_all_others(ranks: Ranks, missing: int) -> None:
    problem = SHARDED["mk"[missing // 2]]
    said = ranks.run(conformance.note_without, problem, config_of(problem), missing, LOOKS)
    for rank, line in enumerate(said):
        if rank != missing:
            assert re.match(f"rank {rank} waited for flag .* of rank {missing}: needed 1, saw 0", str(line))


ODD = (-1, 0, 1, 2, 3, -(2**31), -(2**31) + 0x8000, 0x7FC07FC0, 0x7F80FF80)
"""Words of four bytes: no bits, all bits, call numbers, two minus zeros, NaNs and infinities."""


def _odd(problem: AllGatherGemm, call: int, rank: int) -> torch.Tensor:
    """A shard of such words, in an order that differs from call to call and between ranks."""
    at = torch.arange(problem.shard_rows * problem.shard_cols // 2) + 4 * call + rank
    return torch.tensor(ODD, dtype=torch.int32)[at % len(ODD)].view(torch.bfloat16).view(problem.shard_rows, -1)


def gathered_right(world: World, problem: AllGatherGemm, config: Config, calls: int) -> bool:
    """Whether all bits of A arrive, whoever is late."""
    context, kernel = conformance.ready(world, problem, config)
    assert isinstance(kernel, PushPackets)
    late, right = random.Random(world.rank), True
    for call in range(calls):
        _, b = make_inputs(problem, call, world.rank, world.device).tensors
        time.sleep(late.uniform(0, 0.01))
        kernel(_odd(problem, call, world.rank), b, torch.empty(problem.m, problem.n, dtype=torch.bfloat16))
        assert kernel.failure() is None, kernel.failure()
        shards = [_odd(problem, call, rank) for rank in range(problem.world_size)]
        right &= torch.equal(kernel.whole.view(torch.int16), torch.cat(shards, "mk".index(problem.shard)).view(torch.int16))
    context.heap.close()
    return right


@pytest.mark.parametrize("shard", ["m", "k"])
def test_every_bit_arrives_whoever_is_late(ranks: Ranks, shard: str) -> None:
    problem = replace(SHARDED[shard], dtype="bf16")
    assert ranks.run(gathered_right, problem, config_of(problem), 5) == [True] * WORLD


def errors_from(world: World, problem: AllGatherGemm, config: Config, epochs: list[int], calls: int) -> list[float]:
    """Errors of some calls that start at each of these call numbers."""
    context, kernel = conformance.ready(world, problem, config)
    assert isinstance(kernel, PushPackets)
    errors = []
    for epoch in epochs:
        world.barrier()
        kernel.control[EPOCH.value] = epoch
        counted = (epoch - 1) * context.processors  # by the calls before
        kernel.received[0] = (counted + 2**31) % 2**32 - 2**31
        for seed in range(calls):
            call = make_inputs(problem, seed, world.rank, world.device)
            call.poison()
            kernel(*call.tensors, call.out)
            assert kernel.failure() is None, kernel.failure()
            errors.append(relative_error(call.out, reference(problem, seed, world.rank, world.device)))
        reached = int(kernel.control[EPOCH.value])
        assert reached == (epoch + calls + 2**31) % 2**32 - 2**31
    context.heap.close()
    return errors


@pytest.mark.filterwarnings("ignore:overflow")
def test_numbers_of_calls_may_wrap_around(ranks: Ranks) -> None:
    """At the greatest number, and where the sign changes back."""
    problem = SHARDED["m"]
    for errors in ranks.run(errors_from, problem, config_of(problem), [LAST - 1, -2], 4):
        assert len(errors) == 8
        assert max(errors) <= TOLERANCE[problem.dtype]


def test_it_is_offered_where_no_warps_with_roles_do_the_same() -> None:
    few, many = AllGatherGemm(256, 7168, 8192, "bf16", "m", 8), AllGatherGemm(257, 7168, 8192, "bf16", "m", 8)
    without: list[Any] = [detect("cpu"), *map(known_hardware, ("hip:gfx942", "hip:gfx950", "cuda:100"))]
    for hardware in without:
        assert "push_packets" in space_for(few, hardware).variants
        assert "push_packets" not in space_for(many, hardware).variants
        assert "push_packets" not in space_for(replace(few, weight="kn"), hardware).variants
        assert "push_packets" not in space_for(replace(few, k=8191), hardware).variants  # no whole words
        assert "push_packets" in space_for(replace(few, k=8191, dtype="fp32"), hardware).variants
    assert {"push_packets", "push_words"} & set(space_for(few, known_hardware("cuda:90")).variants) == {"push_words"}


@pytest.mark.parametrize("target", ["hip:gfx942", "hip:gfx950", "cuda:100"])
@pytest.mark.parametrize("m", [1, 16, 64, 100, 256])
def test_seeds_are_admitted_and_of_several_tiles(target: str, m: int) -> None:
    for problem in (AllGatherGemm(m, 7168, 8192, "bf16", "m", 8), AllGatherGemm(m, 1536, 4096, "fp16", "k", 4)):
        space = space_for(problem, known_hardware(target))
        seeds = space.variants["push_packets"].seeds
        assert all(seed in space for seed in seeds)
        assert len({(seed["block_n"], seed["block_k"]) for seed in seeds}) >= 3
