"""Flash Decode with a cache of 8 bits, sinks, a window and several query tokens: right at every variant, alone and together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.hardware import detect
from autotax.heap import World, open_heap
from autotax.heap.triton_interpreter import CPU_POLL_LIMIT
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.offline import known_hardware
from autotax.operators.inputs import Call
from autotax.operators.problems import FlashDecode
from autotax.operators.registry import of
from autotax.operators.verification import TOLERANCE, Calls, Expected, make_inputs, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance

WORLD = 3
CALLS = 3
"""Odd ones are ragged, with empty sequences and such of one token on some ranks."""
VARIANTS = ("bsp", "gather", "fine_grained", "fused", "single", "resident", "compact")
BASES = (
    FlashDecode(2, 6, 2, 16, 200, "bf16", WORLD),
    FlashDecode(2, 6, 3, 32, 205, "fp16", WORLD, "head_scatter", 16),
    FlashDecode(2, 2, 1, 9, 49, "fp32", WORLD),
)
ALL = {"kv_dtype": "e4m3", "sinks": "learned", "window": 70, "queries": 3}
FEATURES: dict[str, dict[str, Any]] = {
    "8 bits": {"kv_dtype": "e4m3"},
    "8 bits of AMD": {"kv_dtype": "e4m3fnuz"},
    "sinks": {"sinks": "learned"},
    "a window over two ranks": {"window": 90},
    "a window within a rank": {"window": 17},
    "a window of one token": {"window": 1},
    "queries": {"queries": 3},
    "queries in a window": {"queries": 2, "window": 20},
    "all": ALL,
    "all of AMD": ALL | {"kv_dtype": "e4m3fnuz"},
}
BOTH_CORES = ("bsp", "resident")
FEW = {("all", "resident", "by_block"), ("all of AMD", "bsp", "by_warp")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as three:
        yield three


def config_of(problem: FlashDecode, variant: str, attend: str = "by_block", splits: int = 2) -> Config:
    """A config with small blocks, so that a piece has several."""
    space = space_for(problem, detect("cpu"))
    sizes = {"attend": attend, "splits": 1, "block_s": 64} if attend == "by_warp" else {"splits": splits, "block_s": 16}
    if attend == "by_head":
        sizes["num_warps"] = 1
    config = Config.of(variant, space.default(variant).values | {"attend": attend} | sizes)
    assert config in space, space.why_not(config)
    return config


def _cases() -> Iterator[Any]:
    for place, (name, features) in enumerate(FEATURES.items()):
        for variant in VARIANTS:
            for attend in ("by_block", "by_warp") if variant in BOTH_CORES else ("by_block",):
                problem = replace(BASES[(place + VARIANTS.index(variant)) % 2], **features)
                marks = () if (name, variant, attend) in FEW else (pytest.mark.volume,)
                yield pytest.param(problem, variant, attend, marks=marks, id=f"{name}-{variant}-{attend}")
    for variant in VARIANTS[:-1]:
        yield pytest.param(replace(BASES[2], **ALL), variant, "by_block", marks=pytest.mark.volume, id=f"floats-{variant}")


@pytest.mark.parametrize(("problem", "variant", "attend"), list(_cases()))
def test_is_right_at_every_call(ranks: Ranks, problem: FlashDecode, variant: str, attend: str) -> None:
    for errors in ranks.run(conformance.errors_of, problem, config_of(problem, variant, attend), CALLS):
        assert max(errors) <= TOLERANCE[problem.dtype]


OWN_HEADS = (
    (FlashDecode(2, 16, 8, 16, 200, "bf16", WORLD, page=16, **(ALL | {"queries": 2})), 4),
    (FlashDecode(2, 12, 6, 32, 205, "fp16", WORLD, "head_scatter", 16), 2),  # a rank owns two KV heads
    (FlashDecode(2, 3, 3, 12, 100, "bf16", WORLD, page=64, kv_dtype="e4m3fnuz"), 1),
    (FlashDecode(2, 8, 4, 16, 200, "bf16", WORLD, queries=4), 4),
)
"""Problems of which each warp may have a KV head, and how many warps."""


@pytest.mark.parametrize(
    ("problem", "warps", "variant", "splits"),
    [
        pytest.param(problem, warps, variant, splits, marks=() if (place, variant, splits) in few else (pytest.mark.volume,))
        for few in ({(0, "single", 2), (1, "bsp", 1), (2, "resident", 2)},)
        for place, (problem, warps) in enumerate(OWN_HEADS)
        for variant in VARIANTS
        for splits in (1, 2)
    ],
    ids=str,
)
def test_warps_with_kv_heads_of_their_own_are_right(
    ranks: Ranks, problem: FlashDecode, warps: int, variant: str, splits: int
) -> None:
    space = space_for(problem, detect("cpu"))
    own = {"attend": "by_head", "num_warps": warps, "block_s": 16, "splits": splits}
    config = Config.of(variant, space.default(variant).values | own)
    assert warps == 2 or config in space, space.why_not(config)  # CPU ranks tell programs of one head from those of four only
    for errors in ranks.run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= TOLERANCE[problem.dtype]


EDGES = (
    replace(BASES[0], kv_len=1, **ALL),  # ranks without tokens, and query tokens before the first one
    replace(BASES[0], kv_len=2, sinks="learned", window=1),
    replace(BASES[1], batch=3, kv_len=40, sinks="learned", window=3, queries=4),
)


@pytest.mark.volume
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("problem", EDGES, ids=str)
def test_few_tokens_are_right(ranks: Ranks, problem: FlashDecode, variant: str) -> None:
    config = space_for(problem, detect("cpu")).default(variant)
    for errors in ranks.run(conformance.errors_of, problem, config, 4):
        assert max(errors) <= TOLERANCE[problem.dtype]


@pytest.mark.parametrize(
    ("variant", "attend"),
    [("bsp", "by_block"), ("bsp", "by_head"), pytest.param("bsp", "by_warp", marks=pytest.mark.volume)],
)
def test_what_no_query_token_sees_may_hold_anything(ranks: Ranks, variant: str, attend: str) -> None:
    """Tokens before the window and after the end may hold NaN, also in a paged cache."""
    for base in BASES[:2]:
        problem = replace(base, q_heads=2 * base.kv_heads, sinks="learned", window=40, queries=2)
        for error in ranks.run(_error_among_nan, problem, config_of(problem, variant, attend)):
            assert error <= TOLERANCE[problem.dtype]


def _error_among_nan(world: World, problem: FlashDecode, config: Config) -> float:
    context = Context(world, open_heap(world, conformance.HEAP_BYTES), detect("cpu"), CPU_POLL_LIMIT)
    operator = prepare(problem, config, context)
    context.heap.check()
    call = make_inputs(problem, 0, world.rank, world.device)
    _spoil(problem, call)
    operator(*call.tensors, call.out)
    assert operator.failure() is None
    context.heap.close()
    return relative_error(call.out, right(problem, 0, world.rank))


def _spoil(problem: FlashDecode, call: Call) -> None:
    """Puts NaN in all tokens that no query token sees."""
    _, k, v, ends, *more = call.tensors
    starts = more[1 if problem.page else 0]
    room = (problem.pages * problem.page) or problem.shard_len
    for sequence in range(problem.batch):
        seen = range(int(starts.view(problem.batch, -1)[sequence, 0]), int(ends.view(problem.batch, -1)[sequence, -1]))
        for token in set(range(room)).difference(seen):
            for tensor in (k, v):
                if not problem.page:
                    tensor[sequence, :, token] = math.nan
                elif (page := int(more[0][sequence, token // problem.page])) < len(tensor):
                    tensor[page, token % problem.page] = math.nan


def right(problem: FlashDecode, seed: int, rank: int) -> Expected:
    return Expected.of(
        *of(problem).right(problem, Calls(problem, seed, torch.device("cpu")), rank)[0],
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem.dtype],
    )


def test_the_reference_is_that_of_one_cache_in_one_place() -> None:
    """A second reference in float64, one query token and head at a time, checks scales, sinks and positions."""
    problem = replace(BASES[0], batch=3, **ALL)
    seed = 3
    calls = list(Calls(problem, seed, torch.device("cpu")))
    got = right(problem, seed, 0).right
    q = calls[0].tensors[0].double()
    sinks = calls[0].tensors[-1].double()
    for sequence in range(problem.batch):
        held = [int(call.tensors[3][sequence, -1]) for call in calls]
        for head in range(problem.q_heads):
            mine = head // problem.q_per_kv
            keys, values = (
                torch.cat(
                    [
                        call.tensors[tensor][sequence, mine, :tokens].double() * call.tensors[5][tensor - 1, mine].double()
                        for call, tokens in zip(calls, held, strict=True)
                    ]
                )
                for tensor in (1, 2)
            )
            for query in range(problem.queries):
                behind = sum(held) - problem.queries + query + 1
                seen = slice(max(0, behind - problem.window), max(0, behind))
                weights = (keys[seen] @ q[sequence, head, query] / math.sqrt(problem.head_dim)).exp()
                wanted = weights @ values[seen] / (weights.sum() + sinks[head].exp())
                torch.testing.assert_close(got[sequence, head, query].double(), wanted, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("target", "kv_dtype", "message"),
    [
        ("cuda:90", "e4m3fnuz", "cuda:90 converts e4m3: give --kv-dtype e4m3 or same"),
        ("hip:gfx942", "e4m3", "hip:gfx942 converts e4m3fnuz: give --kv-dtype e4m3fnuz or same"),
        ("hip:gfx950", "e4m3fnuz", "hip:gfx950 converts e4m3: give"),
        ("cuda:80", "e4m3", "cuda:80 converts no type of 8 bits: give --kv-dtype same"),
    ],
)
def test_a_type_that_the_target_does_not_convert_is_refused(target: str, kv_dtype: str, message: str) -> None:
    hardware = replace(known_hardware("cuda:90" if target == "cuda:80" else target), target=target)
    with pytest.raises(UsageError, match=f"kv_dtype is {kv_dtype}; {message}"):
        space_for(FlashDecode(1, 64, 8, 128, 4096, "bf16", 4, kv_dtype=kv_dtype), hardware)
