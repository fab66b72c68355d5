"""GatherAttention on CPU ranks against dense attention: outputs, gradients, compiled calls, other sizes, windows, ragged streams,
refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.hardware import Hardware, detect
from autotax.heap.world import World
from autotax.nn import GatherAttention
from autotax.operators.problems import GatherAttention as Problem
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.volume import volume

HEADS, KV_HEADS = 8, 4
SIZES = {"cpu": (16, 64), "cuda": (128, 1024)}
"""Elements of a head and tokens of a sequence, by the type of the ranks' devices."""
DIM, TOKENS = SIZES["cpu"]
LIMIT = 2e-2
"""Of an element, relative to the greatest: results and gradients of bf16."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as more:
        yield more


def drawn(length: int, dim: int = DIM, device: str | torch.device = "cpu", v_dim: int = 0, batch: int = 2) -> list[Tensor]:
    """Q, K, V and the gradient of the output, of the whole sequence."""
    random = torch.Generator().manual_seed(length)
    heads = (HEADS, dim), (KV_HEADS, dim), (KV_HEADS, v_dim or dim), (HEADS, v_dim or dim)
    return [torch.randn(batch, length, *shape, generator=random).to(device, torch.bfloat16) for shape in heads]


def own(world: World, whole: Tensor, layout: str) -> Tensor:
    """The tokens of this rank."""
    chunks = whole.chunk(2 * world.size if layout == "zigzag" else world.size, 1)
    numbers = (world.rank, len(chunks) - 1 - world.rank) if layout == "zigzag" else (world.rank,)
    return torch.cat([chunks[number] for number in numbers], 1)


def seen(tokens: int, causal: bool, window: int = 0, device: str | torch.device = "cpu") -> Tensor:
    """Which keys each query sees."""
    before = torch.arange(tokens, device=device)[:, None] - torch.arange(tokens, device=device)
    return (before >= 0) & (before < (window or tokens)) if causal else torch.ones_like(before, dtype=torch.bool)


def right(tensors: list[Tensor], mask: Tensor) -> list[Tensor]:
    """The output and the gradients of Q, K and V, float32."""
    q, k, v = (tensor.float().requires_grad_() for tensor in tensors[:3])
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    o = scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    o.backward(tensors[3].float())
    return [o.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]


def right_lse(tensors: list[Tensor], mask: Tensor) -> Tensor:
    """The log-sum-exps of all queries, float32 [batch, tokens, q_heads]."""
    q, k = (tensor.float().transpose(1, 2) for tensor in tensors[:2])
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / q.shape[3] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).logsumexp(3).transpose(1, 2)


def of_each(lengths: list[int], tensors: list[Tensor], causal: bool, window: int = 0) -> tuple[list[Tensor], Tensor]:
    """The results of `right` and `right_lse` for sequences of these lengths, each by itself."""
    shards = [list(shard) for shard in zip(*(tensor.split(lengths, 1) for tensor in tensors), strict=True)]
    masks = [seen(length, causal, window, tensors[0].device) for length in lengths]
    results, lses = ([one(*both) for both in zip(shards, masks, strict=True)] for one in (right, right_lse))
    return [torch.cat(parts, 1) for parts in zip(*results, strict=True)], torch.cat(lses, 1)


def far(world: World, results: list[Any], expected: list[Tensor], layout: str) -> float:
    """The greatest deviation, relative to the greatest number of each tensor. Gradients of queries with one key are zero."""
    pairs = [(result, own(world, whole, layout)) for result, whole in zip(results, expected, strict=True)]
    return max(float((result.float() - part).abs().max() / part.abs().max().clamp_min(0.1)) for result, part in pairs)


def config_of(problem: Problem, hardware: Hardware, variant: str) -> Config:
    """The default of a variant; of `heads/pieces=2` with two pieces."""
    name, _, setting = variant.partition("/")
    parameter, _, value = setting.partition("=")
    default: Config = space_for(problem, hardware).default(name)
    return Config.of(name, default.values | {parameter: int(value)}) if setting else default


def calls(
    world: World, layout: str, mask: str, variant: str, window: int = 0, dims: tuple[int, int] | None = None
) -> list[float]:  # fmt: skip
    """Deviations of a plain call, of one into `out`, of a recorded one, of a shorter one and, of two ranks, of a compiled one."""
    dim, tokens = SIZES[world.device.type]
    dim, v_dim = dims or (dim, 0)
    problem = Problem(2, HEADS, KV_HEADS, dim, tokens, "bf16", world.size, mask, layout, window, v_dim)
    config = config_of(problem, detect(world.backend), variant)
    causal = mask == "causal"
    more = {"causal": causal, "layout": layout, "window": window, "v_dim": v_dim}
    module = GatherAttention(KV_HEADS, HEADS, dim, tokens, max_batch=2, device=world.device, config=config, **more)  # type: ignore[arg-type]
    deviations = []
    for length in (tokens, tokens // 2):
        tensors = drawn(length, dim, world.device, v_dim)
        visible = seen(length, causal, window, world.device)
        expected = right(tensors, visible)
        mine = [own(world, tensor, layout) for tensor in tensors]
        q, k, v, d_o = mine
        deviations.append(far(world, [module(q, k, v)], expected[:1], layout))
        out = torch.empty_like(d_o)
        assert module(q, k, v, out) is out
        deviations.append(far(world, [out], expected[:1], layout))
        o, lse = module(q, k, v, return_lse=True)
        deviations.append(far(world, [o, lse.transpose(1, 2)], [expected[0], right_lse(tensors, visible)], layout))
        leaves = [tensor.clone().requires_grad_() for tensor in mine[:3]]
        o = module(*leaves)
        o.backward(d_o)
        deviations.append(far(world, [o.detach(), *(leaf.grad for leaf in leaves)], expected, layout))
    if not (window or v_dim or world.size > 2):  # tracing takes as long as all else, and sees nothing of these
        torch.compiler.reset()  # the ranks serve many cases, each with functions of its own
        compiled = torch.compile(lambda *given: module(*given) * 2, backend="aot_eager", fullgraph=True)
        leaves = [tensor.clone().requires_grad_() for tensor in mine[:3]]
        o = compiled(*leaves)
        o.backward(d_o / 2)
        deviations.append(far(world, [o.detach() / 2, *(leaf.grad for leaf in leaves)], expected, layout))
        deviations.append(far(world, [compiled(q, k, v) / 2], expected[:1], layout))
        with_lse = torch.compile(lambda *given: module(*given, return_lse=True), backend="aot_eager", fullgraph=True)
        _, of_compiled = with_lse(q, k, v)
        assert torch.equal(of_compiled, lse)
    module.close()
    return deviations


WAYS = [
    ("zigzag", "causal", "push"),
    ("contiguous", "causal", "decomposed"),
    ("contiguous", "none", "heads/pieces=2"),
    *(
        pytest.param(layout, mask, variant, marks=pytest.mark.volume)
        for layout, mask, variant in (
            ("zigzag", "causal", "bsp"),
            ("zigzag", "causal", "decomposed"),
            ("zigzag", "causal", "heads"),
            ("zigzag", "causal", "heads/pieces=2"),
            ("zigzag", "causal", "bsp/squares=4"),
            ("contiguous", "causal", "heads/squares=2"),
            ("contiguous", "none", "heads"),
            ("contiguous", "causal", "bsp"),
            ("contiguous", "none", "push"),
        )
    ),
]


@pytest.mark.parametrize(("layout", "mask", "variant"), WAYS)
def test_outputs_and_gradients_are_those_of_dense_attention(ranks: Ranks, layout: str, mask: str, variant: str) -> None:
    for deviations in ranks.run(calls, layout, mask, variant, timeout=200):
        assert max(deviations) < LIMIT, deviations


WINDOWS = [
    ("zigzag", "decomposed", 40, (24, 16)),
    ("contiguous", "push", 11, (48, 32)),
    *(
        pytest.param(layout, variant, window, dims, marks=pytest.mark.volume)
        for layout, variant, window, dims in (
            ("contiguous", "decomposed", 9, None),
            ("zigzag", "push", 11, None),
            ("contiguous", "push", 0, (48, 32)),
            ("contiguous", "bsp", 45, None),
            ("contiguous", "heads", 9, (24, 16)),
            ("zigzag", "bsp", 1, None),
            ("zigzag", "heads", 20, None),
            ("zigzag", "bsp", 64, None),
            ("contiguous", "decomposed", 0, (24, 16)),
            ("zigzag", "heads/pieces=2", 0, (24, 16)),
        )
    ),
]


@pytest.mark.parametrize(("layout", "variant", "window", "dims"), WINDOWS)
def test_windows_and_heads_of_two_sizes_are_those_of_dense_attention(
    ranks: Ranks, layout: str, variant: str, window: int, dims: tuple[int, int] | None
) -> None:
    for deviations in ranks.run(calls, layout, "causal", variant, window, dims, timeout=200):
        assert max(deviations) < LIMIT, deviations


ON_FOUR = [
    ("contiguous", "causal", "decomposed", 40),
    ("zigzag", "causal", "ring", 5),
    *volume(
        ("contiguous", "none", "ring", 0),
        ("contiguous", "causal", "decomposed", 1),
        ("contiguous", "causal", "ring", 40),
        ("zigzag", "causal", "decomposed", 23),
        ("zigzag", "causal", "ring", 0),
    ),
]


@pytest.mark.parametrize(("layout", "mask", "variant", "window"), ON_FOUR)
def test_four_ranks_attend_to_the_keys_of_all(four: Ranks, layout: str, mask: str, variant: str, window: int) -> None:
    for deviations in four.run(calls, layout, mask, variant, window, timeout=200):
        assert max(deviations) < LIMIT, deviations


def stream(world: World, lengths: list[int], causal: bool, window: int = 0, dims: tuple[int, int] | None = None) -> list[float]:
    """Deviations of the outputs, log-sum-exps and gradients of sequences of these lengths, of calls, compiled or not."""
    dim, v_dim = dims or (SIZES[world.device.type][0], 0)
    tokens = sum(lengths)
    more = {"causal": causal, "window": window, "v_dim": v_dim}
    module = GatherAttention(KV_HEADS, HEADS, dim, 2 * tokens, max_batch=2, device=world.device, **more)  # type: ignore[arg-type]
    tensors = drawn(tokens, dim, world.device, v_dim, batch=1)
    expected, lse_of_all = of_each(lengths, tensors, causal, window)
    q, k, v, d_o = (own(world, tensor, "contiguous") for tensor in tensors)
    call = lambda *given: module(*given, lengths=lengths, return_lse=True)  # noqa: E731
    torch.compiler.reset()
    deviations, outputs = [], []
    for one in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        o, lse = one(q, k, v)
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        recorded, _ = one(*leaves)
        recorded.backward(d_o)
        results = [o, *(leaf.grad for leaf in leaves), lse.transpose(1, 2)]
        deviations.append(far(world, results, [*expected, lse_of_all], "contiguous"))
        outputs += [o, recorded.detach()]
    sums = [0, *accumulate(lengths)]
    for same in (lengths, sums, torch.tensor(lengths, dtype=torch.int32), torch.tensor(sums)):
        assert all(torch.equal(module(q, k, v, lengths=same), o) for o in outputs)
    module.close()
    return deviations


STREAMS: list[tuple[list[int], bool, int, tuple[int, int] | None]] = [
    ([3, 45, 16], True, 0, None),
    ([20, 1, 43], False, 0, None),
    ([10, 54], True, 21, None),
    ([64], True, 0, (24, 16)),
    ([16] * 4, True, 0, None),
    ([1] * 7 + [57], True, 1, (24, 16)),
    ([15, 1, 1, 47], False, 0, (24, 16)),
]


@pytest.mark.sampled
@pytest.mark.parametrize("on", ["ranks", "four"])
@pytest.mark.parametrize(("lengths", "causal", "window", "dims"), STREAMS, ids=str)
def test_a_query_sees_no_other_sequence_of_a_stream(
    request: pytest.FixtureRequest, on: str, lengths: list[int], causal: bool, window: int, dims: tuple[int, int] | None
) -> None:
    for deviations in request.getfixturevalue(on).run(stream, lengths, causal, window, dims, timeout=200):
        assert max(deviations) < LIMIT, deviations


def test_one_process_alone_attends_to_a_stream_and_has_windows_and_heads_of_two_sizes() -> None:
    for layout, lengths in (("contiguous", [20, 1, 43]), ("contiguous", None), ("zigzag", None)):
        module = GatherAttention(KV_HEADS, HEADS, 24, TOKENS, layout=layout, window=11, v_dim=16, device="cpu")
        q, k, v, d_o = tensors = drawn(TOKENS, 24, v_dim=16, batch=1)
        expected, lse_of_all = of_each(lengths or [TOKENS], tensors, True, 11)
        o, lse = module(q, k, v, lengths=lengths, return_lse=True)
        torch.testing.assert_close(o.float(), expected[0], rtol=LIMIT, atol=LIMIT)
        torch.testing.assert_close(lse.transpose(1, 2), lse_of_all, rtol=1e-3, atol=1e-3)
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        module(*leaves, lengths=lengths).backward(d_o)
        for leaf, whole in zip(leaves, expected[1:], strict=True):
            assert leaf.grad is not None
            assert float((leaf.grad.float() - whole).abs().max() / whole.abs().max()) < LIMIT


def behind(world: World, layout: str, variant: str, window: int) -> list[float]:
    """Deviations of outputs and log-sum-exps of queries that see 24 earlier keys: of calls, compiled or not, of two lengths."""
    problem = Problem(2, HEADS, KV_HEADS, DIM, TOKENS, "bf16", world.size, layout=layout, window=window)
    config = space_for(problem, detect("cpu")).default(variant)
    more = {"layout": layout, "window": window}
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, device="cpu", config=config, **more)  # type: ignore[arg-type]
    both = lambda *given: module(*given[:3], prefix=given[3:], return_lse=True)  # noqa: E731
    call = torch.compile(both, backend="aot_eager", fullgraph=True)
    deviations = []
    for length in (TOKENS, TOKENS // 2):
        q, k, v = drawn(length)[:3]
        earlier = [tensor[:, :24].flip(1) for tensor in drawn(TOKENS)[1:3]]
        o, lse = dense_behind(q, k, v, *earlier, window)
        mine = [own(world, tensor, layout) for tensor in (q, k, v)]
        results = [both(*mine, *earlier), call(*mine, *earlier)]
        assert torch.equal(module(*mine, prefix=earlier), results[0][0])
        deviations += [far(world, [part, sums.transpose(1, 2)], [o, lse], layout) for part, sums in results]
    module.close()
    return deviations


def dense_behind(q: Tensor, k: Tensor, v: Tensor, earlier_k: Tensor, earlier_v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exps [batch, tokens, q_heads] of causal queries that see earlier keys too, float32."""
    group, earlier = q.shape[2] // k.shape[2], earlier_k.shape[1]
    keys, values = (torch.cat(pair, 1).float().repeat_interleave(group, 2) for pair in ((earlier_k, k), (earlier_v, v)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) / q.shape[3] ** 0.5
    scores = scores.masked_fill(~seen(keys.shape[1], True, window)[earlier:], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), values), scores.logsumexp(3).transpose(1, 2)


@pytest.mark.parametrize(
    ("layout", "variant", "window"),
    [
        ("zigzag", "push", 0),
        ("contiguous", "bsp", 15),
        ("zigzag", "decomposed", 30),
        *volume(("contiguous", "decomposed", 0), ("zigzag", "bsp", 0), ("contiguous", "bsp", 80)),
    ],
)
def test_queries_see_a_prefix_that_every_rank_has(ranks: Ranks, layout: str, variant: str, window: int) -> None:
    for deviations in ranks.run(behind, layout, variant, window, timeout=200):
        assert max(deviations) < LIMIT, deviations


@pytest.mark.parametrize("window", [0, 30])
def test_one_process_alone_sees_a_prefix(window: int) -> None:
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, window=window, device="cpu")
    q, k, v, _ = drawn(TOKENS)
    earlier = k[:, :24].flip(1), v[:, :24].flip(1)
    o, lse = dense_behind(q, k, v, *earlier, window)
    output, sums = module(q, k, v, prefix=earlier, return_lse=True)
    assert float((output.float() - o).abs().max() / o.abs().max()) < LIMIT
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
    for result, whole in zip([o.detach(), *(leaf.grad for leaf in leaves)], right(tensors, seen(TOKENS, True)), strict=True):
        assert result is not None
        assert float((result.float() - whole).abs().max() / whole.abs().max()) < LIMIT
    assert torch.equal(module(q, k, v), o)
    again, lse = module(q, k, v, return_lse=True)
    assert torch.equal(again, o)
    torch.testing.assert_close(lse.transpose(1, 2), right_lse(tensors, seen(TOKENS, True)), rtol=1e-3, atol=1e-3)


def empty(_: World | None) -> list[bool]:
    """Whether results of a batch without sequences have their shapes: of a call, with log-sum-exps, with a prefix, gradients."""
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, device="cpu", v_dim=8)
    q, k, v = (tensor[:0, : TOKENS // module.world_size] for tensor in drawn(TOKENS, v_dim=8)[:3])
    o, lse = module(q, k, v, return_lse=True)
    of_prefix = module(q, k, v, prefix=(k[:, :3], v[:, :3]))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    module(*leaves).sum().backward()
    results = [module(q, k, v), o, of_prefix]
    shaped = [tuple(lse.shape) == (0, HEADS, q.shape[1]), *(result.shape == (*q.shape[:3], 8) for result in results)]
    with pytest.raises(UsageError, match="a batch of 0"):
        module(q, k, v, lengths=[TOKENS])
    return [*shaped, *(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)]


def test_a_batch_without_sequences_has_empty_results(ranks: Ranks) -> None:
    for shaped in (empty(None), *ranks.run(empty, timeout=60)):
        assert all(shaped), shaped


def test_what_is_not_allowed_is_refused_in_one_line() -> None:
    module = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, max_batch=2, device="cpu")
    q, k, v, _ = drawn(TOKENS)
    long = drawn(2 * TOKENS)
    for wrong, named in (
        ((q[0], k, v), "q has 3 dimensions"),
        (long[:3], "64 tokens"),
        ((q[:, :0], k[:, :0], v[:, :0]), "q has 0 tokens"),
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
    one = q[:1], k[:1], v[:1]
    to_record = [tensor.clone().requires_grad_() for tensor in one]
    sums = torch.tensor([[0, 64]]), torch.tensor([0.0, 64.0]), torch.tensor([0, 64], device="meta")
    for lengths in ([32, 31], [64, 0], [32.0, 32], 64, [-1, 65], [], [0, 40, 30, 64], [0, 32], *sums):
        for tensors in (one, to_record):
            with pytest.raises(UsageError, match="lengths is") as refusal:
                module(*tensors, lengths=lengths)
            assert "\n" not in str(refusal.value)
    with pytest.raises(UsageError, match="lengths is given with a batch of 2"):
        module(q, k, v, lengths=[64])
    for more in ({"out": torch.empty_like(one[0])}, {"prefix": one[1:]}):
        with pytest.raises(UsageError, match="lengths is given with out or prefix"):
            module(*one, lengths=[64], **more)
    zigzag = GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, layout="zigzag", device="cpu")
    with pytest.raises(UsageError, match="the layout zigzag"):
        zigzag(*one, lengths=[64])
    with pytest.raises(UsageError, match="with the layout zigzag it must have a multiple of 2"):
        zigzag(*(tensor[:, :7] for tensor in one))
    for wrong_options, message in (
        ({"window": 8, "causal": False}, "window is 8 and mask is none"),
        ({"window": -1}, "window is -1"),
        ({"v_dim": 12}, "v_dim is 12"),
        ({"v_dim": 32}, "v_dim is 32"),
    ):
        with pytest.raises(UsageError, match=message):
            GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, device="cpu", **wrong_options)  # type: ignore[arg-type]
    assert GatherAttention(KV_HEADS, HEADS, DIM, TOKENS, device="cpu", v_dim=DIM)(*one).shape == one[0].shape
