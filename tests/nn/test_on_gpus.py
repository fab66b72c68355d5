"""The modules on real GPUs, captured in graphs; elsewhere this is skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import AllGatherLinear, FlashDecode
from autotax.operators.problems import AllGatherGemm
from autotax.operators.problems import FlashDecode as DecodeProblem
from autotax.operators.verification import TOLERANCE, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.nn.checks import attention, cache_of, everyones, normal, paged

GPUS = min(4, torch.cuda.device_count())
BF16 = torch.bfloat16
N, K, MOST, FEW = 256, 512, 192, 48
ROWS = (192, 37, 16, 1, 192)
REPLAYS = 50

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs that reach each other")]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    with Ranks(GPUS, "cuda") as pool:
        yield pool


def replayed_linear(world: World, variant: str, most: int) -> float:
    """The worst error of calls with different numbers of rows in one graph, replayed with changing inputs."""
    problem = AllGatherGemm(most * world.size, N, K, "bf16", "m", world.size)
    weight = normal(N, K, seed=world.rank, dtype=BF16).to(world.device)
    layer = AllGatherLinear(weight, None, problem.m, config=space_for(problem, detect()).default(variant))
    static = [torch.zeros(rows, K, dtype=BF16, device=world.device) for rows in ROWS if rows <= most]
    for x in static:
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer(x) for x in static]
    errors = []
    for replay in range(REPLAYS):
        drawn = [normal(world.size * len(x), K, seed=100 * replay + i, dtype=BF16) for i, x in enumerate(static)]
        wholes = [whole.to(world.device) for whole in drawn]
        for x, whole in zip(static, wholes, strict=True):
            x.copy_(whole[world.rank * len(x) : (world.rank + 1) * len(x)])
        graph.replay()
        errors += [relative_error(out, whole.float() @ weight.float().t()) for out, whole in zip(outs, wholes, strict=True)]
    assert layer.failure() is None
    layer.close()
    return max(errors)


def replayed_decode(world: World, variant: str | None, output: str = "replicated", page: int = 0) -> float:
    """The same for attention, with different batches and rooms for tokens."""
    heads, kv_heads, dim, batch, room = 16, 4, 128, 4, 512
    problem = DecodeProblem(batch, heads, kv_heads, dim, room * world.size, "bf16", world.size, output, page)
    config = space_for(problem, detect()).default(variant) if variant else None
    attend = FlashDecode(kv_heads, heads, dim, batch, problem.kv_len, config=config, output=output, page=page)
    first = world.rank * attend.out_heads % heads
    sizes = ((4, 512), (3, 512), (4, 500), (1, 33))

    def given(mine: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return paged(*mine, page) if page else mine

    caches = [given(cache_of(world, b, s, 0, BF16, kv_heads, dim)) for b, s in sizes]
    static = [(torch.zeros(b, heads, dim, dtype=BF16), *cache) for (b, _), cache in zip(sizes, caches, strict=True)]
    static = [tuple(tensor.to(world.device) for tensor in call) for call in static]
    for call in static:
        attend(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attend(*call) for call in static]
    errors = []
    for replay in range(REPLAYS // 10):
        drawn = []
        for (b, s), call in zip(sizes, static, strict=True):
            q, mine = normal(b, heads, dim, seed=replay, dtype=BF16), cache_of(world, b, s, replay, BF16, kv_heads, dim)
            for tensor, values in zip(call, (q, *given(mine)), strict=True):
                tensor.copy_(values)
            drawn.append(attention(q, everyones(world, mine))[:, first : first + attend.out_heads])
        graph.replay()
        errors += [relative_error(out.cpu(), right) for out, right in zip(outs, drawn, strict=True)]
    assert attend.failure() is None
    attend.close()
    return max(errors)


LAYERS = [("bsp", MOST), ("decomposed", MOST), ("copy_engine", MOST), ("pull", MOST), ("push", MOST)]
LAYERS += [("push_specialized", MOST), ("push_words", FEW)]


@pytest.mark.parametrize(("variant", "most"), LAYERS)
def test_a_captured_layer_is_right_for_any_number_of_rows(gpus: Ranks, variant: str, most: int) -> None:
    if variant not in space_for(AllGatherGemm(most * GPUS, N, K, "bf16", "m", GPUS), detect()).variants:
        pytest.skip(f"{variant} is not for these GPUs")
    assert max(gpus.run(replayed_linear, variant, most, timeout=240)) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("variant", [None, "bsp", "fused", "single"])
def test_captured_attention_is_right_for_any_batch(gpus: Ranks, variant: str | None) -> None:
    assert max(gpus.run(replayed_decode, variant, timeout=240)) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("variant", [None, "bsp", "single", "resident"])
def test_captured_attention_gives_own_heads_of_a_cache_in_pages(gpus: Ranks, variant: str | None) -> None:
    if 16 % GPUS:
        pytest.skip(f"{GPUS} ranks cannot share 16 heads")
    assert max(gpus.run(replayed_decode, variant, "head_scatter", 16, timeout=240)) <= TOLERANCE["bf16"]


def from_a_worker(world: World) -> list[float]:
    """Errors of calls from a new thread, whose current GPU is the first one whatever the rank, on a stream of its own."""
    weight = normal(N, K, seed=world.rank, dtype=BF16).to(world.device)
    layer = AllGatherLinear(weight, None, 64 * world.size)
    whole = normal(world.size * 8, K, seed=7, dtype=BF16).to(world.device)
    x = whole[world.rank * 8 : (world.rank + 1) * 8].clone()
    torch.cuda.synchronize(world.device)
    found: list[tuple[int, torch.Tensor]] = []

    def work() -> None:
        layer.use_from_this_thread()  # former tests called the group's modules from the main one
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(world.device)):
            torch.cuda.set_device(0)  # the current stream of the layer's device stays the new one
            found.extend((torch.cuda.current_device(), layer(x)) for _ in range(3))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.cuda.synchronize(world.device)
    layer.close()
    assert [current for current, _ in found] == [0, 0, 0]
    return [relative_error(out, whole.float() @ weight.float().t()) for _, out in found]


def test_a_thread_with_another_current_gpu_calls_on_that_of_the_layer(gpus: Ranks) -> None:
    for errors in gpus.run(from_a_worker, timeout=240):
        assert max(errors) <= TOLERANCE["bf16"]
