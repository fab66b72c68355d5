"""The parts of a rank's attention against a mask of the whole sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from autotax.hardware import Hardware
from autotax.operators.gather_attention import GatherAttention, Part
from autotax.operators.registry import of


@st.composite
def problems(draw: st.DrawFn) -> GatherAttention:
    world = draw(st.integers(1, 5))
    mask, layout = draw(st.sampled_from((("causal", "zigzag"), ("causal", "contiguous"), ("none", "contiguous"))))
    tokens = draw(st.integers(1, 9)) * world * (2 if layout == "zigzag" else 1)
    window = draw(st.integers(0, tokens + 2)) if mask == "causal" else 0
    return GatherAttention(1, 1, 1, 8, tokens, "bf16", world, mask, layout, window)


def places(problem: GatherAttention, rank: int) -> Tensor:
    """The positions of a rank's tokens."""
    return torch.cat([torch.arange(problem.chunk_len) + chunk * problem.chunk_len for chunk in problem.chunks_of(rank)])


def seen(problem: GatherAttention, rank: int) -> Tensor:
    """Which keys of all positions each query of a rank sees."""
    before = places(problem, rank)[:, None] - torch.arange(problem.seq_len)
    if problem.mask == "none":
        return torch.ones_like(before, dtype=torch.bool)
    return (before >= 0) & (before < (problem.window or problem.seq_len))


@given(problems(), st.integers(1, 4))
def test_each_pair_that_sees_each_other_is_in_one_part_and_no_other_pair_is(problem: GatherAttention, squares: int) -> None:
    for rank in range(problem.world_size):
        counts = torch.zeros(problem.shard_len, problem.seq_len, dtype=torch.int32)
        parts = [square for part in problem.parts(rank) for square in part.squares(squares)]
        assert parts[0].source == rank
        assert parts[0].queries == (0, problem.shard_len)
        assert sum(part.pairs for part in parts) == problem.pairs(rank) == int(seen(problem, rank).sum())
        for part in parts:
            of_queries, of_keys = (torch.arange(*of).chunk(part.pieces) for of in (part.queries, part.keys))
            for queries, keys in zip(of_queries, of_keys, strict=True):
                before = torch.arange(len(queries))[:, None] - torch.arange(len(keys))
                sees = torch.ones_like(before, dtype=torch.bool)
                if part.causal:
                    assert len(queries) == len(keys)
                    sees &= before >= 0
                if part.left is not None:
                    assert len(queries) == len(keys)
                    assert 0 <= part.left < len(queries) - 1
                    sees &= before <= part.left
                assert bool(sees.any(0).all() and sees.any(1).all())  # every query sees a key, and every key is seen
                counts[queries[:, None], places(problem, part.source)[keys]] += sees.int()
        assert torch.equal(counts, seen(problem, rank).int())


@given(problems())
def test_a_rank_is_sent_the_keys_that_its_queries_see_once(problem: GatherAttention) -> None:
    for rank in range(problem.world_size):
        needed = seen(problem, rank).any(0)
        for source in range(problem.world_size):
            ranges = problem.keys_sent(source, rank)
            sent = [token for first, end in ranges for token in range(first, end)]
            if source != rank:
                assert sent == needed[places(problem, source)].nonzero().flatten().tolist()
            assert all(end < first for (_, end), (first, _) in pairwise(ranges))


def covered(parts: list[Part], keys: int, queries: int) -> Tensor:
    """How many of the parts have each pair of local tokens that sees each other."""
    counts = torch.zeros(queries, keys, dtype=torch.int32)
    for part in parts:
        before = torch.arange(part.queries[1] - part.queries[0])[:, None] - torch.arange(part.keys[1] - part.keys[0])
        sees = torch.ones_like(before, dtype=torch.bool) if part.left is None else before <= part.left
        assert bool(sees.any(0).all() and sees.any(1).all())
        assert part.left is None or len(before) == before.shape[1]
        counts[slice(*part.queries), slice(*part.keys)] += sees.int()
    return counts


@given(problems(), st.integers(1, 40))
def test_parts_of_a_prefix_are_what_windows_reach(problem: GatherAttention, earlier: int) -> None:
    for rank in range(problem.world_size):
        before = places(problem, rank)[:, None] + earlier - torch.arange(earlier)
        expected = before < problem.window if problem.window else torch.ones_like(before)
        parts = problem.parts_of_prefix(rank, earlier)
        assert torch.equal(covered(parts, earlier, problem.shard_len), expected.int())


@given(problems(), st.data())
def test_a_query_sees_its_own_sequence_alone(problem: GatherAttention, data: st.DataObject) -> None:
    assume(problem.layout == "contiguous")
    lengths = []
    while left := problem.seq_len - sum(lengths):
        lengths.append(data.draw(st.integers(1, left)))
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    size = problem.shard_len
    on_ranks = (set(of_rank.tolist()) for of_rank in number.split(size))
    met: set[int] = set()
    several = False
    for sequences in on_ranks:
        several |= bool(met & sequences)
        met |= sequences
    for rank in range(problem.world_size):
        mine = slice(rank * size, rank * size + size)
        own, parts, crosses = problem.stream(rank, lengths)
        assert own == number[mine].unique_consecutive(return_counts=True)[1].tolist()
        assert crosses == several
        expected = seen(problem, rank) & (number[mine, None] == number)
        for source in range(problem.world_size):
            if source != rank:
                of_source = covered([part for part in parts if part.source == source], size, size)
                assert torch.equal(of_source, expected[:, source * size : source * size + size].int())


def test_the_bound_shares_the_work_evenly_and_takes_the_fewer_bytes() -> None:
    h200 = Hardware("cuda", "NVIDIA H200", "cuda:90", 4, 140, 132, 232448, 60 << 20, "peer access 12/12 pairs")

    def bounds(q_heads: int, kv_heads: int, world: int, layout: str) -> dict[str, float]:
        problem = GatherAttention(1, q_heads, kv_heads, 128, 32768, "bf16", world, "causal", layout)
        return of(problem).bounds_us(problem, h200, {})

    even, uneven = (bounds(64, 8, 2, layout)["arithmetic"] for layout in ("zigzag", "contiguous"))
    assert abs(even - uneven) < 1e-3 * even, "rank 1 has three quarters of the work of contiguous shards, but heads may move"
    keys = 16 * 2 * 128 * 2 * 32768
    assert bounds(64, 8, 2, "contiguous")["links"] * 375e3 == keys / 2 / 2, "eight heads of keys of the other rank"
    assert bounds(16, 16, 4, "zigzag")["links"] * 375e3 == keys / 4 * 3 / 4 * 2, "q, k, v and o of four heads, not all keys"
