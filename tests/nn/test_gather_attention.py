"""GatherAttention on CPU ranks against dense attention: outputs, gradients, compiled calls, other sizes, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import GatherAttention
from autotax.operators.problems import GatherAttention as Problem
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for

HEADS, KV_HEADS = 4, 2
SIZES = {"cpu": (16, 64), "cuda": (128, 1024)}
"""Elements of a head and tokens of a sequence, by the type of the ranks' devices."""
DIM, TOKENS = SIZES["cpu"]
LIMIT = 2e-2
"""Of an element, relative to the greatest: results and gradients of bf16."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


def drawn(length: int, dim: int = DIM, device: str | torch.device = "cpu") -> list[Tensor]:
    """Q, K, V and the gradient of the output, of the whole sequence."""
    random = torch.Generator().manual_seed(length)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(2, length, many, dim, generator=random).to(device, torch.bfloat16) for many in heads]


def own(world: World, whole: Tensor, layout: str) -> Tensor:
    """The tokens of this rank."""
    chunks = whole.chunk(2 * world.size if layout == "zigzag" else world.size, 1)
    numbers = (world.rank, len(chunks) - 1 - world.rank) if layout == "zigzag" else (world.rank,)
    return torch.cat([chunks[number] for number in numbers], 1)


def right(tensors: list[Tensor], causal: bool) -> list[Tensor]:
    """The output and the gradients of Q, K and V, float32."""
    q, k, v = (tensor.float().requires_grad_() for tensor in tensors[:3])
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    o = scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    o.backward(tensors[3].float())
    return [o.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]


def right_lse(tensors: list[Tensor], causal: bool) -> Tensor:
    """The log-sum-exps of all queries, float32 [batch, tokens, q_heads]."""
    q, k = (tensor.float().transpose(1, 2) for tensor in tensors[:2])
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.logsumexp(3).transpose(1, 2)


def far(world: World, results: list[Any], expected: list[Tensor], layout: str) -> float:
    """The greatest deviation, relative to the greatest number of each tensor."""
    pairs = [(result, own(world, whole, layout)) for result, whole in zip(results, expected, strict=True)]
    return max(float((result.float() - part).abs().max() / part.abs().max()) for result, part in pairs)


def calls(world: World, layout: str, mask: str, variant: str) -> list[float]:
    """Deviations of a plain call, of one into `out`, of a recorded one, of a shorter one and of a compiled one."""
    dim, tokens = SIZES[world.device.type]
    problem = Problem(2, HEADS, KV_HEADS, dim, tokens, "bf16", world.size, mask, layout)
    config: Config = space_for(problem, detect(world.backend)).default(variant)
    causal = mask == "causal"
    module = GatherAttention(
        KV_HEADS, HEADS, dim, tokens, max_batch=2, causal=causal, layout=layout, device=world.device, config=config
    )
    found = []
    for length in (tokens, tokens // 2):
        tensors = drawn(length, dim, world.device)
        expected = right(tensors, causal)
        mine = [own(world, tensor, layout) for tensor in tensors]
        q, k, v, d_o = mine
        found.append(far(world, [module(q, k, v)], expected[:1], layout))
        out = torch.empty_like(q)
        assert module(q, k, v, out) is out
        found.append(far(world, [out], expected[:1], layout))
        o, lse = module(q, k, v, return_lse=True)
        found.append(far(world, [o, lse.transpose(1, 2)], [expected[0], right_lse(tensors, causal)], layout))
        leaves = [tensor.clone().requires_grad_() for tensor in mine[:3]]
        o = module(*leaves)
        o.backward(d_o)
        found.append(far(world, [o.detach(), *(leaf.grad for leaf in leaves)], expected, layout))
    torch.compiler.reset()  # the ranks serve many cases, each with functions of its own
    compiled = torch.compile(lambda *given: module(*given) * 2, backend="aot_eager", fullgraph=True)
    leaves = [tensor.clone().requires_grad_() for tensor in mine[:3]]
    o = compiled(*leaves)
    o.backward(d_o / 2)
    found.append(far(world, [o.detach() / 2, *(leaf.grad for leaf in leaves)], expected, layout))
    found.append(far(world, [compiled(q, k, v) / 2], expected[:1], layout))
    o, of_compiled = torch.compile(lambda *given: module(*given, return_lse=True), backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(of_compiled, lse)
    module.close()
    return found


WAYS = [
    ("zigzag", "causal", "push"),
    ("contiguous", "causal", "decomposed"),
    ("contiguous", "none", "heads"),
    *(
        pytest.param(layout, mask, variant, marks=pytest.mark.volume)
        for layout, mask, variant in (
            ("zigzag", "causal", "bsp"),
            ("zigzag", "causal", "decomposed"),
            ("zigzag", "causal", "heads"),
            ("contiguous", "causal", "bsp"),
            ("contiguous", "none", "push"),
        )
    ),
]


@pytest.mark.parametrize(("layout", "mask", "variant"), WAYS)
def test_outputs_and_gradients_are_those_of_dense_attention(ranks: Ranks, layout: str, mask: str, variant: str) -> None:
    for found in ranks.run(calls, layout, mask, variant, timeout=200):
        assert max(found) < LIMIT, found


def behind(world: World, layout: str, variant: str) -> list[float]:
    """Deviations of outputs and log-sum-exps of queries that see 24 earlier keys: of calls, compiled or not, of two lengths."""
    problem = Problem(2, HEADS, KV_HEADS, DIM, TOKENS, "bf16", world.size, layout=layout)
    config = space_for(problem, detect("cpu")).default(variant)
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, layout=layout, device="cpu", config=config)
    both = lambda *given: module(*given[:3], prefix=given[3:], return_lse=True)  # noqa: E731
    call = torch.compile(both, backend="aot_eager", fullgraph=True)
    found = []
    for length in (TOKENS, TOKENS // 2):
        q, k, v = drawn(length)[:3]
        earlier = [tensor[:, :24].flip(1) for tensor in drawn(TOKENS)[1:3]]
        o, lse = dense_behind(q, k, v, *earlier)
        mine = [own(world, tensor, layout) for tensor in (q, k, v)]
        results = [both(*mine, *earlier), call(*mine, *earlier)]
        assert torch.equal(module(*mine, prefix=earlier), results[0][0])
        found += [far(world, [part, sums.transpose(1, 2)], [o, lse], layout) for part, sums in results]
    module.close()
    return found


def dense_behind(q: Tensor, k: Tensor, v: Tensor, earlier_k: Tensor, earlier_v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exps [batch, tokens, q_heads] of causal queries that see earlier keys too, float32."""
    group, earlier = q.shape[2] // k.shape[2], earlier_k.shape[1]
    keys, values = (torch.cat(pair, 1).float().repeat_interleave(group, 2) for pair in ((earlier_k, k), (earlier_v, v)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) / q.shape[3] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(earlier + 1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), values), scores.logsumexp(3).transpose(1, 2)


@pytest.mark.parametrize(("layout", "variant"), [("zigzag", "push"), ("contiguous", "decomposed"), ("zigzag", "bsp")])
def test_queries_see_a_prefix_that_every_rank_has(ranks: Ranks, layout: str, variant: str) -> None:
    for found in ranks.run(behind, layout, variant, timeout=200):
        assert max(found) < LIMIT, found


def test_one_process_alone_sees_a_prefix() -> None:
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, device="cpu")
    q, k, v, _ = drawn(TOKENS)
    earlier = k[:, :24].flip(1), v[:, :24].flip(1)
    o, lse = dense_behind(q, k, v, *earlier)
    found, sums = module(q, k, v, prefix=earlier, return_lse=True)
    assert float((found.float() - o).abs().max() / o.abs().max()) < LIMIT
    torch.testing.assert_close(sums.transpose(1, 2), lse, rtol=1e-3, atol=1e-3)
    assert torch.equal(module(q, k, v, prefix=(k[:, :0], v[:, :0])), module(q, k, v))


def with_a_nan(world: World, variant: str) -> int:
    """Rows that are not NaN of the queries that see a key of rank 0 with a NaN, in a merge of parts."""
    problem = Problem(2, HEADS, KV_HEADS, DIM, TOKENS, "bf16", world.size)
    config = space_for(problem, detect("cpu")).default(variant)
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, device="cpu", config=config)
    q, k, v = (own(world, tensor, "contiguous") for tensor in drawn(TOKENS)[:3])
    if world.rank == 0:
        k[:, 0] = float("nan")
    finite = int(module(q, k, v).isfinite().sum())
    module.close()
    return finite


def test_a_nan_among_the_keys_of_another_rank_is_not_taken_for_an_empty_part(ranks: Ranks) -> None:
    assert ranks.run(with_a_nan, "decomposed", timeout=60) == [0, 0]


def test_one_process_alone_is_dense_attention() -> None:
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, device="cpu")
    q, k, v, d_o = tensors = drawn(TOKENS)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    o = module(*leaves)
    o.backward(d_o)
    for result, whole in zip([o.detach(), *(leaf.grad for leaf in leaves)], right(tensors, True), strict=True):
        assert result is not None
        assert float((result.float() - whole).abs().max() / whole.abs().max()) < LIMIT
    assert torch.equal(module(q, k, v), o)
    again, lse = module(q, k, v, return_lse=True)
    assert torch.equal(again, o)
    torch.testing.assert_close(lse.transpose(1, 2), right_lse(tensors, True), rtol=1e-3, atol=1e-3)


def test_what_is_not_allowed_is_refused_in_one_line() -> None:
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, device="cpu")
    q, k, v, _ = drawn(TOKENS)
    long = drawn(2 * TOKENS)
    for wrong, named in (
        ((q[0], k, v), "q has 3 dimensions"),
        (long[:3], "64 tokens"),
        ((q, k[:, :1], v), "k is"),
        ((q, k, v.float()), "v is"),
    ):
        with pytest.raises(UsageError, match=named) as refusal:
            module(*wrong)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UsageError, match="out is given"):
        module(q.clone().requires_grad_(), k, v, torch.empty_like(q))
    for more in ({"out": torch.empty_like(q)}, {"prefix": (k.clone().requires_grad_(), v)}):
        with pytest.raises(UsageError, match="prefix is given with out or with gradients"):
            module(q, k, v, **{"prefix": (k, v), **more})
    for prefix, named in (((k, v[:, :3]), "prefix v is"), ((k[0], v), "prefix k"), ((k, v.float()), "prefix v is")):
        with pytest.raises(UsageError, match=named):
            module(q, k, v, prefix=prefix)
    with pytest.raises(UsageError, match="layout is zigzag and mask is none"):
        GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, causal=False, layout="zigzag", device="cpu")
