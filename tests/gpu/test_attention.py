"""GatherAttention on GPUs: outputs and gradients, and a captured call that is replayed with other inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import GatherAttention
from autotax.operators.problems import GatherAttention as Problem
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.nn.test_gather_attention import (
    HEADS,
    KV_HEADS,
    LIMIT,
    SIZES,
    calls,
    config_of,
    drawn,
    far,
    of_each,
    own,
    right,
    seen,
    stream,
)

VARIANTS = ("bsp", "decomposed", "heads", "heads/pieces=2", "copy_engine", "push_specialized", "push")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, detect().backend) as two:
        yield two


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("layout", "mask"), [("zigzag", "causal"), ("contiguous", "causal"), ("contiguous", "none")])
def test_outputs_and_gradients_are_those_of_dense_attention(ranks: Ranks, layout: str, mask: str, variant: str) -> None:
    if (layout, mask, variant) == ("contiguous", "causal", "push_specialized"):
        pytest.skip("rank 0 sees no keys of rank 1")
    for deviations in ranks.run(calls, layout, mask, variant, timeout=60):
        assert max(deviations) < LIMIT, deviations


@pytest.mark.parametrize("variant", ["bsp", "decomposed", "heads", "heads/pieces=2", "copy_engine", "push"])
@pytest.mark.parametrize(
    ("layout", "mask", "window", "dims"),
    [
        ("contiguous", "causal", 1, None),
        ("zigzag", "causal", 100, None),
        ("contiguous", "causal", 300, None),
        ("contiguous", "causal", 1000, None),  # more than a rank has
        ("zigzag", "causal", 700, (192, 128)),
        ("zigzag", "causal", 0, (192, 128)),
        ("contiguous", "none", 0, (192, 128)),
    ],
)
def test_windows_and_heads_of_two_sizes_are_those_of_dense_attention(
    ranks: Ranks, layout: str, mask: str, window: int, dims: tuple[int, int] | None, variant: str
) -> None:
    dim, v_dim = dims or (SIZES["cuda"][0], 0)
    problem = Problem(2, HEADS, KV_HEADS, dim, SIZES["cuda"][1], "bf16", 2, mask, layout, window, v_dim)
    if variant.partition("/")[0] not in space_for(problem, detect()).variants:
        pytest.skip("the variant does not serve this problem")
    for deviations in ranks.run(calls, layout, mask, variant, window, dims, timeout=60):
        assert max(deviations) < LIMIT, deviations


@pytest.mark.parametrize(
    ("lengths", "causal", "window", "dims"),
    [
        ([100, 1, 700, 223], True, 0, None),
        ([1024], False, 0, None),
        ([511, 2, 511], True, 100, None),
        ([512, 512], True, 0, (192, 128)),
        ([300, 724], True, 600, (192, 128)),
    ],
    ids=str,
)
def test_a_query_sees_no_other_sequence_of_a_stream(
    ranks: Ranks, lengths: list[int], causal: bool, window: int, dims: tuple[int, int] | None
) -> None:
    for deviations in ranks.run(stream, lengths, causal, window, dims, timeout=60):
        assert max(deviations) < LIMIT, deviations


def replayed(world: World, variant: str) -> list[float]:
    """Deviations of the outputs of a graph of three calls, replayed with other inputs."""
    dim, tokens = SIZES["cuda"]
    problem = Problem(2, HEADS, KV_HEADS, dim, tokens, "bf16", world.size, layout="zigzag")
    config = config_of(problem, detect(world.backend), variant)
    module = GatherAttention(KV_HEADS, HEADS, dim, tokens, max_batch=2, layout="zigzag", device=world.device, config=config)
    whole = drawn(tokens, dim, world.device)
    static = [own(world, tensor, "zigzag") for tensor in whole[:3]]
    module(*static)
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = [module(*static) for _ in range(3)]
    deviations = []
    for turn in range(4):
        if turn:
            whole = [tensor.roll(turn, 1) for tensor in whole]
        for tensor, values in zip(static, whole, strict=False):
            tensor.copy_(own(world, values, "zigzag"))
        graph.replay()
        expected = right(whole, seen(tokens, True, device=world.device))[:1]
        deviations += [far(world, [out], expected, "zigzag") for out in outs]
    module.close()
    return deviations


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_call_reads_what_its_inputs_hold(ranks: Ranks, variant: str) -> None:
    for deviations in ranks.run(replayed, variant, timeout=60):
        assert max(deviations) < LIMIT, deviations


def replayed_stream(world: World) -> list[float]:
    """Deviations of a ragged call with windows in a graph that is replayed with other inputs."""
    (dim, tokens), lengths = SIZES["cuda"], [300, 1, 723]
    module = GatherAttention(KV_HEADS, HEADS, dim, tokens, window=200, device=world.device)
    whole = drawn(tokens, dim, world.device, batch=1)
    static = [own(world, tensor, "contiguous") for tensor in whole[:3]]
    module(*static, lengths=lengths)
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = module(*static, lengths=lengths)
    deviations = []
    for turn in range(3):
        whole = [tensor.roll(turn, 1) for tensor in whole]
        for tensor, values in zip(static, whole, strict=False):
            tensor.copy_(own(world, values, "contiguous"))
        graph.replay()
        deviations.append(far(world, [out], of_each(lengths, whole, True, 200)[0][:1], "contiguous"))
    module.close()
    return deviations


def test_a_captured_call_attends_to_a_stream(ranks: Ranks) -> None:
    for deviations in ranks.run(replayed_stream, timeout=60):
        assert max(deviations) < LIMIT, deviations
