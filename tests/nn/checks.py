"""Checks of the modules: functions that run on all ranks. Each returns the result that a user would see."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autotax
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.heap.world import World
from autotax.nn import AllGatherLinear, FlashDecode
from autotax.operators.verification import relative_error

N, K = 24, 40
HEADS, KV_HEADS, DIM = 4, 2, 16
HIDDEN = 256


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same numbers on every rank for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(world: World, rows: int, call: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The whole input of a call, and the part of this rank."""
    whole = normal(world.size * rows, K, seed=call, dtype=dtype)
    return whole, whole[world.rank * rows : (world.rank + 1) * rows].clone()


def linear_errors(layer: AllGatherLinear, world: World, rows: Sequence[int]) -> list[float]:
    """Relative error of a call with each number of rows, against the product of the whole input in float32."""
    errors = []
    for call, some in enumerate(rows):
        whole, own = rows_of(world, some, call, layer.weight.dtype)
        out = torch.full((len(whole), len(layer.weight)), math.nan, dtype=own.dtype)
        with torch.no_grad():
            assert layer(own, out) is out
            errors.append(relative_error(out, whole.float() @ layer.weight.float().t()))
    assert layer.failure() is None
    return errors


def weight_of(world: World, seed: int = 99, dtype: torch.dtype = torch.float32, n: int = N) -> Tensor:
    return normal(n, K, seed=seed * 100 + world.rank, dtype=dtype)


def forced_linear(
    world: World, config: Config, max_m: int, rows: Sequence[int], dtype: torch.dtype
) -> tuple[list[float], list[bool]]:
    """Errors of calls with these numbers of rows, and which of them the config ran itself."""
    layer = AllGatherLinear(weight_of(world, dtype=dtype), None, max_m, config=config)
    errors = linear_errors(layer, world, rows)
    tuned = [layer._known[some, K][0] is not layer._plain for some in rows]
    layer.close()
    return errors, tuned


def linear_where_one_was_refused(world: World) -> list[float]:
    """Errors of calls that follow one which rank 0 alone makes, and is refused, with a number of rows that is new."""
    layer = AllGatherLinear(weight_of(world), None, 32, config=Config.of("decomposed", products="one", comm=1, warm=0))
    errors = linear_errors(layer, world, [16])
    if world.rank == 0:
        with pytest.raises(UsageError, match="out is"), torch.no_grad():
            layer(normal(4, K, seed=1, dtype=torch.float32), torch.empty(3, 3))
    errors += linear_errors(layer, world, [16, 4, 4, 4])
    layer.close()
    return errors


def cache_of(
    world: World, batch: int, room: int, call: int, dtype: torch.dtype, heads: int = KV_HEADS, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and ragged lengths (some of them 0) of the rank `world.rank`."""
    seed = 1000 * call + 10 * world.rank
    k, v = (normal(batch, heads, room, dim, seed=seed + i, dtype=dtype) for i in (1, 2))
    lengths = torch.randint(0, room + 1, (batch,), generator=torch.Generator().manual_seed(seed + 3), dtype=torch.int32)
    lengths[call % batch] = 0
    return k, v, lengths


def attention(q: Tensor, caches: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Plain float32 attention, one sequence at a time, over the tokens of all ranks."""
    out = torch.zeros(q.shape)
    for b in range(len(q)):
        keys, values = (torch.cat([cache[i][b, :, : cache[2][b]] for cache in caches], dim=1).float() for i in (0, 1))
        if keys.shape[1]:
            group = q.shape[1] // keys.shape[0]
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            scores = (keys @ q[b].float()[:, :, None])[..., 0] / math.sqrt(q.shape[2])
            out[b] = (torch.softmax(scores, -1)[:, None] @ values)[:, 0]
    return out


def paged(k: Tensor, v: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same cache as pools of pages in reverse order; beyond what a sequence has there is garbage, in table and pools."""
    batch, heads, room, dim = k.shape
    pages = -(-room // page)
    table = torch.arange(batch * pages, 0, -1, dtype=torch.int32).view(batch, pages)
    pools = []
    for cache in (k, v):
        padded = torch.full((batch, heads, pages * page, dim), math.nan, dtype=cache.dtype)
        padded[:, :, :room] = cache
        pool = torch.full((batch * pages + 1, page, heads, dim), math.nan, dtype=cache.dtype)
        pool[table.long()] = padded.view(batch, heads, pages, page, dim).permute(0, 2, 3, 1, 4)
        pools.append(pool)
    table[torch.arange(pages) * page >= lengths[:, None]] = -1
    return pools[0], pools[1], lengths, table


def everyones(world: World, mine: tuple[Tensor, ...]) -> list[Any]:
    tensors: list[Any] = [None] * world.size
    dist.all_gather_object(tensors, mine, group=world.control)
    return tensors


def decode_errors(attend: FlashDecode, world: World, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[float]:
    """Relative error of a call for each (batch, room for tokens), of the heads that this rank gets."""
    page = attend.choices[-1].problem.to_dict().get("page", 0)
    first = world.rank * attend.out_heads % HEADS
    errors = []
    for call, (batch, room) in enumerate(sizes):
        q = normal(batch, HEADS, DIM, seed=call, dtype=dtype)
        mine = cache_of(world, batch, room, call, dtype)
        out = torch.full((batch, attend.out_heads, DIM), math.nan, dtype=dtype)
        given = paged(*mine, page) if page else mine
        attend(q, *given, out=out)
        errors.append(relative_error(out, attention(q, everyones(world, mine))[:, first : first + attend.out_heads]))
    assert attend.failure() is None
    return errors


def forced_decode(
    world: World, config: Config | None, batch: int, kv_len: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype,
    output: str = "replicated", page: int = 0,
) -> tuple[list[float], list[bool]]:  # fmt: skip
    attend = FlashDecode(KV_HEADS, HEADS, DIM, batch, kv_len, dtype=dtype, device="cpu", config=config, output=output, page=page)
    errors = decode_errors(attend, world, sizes, dtype)
    made = [(some, -(-room // page) * page if page else room) for some, room in sizes]
    tuned = [attend._calls[size] is not attend._plain for size in made]
    attend.close()
    return errors, tuned


def looked_up(
    world: World, databases: Sequence[str], max_m: int, rows: Sequence[int], conditions: Conditions | None = None
) -> tuple[list[float], list[str], list[str]]:
    """Errors, the variant of each size, and the warnings, of a layer for which each rank has its own database."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = AllGatherLinear(weight_of(world), None, max_m, db=databases[world.rank], conditions=conditions)
    errors = linear_errors(layer, world, rows)
    variants = [choice.config.variant if choice.config else "bsp" for choice in layer.choices]
    layer.close()
    return errors, variants, [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def attention_looked_up(_: World, db: str, sizes: tuple[int, int], conditions: Conditions | None) -> list[str]:
    """The variant of the greatest batch, for which tuned configs are looked up, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend = FlashDecode(KV_HEADS, HEADS, DIM, *sizes, dtype=torch.float32, device="cpu", db=db, conditions=conditions)
    config = attend.choices[-1].config
    attend.close()
    messages = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    return [config.variant if config else "bsp", *messages]


def refusal(world: World, kind: str) -> str:
    """The line with which a bad construction or call is refused on this rank; "" if it is not refused."""
    weight = weight_of(world)
    alone = world.rank == 0

    def build(**more: Any) -> AllGatherLinear:
        return AllGatherLinear(more.pop("weight", weight), None, more.pop("max_m", 16), **more)

    def decode(**more: Any) -> FlashDecode:
        usual = {"kv_heads": 2, "q_heads": 4, "head_dim": 16, "max_batch": 2, "max_kv_len": 32, "device": "cpu"}
        return FlashDecode(**(usual | more))

    def call(x: Tensor, layer: AllGatherLinear | None = None, **more: Any) -> None:
        (layer or build())(x, **more)

    def attend_pages(columns: int, page: int = 16) -> None:
        q, pool = torch.zeros(2, 4, 16, dtype=torch.bfloat16), torch.zeros(3, 16, 2, 16, dtype=torch.bfloat16)
        table = torch.zeros(2, columns, dtype=torch.int32) if columns else None
        decode(page=page)(q, pool, pool, torch.zeros(2, dtype=torch.int32), table)

    def attend(batch: int = 2, room: int = 8, lengths: torch.dtype = torch.int32) -> None:
        q, cache = torch.zeros(batch, 4, 16, dtype=torch.bfloat16), torch.zeros(batch, 2, room, 16, dtype=torch.bfloat16)
        decode()(q, cache, cache, torch.zeros(batch, dtype=lengths))

    def closed() -> None:
        layer = build()
        layer.close()
        call(torch.zeros(1, K), layer)

    actions = {
        "too many rows": lambda: call(torch.zeros(9, K)),
        "another K": lambda: call(torch.zeros(2, K + 8)),
        "another type": lambda: call(torch.zeros(2, K, dtype=torch.float16)),
        "a wrong out": lambda: call(torch.zeros(2, K), out=torch.zeros(2, N)),
        "a gradient into out": lambda: call(torch.zeros(2, K, requires_grad=True), out=torch.zeros(4, N)),
        "closed": closed,
        "max_m below the ranks": lambda: build(max_m=1),
        "a weight of integers": lambda: build(weight=torch.zeros(4, 4, dtype=torch.int64)),
        "a weight of one dimension": lambda: build(weight=torch.zeros(4)),
        "no columns": lambda: build(weight=torch.zeros(0, 4)),
        "sizes that no rank can share": lambda: build(sizes=[3]),
        "a config that is not admitted": lambda: build(config=Config.of("push", block_m=7)),
        "an unknown variant": lambda: build(config=Config("best")),
        "a bad size on one rank": lambda: build(max_m=1 if alone else 16),
        "different sizes": lambda: build(max_m=8 if alone else 16),
        "different conditions": lambda: build(conditions=Conditions("eager", "warm", 20.0 if alone else 0.0)),
        "different conditions of attention": lambda: decode(conditions=Conditions("eager", "warm", 20.0) if alone else None),
        "conditions that are none": lambda: build(conditions="eager"),
        "different columns": lambda: build(weight=weight_of(world, n=8 if alone else 16)),
        "like a layer of another size": lambda: build(weight=torch.zeros(N + 8, K), like=build()),
        "a broken database": lambda: build(db="ftp://nowhere" if alone else None),
        "heads that do not share": lambda: decode(q_heads=5),
        "heads that the ranks cannot own": lambda: decode(q_heads=3, kv_heads=1, output="head_scatter"),
        "no head": lambda: decode(kv_heads=0),
        "no batch": lambda: decode(max_batch=0),
        "a type of integers": lambda: decode(dtype=torch.int8),
        "too many sequences": lambda: attend(batch=3),
        "too many tokens": lambda: attend(room=17),
        "a page of another size": lambda: decode(page=32),
        "no block table": lambda: attend_pages(0),
        "a block table without pages": lambda: attend_pages(1, page=0),
        "too many pages": lambda: attend_pages(2),
        "lengths of another type": lambda: attend(lengths=torch.int64),
    }
    try:
        actions[kind]()
    except autotax.UsageError as error:
        return str(error)
    return ""
