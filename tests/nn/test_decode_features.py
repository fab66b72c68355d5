"""FlashDecode as serving engines call it: 8 bits, sinks, windows, several query tokens, tokens dealt out in turn or in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.hardware import detect
from autotax.heap import World
from autotax.nn import FlashDecode, kv_scales, seen_tokens
from autotax.operators.problems import FlashDecode as Problem
from autotax.operators.verification import TOLERANCE, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.nn.checks import paged

BATCH, HEADS, KV_HEADS, DIM, ROOM, WORLD = 3, 4, 2, 16, 16, 2
ALL: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "sinks": True, "window": 11, "queries": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "8 bits": {"kv_dtype": torch.float8_e4m3fn},
    "sinks": {"sinks": True},
    "window": {"window": 11},
    "queries": {"queries": 2},
    "all": ALL,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as two:
        yield two


def config_of(variant: str | None, features: dict[str, Any], output: str, page: int) -> Config | None:
    if variant is None:
        return None
    problem = Problem(BATCH, HEADS, KV_HEADS, DIM, ROOM * WORLD, "fp32", WORLD, output, page, **named(features))
    sizes: dict[str, Value] = {"block_s": 16, "splits": 1}
    return Config.of(variant, space_for(problem, detect("cpu")).default(variant).values | sizes)


def named(features: dict[str, Any]) -> dict[str, Any]:
    """The features under their names in a problem."""
    words = {"kv_dtype": "e4m3" if "kv_dtype" in features else "same", "sinks": "learned" if "sinks" in features else "none"}
    return features | words


def errors_of(
    world: World | None, config: Config | None, features: dict[str, Any], interleave: int, output: str, page: int
) -> list[float]:
    """Errors of calls of several batches, against attention over the whole cache on one rank in float64."""
    rank, size = (world.rank, world.size) if world else (0, 1)
    queries = features.get("queries", 1)
    sizes = KV_HEADS, HEADS, DIM, BATCH, ROOM * size
    attend = FlashDecode(*sizes, None, torch.float32, device="cpu", config=config, output=output, page=page, **features)
    errors = []
    for seed, batch in enumerate((BATCH, 1, BATCH, 2)):
        torch.manual_seed(seed)
        lengths = torch.randint(0, ROOM * size + 1, (batch,), dtype=torch.int32)
        lengths[-1] = seed  # fewer than there are query tokens, or none
        q = torch.randn(batch, HEADS, *((queries,) if queries > 1 else ()), DIM)
        whole = torch.randn(2, batch, KV_HEADS, ROOM * size, DIM)
        scales = torch.ones(2, KV_HEADS)
        if "kv_dtype" in features:
            scales = kv_scales(1 / 16, torch.rand(KV_HEADS) + 0.5, KV_HEADS)
            whole = (whole * 16).to(features["kv_dtype"])
        sinks = torch.randn(HEADS) + 2 if "sinks" in features else None
        ends, starts = seen_tokens(lengths, rank, size, queries=queries, window=features.get("window", 0), interleave=interleave)
        k, v = (mine_of(tensor, rank, size, interleave) for tensor in whole)
        cache = paged(k, v, ends.view(batch, -1)[:, -1], page) if page else (k, v, ends)
        given: dict[str, Tensor] = {"block_table": cache[3]} if page else {}
        given |= {"kv_starts": starts} if "window" in features else {}
        given |= {"kv_scales": scales} if "kv_dtype" in features else {}
        given |= {"sinks": sinks} if sinks is not None else {}
        result = attend(q, cache[0], cache[1], ends, **given)
        values = whole.double() * scales.double()[:, None, :, None, None]
        wanted = attention(q.double(), values[0], values[1], lengths.tolist(), features.get("window", 0), sinks)
        own = wanted.shape[1] // size if output == "head_scatter" else 0
        errors.append(relative_error(result, (wanted[:, rank * own :][:, :own] if own else wanted).float()))
    assert attend.failure() is None
    attend.close()
    return errors


def mine_of(cache: Tensor, rank: int, size: int, interleave: int) -> Tensor:
    """A rank's tokens of [batch, kv_heads, tokens, head_dim]."""
    places = torch.arange(cache.shape[2])
    return cache[:, :, places[places // interleave % size == rank]].contiguous()


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int, sinks: Tensor | None) -> Tensor:
    queries = q.shape[2] if q.dim() == 4 else 1
    out = torch.zeros(q.shape, dtype=torch.float64)
    for sequence, length in enumerate(lengths):
        for head in range(HEADS):
            for query in range(queries):
                behind = length - queries + query + 1
                seen = slice(max(0, behind - window) if window else 0, max(0, behind))
                row = (sequence, head, query) if q.dim() == 4 else (sequence, head)
                mine = head * KV_HEADS // HEADS
                weights = (k[sequence, mine, seen] @ q[row] / math.sqrt(DIM)).exp()
                total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
                out[row] = weights @ v[sequence, mine, seen] / total.clamp_min(1e-300)
    return out


def _cases() -> Iterator[Any]:
    few = {("all", "bsp", ROOM, 0), ("all", None, 1, 16)}
    for name in FEATURES:
        for variant in ("bsp", "single", None):
            for interleave, page in ((1, 16), (ROOM, 0), (4, 0)):
                marks = () if (name, variant, interleave, page) in few else (pytest.mark.volume,)
                yield pytest.param(name, variant, interleave, page, marks=marks)


@pytest.mark.parametrize(("name", "variant", "interleave", "page"), list(_cases()))
def test_is_right_however_tokens_are_dealt_out(ranks: Ranks, name: str, variant: str | None, interleave: int, page: int) -> None:
    """Tuned kernels, batches that these do not serve, and plain torch."""
    features, output = FEATURES[name], "head_scatter" if page else "replicated"
    config = config_of(variant, features, output, page)
    for errors in ranks.run(errors_of, config, features, interleave, output, page):
        assert max(errors) <= TOLERANCE["fp32"]


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("name", FEATURES)
def test_is_right_where_one_process_holds_all(name: str, page: int) -> None:
    assert max(errors_of(None, None, FEATURES[name], 1, "replicated", page)) <= TOLERANCE["fp32"]


def test_what_does_not_go_together_is_refused() -> None:
    make = {"dtype": torch.float32, "device": "cpu"}
    sizes = KV_HEADS, HEADS, DIM, BATCH, ROOM
    with pytest.raises(UsageError, match=r"kv_dtype is torch.float16; allowed are torch.float32, torch.float8_e4m3fn, "):
        FlashDecode(*sizes, kv_dtype=torch.float16, **make)
    with pytest.raises(UsageError, match="window is -1; it must be a whole number from 0"):
        FlashDecode(*sizes, window=-1, **make)
    q, cache = torch.zeros(1, HEADS, DIM), torch.zeros(1, KV_HEADS, ROOM, DIM)
    lens, sinks = torch.zeros(1, dtype=torch.int32), torch.zeros(HEADS)
    plain, full = FlashDecode(*sizes, **make), FlashDecode(*sizes, sinks=True, window=4, **make)
    with pytest.raises(UsageError, match="sinks is given, and sinks is False"):
        plain(q, cache, cache, lens, sinks=sinks)
    with pytest.raises(UsageError, match="kv_starts is not given, and window is 4"):
        full(q, cache, cache, lens, sinks=sinks)
    with pytest.raises(UsageError, match=r"sinks is torch.float32 \[2\] on cpu; it must be torch.float32 \[4\]"):
        full(q, cache, cache, lens, kv_starts=lens, sinks=sinks[:2])
    with pytest.raises(UsageError, match=r"kv_scales is given, and kv_dtype is torch.float32"):
        full(q, cache, cache, lens, kv_starts=lens, sinks=sinks, kv_scales=kv_scales(1.0, 1.0, KV_HEADS))
    assert "sinks=learned, window=4" in repr(full)


def test_a_checking_module_looks_at_what_query_tokens_see(ranks: Ranks) -> None:
    ranks.run(_refused_by_a_check)


def _refused_by_a_check(_: World) -> None:
    attend = FlashDecode(KV_HEADS, HEADS, DIM, 1, ROOM, None, torch.float32, device="cpu", window=4, queries=2, check=True)
    q, cache = torch.zeros(1, HEADS, 2, DIM), torch.zeros(1, KV_HEADS, ROOM // WORLD, DIM)
    ends = torch.tensor([[2, 1]], dtype=torch.int32)
    with pytest.raises(UsageError, match="decrease from one query token to the next"):
        attend(q, cache, cache, ends, kv_starts=torch.zeros_like(ends))
    with pytest.raises(UsageError, match="kv_starts has"):
        attend(q, cache, cache, ends.flip(1), kv_starts=ends + 2)
    attend.close()


@torch.no_grad()
def test_compiles_as_one_operator() -> None:
    make: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    attend = FlashDecode(KV_HEADS, HEADS, DIM, BATCH, ROOM, **ALL, **make)
    q = torch.randn(2, HEADS, 2, DIM)
    k, v = (torch.randn(2, KV_HEADS, ROOM, DIM).to(torch.float8_e4m3fn) for _ in range(2))
    ends, starts = seen_tokens(torch.tensor([9, 16]), 0, 1, queries=2, window=11)
    more = {"kv_starts": starts, "kv_scales": kv_scales(0.5, 2.0, KV_HEADS), "sinks": torch.randn(HEADS)}
    compiled = torch.compile(lambda: attend(q, k, v, ends, **more) * 2, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(), attend(q, k, v, ends, **more) * 2)
