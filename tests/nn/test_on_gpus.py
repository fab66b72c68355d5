"""The modules on real GPUs, captured in graphs; elsewhere this is skipped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import AllGatherLinear, FlashDecode, LinearAllReduce, LinearReduceScatter
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.problems import FlashDecode as DecodeProblem
from autotax.operators.scaled import SCALES_OF, dequantised, quantised, scales_of, scales_shape
from autotax.operators.verification import TOLERANCE, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.nn.checks import attention, cache_of, everyones, normal, paged
from tests.nn.test_invariance import changed, invariant_problem

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


def replayed_linear(world: World, layer_of: type[Any], variant: str, most: int) -> float:
    """The worst error of calls with different numbers of rows in one graph, replayed with changing inputs."""
    gathers, rank, size = layer_of is AllGatherLinear, world.rank, world.size
    problem = problem_of(layer_of, most, size)
    weight = normal(N, K, seed=rank, dtype=BF16).to(world.device)
    layer = layer_of(weight, None, problem.m, config=space_for(problem, detect()).default(variant))
    given = [rows * (1 if gathers or layer_of is LinearAllReduce else size) for rows in ROWS if rows <= most]
    static = [torch.zeros(rows, K, dtype=BF16, device=world.device) for rows in given]
    for x in static:
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer(x) for x in static]
    weights = [normal(N, K, seed=other, dtype=BF16).to(world.device).float() for other in range(size)]
    errors = []
    for replay in range(REPLAYS):
        inputs = [
            [normal(rows, K, seed=100 * replay + 10 * i + other, dtype=BF16) for other in range(size)]
            for i, rows in enumerate(given)
        ]
        for x, drawn in zip(static, inputs, strict=True):
            x.copy_(drawn[rank])
        graph.replay()
        for out, drawn in zip(outs, inputs, strict=True):
            parts = [x.to(world.device).float() for x in drawn]
            if gathers:
                right = torch.cat(parts) @ weights[rank].t()
            else:
                right = sum(x @ other.t() for x, other in zip(parts, weights, strict=True))
                right = right if layer_of is LinearAllReduce else right.chunk(size)[rank]
            errors.append(relative_error(out, right))
    assert layer.failure() is None
    layer.close()
    return max(errors)


def problem_of(layer_of: type[Any], most: int, size: int) -> Problem:
    """The problem of a layer for up to `most` rows of each rank."""
    if layer_of is AllGatherLinear:
        return AllGatherGemm(most * size, N, K, "bf16", "m", size)
    rows = most if layer_of is LinearAllReduce else most * size
    return GemmReduceScatter(rows, N, K, "bf16", layer_of.OUTPUT, size)


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


ALONE = ("bsp", "decomposed", "copy_engine", "pull", "push", "push_specialized", "torch_pipeline", "nccl_ll")
SCATTERED = ("two_kernel", "torch_pipeline", "torch_reduce_scatter", "all_to_all", "nccl_ll128")
REPLICATED = ("two_kernel", "torch_one_shot", "torch_two_shot", "all_to_all", "nccl_ll")
LAYERS: list[tuple[type[Any], str, int]] = [
    *((AllGatherLinear, name, MOST) for name in ALONE),
    (AllGatherLinear, "push_words", FEW),
    *((LinearReduceScatter, name, MOST) for name in SCATTERED),
    *((LinearAllReduce, name, MOST) for name in REPLICATED),
    (LinearReduceScatter, "two_kernel_words", FEW),
    (LinearAllReduce, "two_kernel_words", FEW),
]


@pytest.mark.parametrize(("layer_of", "variant", "most"), LAYERS)
def test_a_captured_layer_is_right_for_any_number_of_rows(gpus: Ranks, layer_of: type[Any], variant: str, most: int) -> None:
    if variant not in space_for(problem_of(layer_of, most, GPUS), detect()).variants:
        pytest.skip(f"{variant} is not for these GPUs")
    assert max(gpus.run(replayed_linear, layer_of, variant, most, timeout=240)) <= TOLERANCE["bf16"]


def replayed_scaled(world: World, layer_of: type[Any], quantize: str, variant: str, most: int, compiled: bool) -> float:
    """The worst error of layers with weights in e4m3, in one graph: two weights of a gather or a residual, a bias, fewer rows."""
    gathers, whole, rank, size = layer_of is AllGatherLinear, layer_of is LinearAllReduce, world.rank, world.size
    layout = SCALES_OF[quantize]
    more = ("nk", layout, "bf16", quantize)
    rows = most if gathers or whole else most * size
    problem = (
        AllGatherGemm(most * size, N, K, "e4m3", "m", size, *more)
        if gathers
        else GemmReduceScatter(rows, N, K, "e4m3", layer_of.OUTPUT, size, *more)
    )

    def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = normal(N, K, seed=seed, dtype=torch.float8_e4m3fn).to(world.device)
        of_weight = normal(*scales_shape(layout, N, K, weight=True), seed=50 + seed, dtype=torch.float32).abs() + 0.1
        return weight, of_weight.to(world.device)

    pairs = [drawn(seed) for seed in range(size)]
    weight, scales = pairs[rank]
    several = gathers and layout == "row"
    halves = {"scales": list(scales.split(N // 2, 1))} if several else {"scales": scales}
    static = torch.full((1,), 1 / 64, device=world.device) if quantize == "static" else None
    bias = normal(N, seed=7, dtype=BF16).to(world.device)
    layer = layer_of(
        list(weight.split(N // 2)) if several else weight.t(), None, problem.m, **halves, quantize=quantize, bias=bias,
        input_scale=static, config=space_for(problem, detect()).default(variant),
    )  # fmt: skip
    assert any(choice.config for choice in layer.choices)
    step = 1 if gathers or whole else size
    counts = [count // step * step for count in (rows, 37, 4) if step <= count <= rows]
    xs = [torch.zeros(count, K, dtype=BF16, device=world.device) for count in counts]
    added = [None if gathers else normal(*layer.shape_of(x.shape, N), seed=9, dtype=BF16).to(world.device) for x in xs]
    call = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer

    @torch.no_grad()
    def calls() -> list[Any]:
        return [call(x, residual=residual) for x, residual in zip(xs, added, strict=True)]

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = calls()
    errors = []
    for replay in range(REPLAYS // 5):
        inputs = [
            [normal(len(x), K, seed=100 * replay + 10 * i + peer, dtype=BF16) for peer in range(size)] for i, x in enumerate(xs)
        ]
        for x, of_all in zip(xs, inputs, strict=True):
            x.copy_(of_all[rank])
        graph.replay()
        for out, of_all, residual in zip(outs, inputs, added, strict=True):
            numbers = []
            for x in of_all:
                of_x = static if static is not None else scales_of(x.to(world.device), quantize)
                numbers.append(dequantised(quantised(x.to(world.device), of_x, quantize), of_x, layout, weight=False))
            wide = [dequantised(*pair, layout, weight=True).t() for pair in pairs]
            if gathers:
                right = torch.cat(numbers) @ wide[rank]
            else:
                right = sum(x @ other for x, other in zip(numbers, wide, strict=True))
                right = (right if whole else right.chunk(size)[rank]) + residual.float()
            errors.append(relative_error(torch.cat(out, 1) if several else out, right + bias.float()))
    assert layer.failure() is None
    layer.close()
    return max(errors)


OF_SUMS = 8e-3
"""Two sums in bf16, their sum, a bias and a residual round four times: 5.2e-3 of these inputs by itself."""
SCALED = [
    (AllGatherLinear, "row", "scaled_packets", FEW, False),
    (AllGatherLinear, "row", "scaled_packets", FEW // 2, True),
    (AllGatherLinear, "block", "scaled_decomposed", MOST, False),
    (AllGatherLinear, "static", "bsp", MOST, False),
    (LinearReduceScatter, "row", "scaled_decomposed", MOST, True),
    (LinearReduceScatter, "block", "scaled_words", FEW, False),
    (LinearReduceScatter, "row", "torch_reduce_scatter_scaled", MOST, False),
    (LinearAllReduce, "row", "scaled_words", FEW, False),
    (LinearAllReduce, "static", "scaled_words", FEW, True),
    (LinearAllReduce, "block", "scaled_decomposed", MOST, False),
    (LinearAllReduce, "row", "torch_one_shot_scaled", FEW, False),
    (LinearAllReduce, "row", "torch_two_shot_scaled", MOST, True),
]


@pytest.mark.parametrize(("layer_of", "quantize", "variant", "most", "compiled"), SCALED)
def test_a_captured_layer_with_an_fp8_weight_is_right(
    gpus: Ranks, layer_of: type[Any], quantize: str, variant: str, most: int, compiled: bool
) -> None:
    allowed = TOLERANCE["bf16"] if layer_of is AllGatherLinear else OF_SUMS
    assert max(gpus.run(replayed_scaled, layer_of, quantize, variant, most, compiled, timeout=240)) <= allowed


INVARIANT = [(AllGatherLinear, "copy_engine"), (LinearReduceScatter, "push_specialized"), (LinearAllReduce, "push")]


@pytest.mark.parametrize(("layer_of", "variant"), INVARIANT)
def test_rows_of_a_layer_have_the_same_bits_whatever_their_number(gpus: Ranks, layer_of: type[Any], variant: str) -> None:
    problem, here = invariant_problem(layer_of, GPUS), detect()
    space = space_for(problem, here)
    for config in space.variants[variant].seeds:
        if config in space and registry.of(problem).is_invariant(problem, config):
            for _, mismatches in gpus.run(changed, layer_of, BF16, {"config": config}, timeout=240):
                assert mismatches == [], config
            return
    pytest.skip(f"no seed of {variant} has rows that do not depend on their number")


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
    results: list[tuple[int, torch.Tensor]] = []

    def work() -> None:
        layer.use_from_this_thread()  # former tests called the group's modules from the main one
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(world.device)):
            torch.cuda.set_device(0)  # the current stream of the layer's device stays the new one
            results.extend((torch.cuda.current_device(), layer(x)) for _ in range(3))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.cuda.synchronize(world.device)
    layer.close()
    assert [current for current, _ in results] == [0, 0, 0]
    return [relative_error(out, whole.float() @ weight.float().t()) for _, out in results]


def test_a_thread_with_another_current_gpu_calls_on_that_of_the_layer(gpus: Ranks) -> None:
    for errors in gpus.run(from_a_worker, timeout=240):
        assert max(errors) <= TOLERANCE["bf16"]
