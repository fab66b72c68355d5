"""Layers with a weight in e4m3, on CPU ranks: results, addends, kernels and fallback, refusals, compile, the backward."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.heap import World
from autotax.kernels.all_reduce_norm.scaled_norms import ScaledFused
from autotax.nn import AllGatherLinear, AllReduceNorm, LinearAllReduce, LinearReduceScatter, scaled_normed
from autotax.nn.scaled_linear import ScaledLinear
from autotax.operators.all_reduce_norm import AllReduceNorm as Normed
from autotax.operators.scaled import dequantised, laid_out, quantised, scales_of, scales_shape
from autotax.runner.ranks import Ranks
from tests.torch.winners import database, usual
from tests.volume import volume

WORLD, M, N, K = 2, 8, 96, 256
LAYERS = {"all_gather": AllGatherLinear, "reduce_scatter": LinearReduceScatter, "all_reduce": LinearAllReduce}
TOLERANCE = 1e-2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as pool:
        yield pool


def weight_of(layout: str, seed: int) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in e4m3 and its scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    return weight, torch.rand(scales_shape(layout, N, K, weight=True), generator=generator) + 0.5


def x_of(rank: int, rows: int) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(100 + rank)).bfloat16()


def right(kind: str, layout: str, quantize: str, rank: int, rows: int, most: float = math.inf) -> Tensor:
    """The result of a rank in float32, from the inputs of all ranks; `most` bounds scales of rows."""
    scale = torch.full((1,), 1 / 64)
    parts, products = [], []
    for peer in range(WORLD):
        x = x_of(peer, rows)
        scales = scale if quantize == "static" else scales_of(x, quantize, most)
        numbers = dequantised(quantised(x, scales, quantize), scales, layout, weight=False)
        parts.append(numbers)
        weight, of_weight = weight_of(layout, rank if kind == "all_gather" else peer)
        products.append(numbers @ dequantised(weight, of_weight, layout, weight=True).t())
    if kind == "all_gather":
        weight, of_weight = weight_of(layout, rank)
        return torch.cat(parts) @ dequantised(weight, of_weight, layout, weight=True).t()
    total = products[0] + products[1]
    return total if kind == "all_reduce" else total.chunk(WORLD)[rank]


def errors_of_layer(world: World, kind: str, layout: str, quantize: str, config: Config | None) -> list[float]:
    """Relative errors of calls with x in 16 bits, x in e4m3, fewer rows, and a bias. With scales of rows some sums are fast."""
    weight, scales = weight_of(layout, world.rank)
    given: dict[str, Any] = {"scales": scales, "quantize": quantize, "config": config}
    if quantize == "static":
        given["input_scale"] = torch.full((1,), 1 / 64)
    bias = torch.arange(N).bfloat16() / 16
    fast = "fast" if layout == "row" else "exact"
    layers = [
        LAYERS[kind](weight, None, M * WORLD, accumulate=fast, **given),
        LAYERS[kind](weight.t(), None, M * WORLD, bias=bias, **given),
    ]
    del given["quantize"]
    given.pop("input_scale", None)
    codes = LAYERS[kind](weight, None, M * WORLD, **given)
    assert all(bool(config) is any(choice.config for choice in layer.choices) for layer in layers)
    errors = []
    for rows in (M, 2):
        wanted = right(kind, layout, quantize, world.rank, rows)
        x = x_of(world.rank, rows)
        of_x = torch.full((1,), 1 / 64) if quantize == "static" else scales_of(x, quantize)
        calls = (
            (layers[0](x), wanted),
            (layers[1](x[None].expand(1, -1, -1)[0]), wanted + bias.float()),
            (codes(quantised(x, of_x, quantize), laid_out(of_x, layout, weight=False)), wanted),
        )
        errors += [float((output.float() - good).norm() / good.norm()) for output, good in calls]
        if kind != "all_gather":
            residual = torch.ones_like(wanted).bfloat16()
            errors.append(float((layers[0](x, residual=residual).float() - wanted - 1).norm() / wanted.norm()))
    world.barrier()
    for layer in (*layers, codes):
        layer.close()
    return errors


CONFIGS = {
    "all_gather": Config.of("scaled_decomposed", comm=1, product="16x32x2x4", splits=2, products="two"),
    "reduce_scatter": Config.of("scaled_decomposed", comm=1, product="library", splits=1, products="each", sender="engine"),
    "all_reduce": Config.of("scaled_words", payload="bf16", product="16x32x2x4", splits=1, shots="one"),
}


@pytest.mark.sampled(by=lambda kind, layout, tuned, **_: {"layout": (layout, tuned), "kind": (kind, tuned)})
@pytest.mark.parametrize("tuned", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize(("layout", "quantize"), [("row", "row"), ("block", "block"), ("tensor", "static")])
@pytest.mark.parametrize("kind", LAYERS)
def test_results(ranks: Ranks, kind: str, layout: str, quantize: str, tuned: bool) -> None:
    errors = ranks.run(errors_of_layer, kind, layout, quantize, CONFIGS[kind] if tuned else None, timeout=120)
    assert max(map(max, errors)) < TOLERANCE


def bits_with_a_bound(world: World, kind: str, config: Config | None) -> list[bool]:
    """Whether results with an upper bound of scales are those of rows quantised by torch, also for few rows and of a copy."""
    weight, scales = weight_of("row", world.rank)
    given: dict[str, Any] = {"scales": scales, "config": config}
    layer = LAYERS[kind](weight, None, M * WORLD, quantize="row", scale_ub=2.75, **given)
    codes = LAYERS[kind](weight, None, M * WORLD, **given)
    alike = []
    for call, rows in ((layer, M), (layer, 2), (copy.deepcopy(layer), M)):
        x = x_of(world.rank, rows)
        assert (x.abs().amax(-1) > 2.75).any()
        of_x = (x.abs().amax(-1, keepdim=True).float().clamp(max=2.75) / 448).clamp(min=1 / (448 * 512))
        of_torch = (x.float() * of_x.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
        alike.append(torch.equal(call(x), codes(of_torch, of_x)))
    world.barrier()
    layer.close()
    codes.close()
    return alike


@pytest.mark.sampled
@pytest.mark.parametrize("tuned", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_upper_bound_of_scales(ranks: Ranks, kind: str, tuned: bool) -> None:
    for alike in ranks.run(bits_with_a_bound, kind, CONFIGS[kind] if tuned else None, timeout=120):
        assert alike == [True] * 3


def errors_of_normed(world: World, kind: str, quant: str) -> list[float]:
    """Relative errors of y and of the new residual of `normed`, as it is and compiled, for x in 16 bits and in e4m3."""
    weight, scales = weight_of("row", world.rank)
    norm = AllReduceNorm(N, M * WORLD, dtype=torch.bfloat16, device="cpu", quant=quant)
    given: dict[str, Any] = {"scales": scales, "norm": norm, "config": CONFIGS[kind]}
    layer, of_codes = (LAYERS[kind](weight, None, M * WORLD, quantize=quantize, **given) for quantize in ("row", None))
    x, total = x_of(world.rank, M), right(kind, "row", "row", world.rank, M) + 1
    norm_weight, residual = torch.linspace(0.5, 1.5, N).bfloat16(), torch.ones(len(total), N).bfloat16()
    wanted, of_x = torch.nn.functional.rms_norm(total, (N,), norm_weight.float(), 1e-6), scales_of(x, "row")
    compiled = torch.compile(layer.normed, backend="aot_eager", fullgraph=True)
    errors = []
    with torch.no_grad():
        results = [call(x, norm_weight, residual) for call in (layer.normed, compiled)]
        results.append(of_codes.normed(quantised(x, of_x, "row"), norm_weight, residual, scales=of_x))
    for y, new_residual, *of_y in results:
        output = y.float() * of_y[0].view(-1, 1) if of_y else y.float()
        errors.append(float((output - wanted).norm() / wanted.norm() / (8 if of_y else 1)))
        errors.append(float((new_residual.float() - total).norm() / total.norm()))
    world.barrier()
    for module in (layer, of_codes, norm):
        module.close()
    return errors


@pytest.mark.parametrize("quant", ["none", "row"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_rows_come_back_normed(ranks: Ranks, kind: str, quant: str) -> None:
    """With quantised results errors count an eighth: a code of e4m3 has 3 bits."""
    errors = ranks.run(errors_of_normed, kind, quant, timeout=120)
    assert max(map(max, errors)) < TOLERANCE


def normed_in_one(
    world: World, path: str, layout: str, quantize: str | None, us: list[float], most: float
) -> tuple[int, list[float]]:
    """How many calls of `normed` ran one kernel, and the errors of all. `us`: without and with that kernel, as if measured."""
    weight, scales = weight_of(layout, world.rank)
    norm = AllReduceNorm(N, M, dtype=torch.bfloat16, device="cpu", quant="row", db=path)
    static = {"input_scale": torch.full((1,), 1 / 64)} if quantize == "static" else {}
    given: dict[str, Any] = {"scales": scales, "quantize": quantize, "norm": norm, "db": path, "sizes": [M], **static}
    given |= {"scale_ub": most} if most < math.inf else {}
    with mock.patch.object(scaled_normed, "least_microseconds", side_effect=us):
        layer = LinearAllReduce(weight, None, M, **given)
    compiled = torch.compile(layer.normed, backend="aot_eager", fullgraph=True)
    norm_weight, ran, errors = torch.linspace(0.5, 1.5, N).bfloat16(), [0], []
    run = ScaledFused.run

    def counted(*arguments: Any) -> None:
        ran[0] += 1
        run(*arguments)

    with torch.no_grad(), mock.patch.object(ScaledFused, "run", counted):
        for rows, call in ((M, layer.normed), (2, layer.normed), (M, compiled)):
            x, total = x_of(world.rank, rows), right("all_reduce", layout, quantize or layout, world.rank, rows, most) + 1
            of_x = None if quantize else scales_of(x, layout)
            x = x if of_x is None else quantised(x, of_x, layout)
            y, new_residual, of_y = call(x, norm_weight, torch.ones(rows, N).bfloat16(), scales=of_x)
            wanted = torch.nn.functional.rms_norm(total, (N,), norm_weight.float(), 1e-6)
            errors.append(float((new_residual.float() - total).norm() / total.norm()))
            errors.append(float((y.float() * of_y.view(-1, 1) - wanted).norm() / wanted.norm() / 8))
        with pytest.raises(UsageError, match="residual is not given"):
            layer.normed(x, norm_weight, scales=of_x)
    assert layer.failure() is None
    world.barrier()
    layer.close()
    norm.close()
    return ran[0], errors


@pytest.mark.parametrize(
    ("layout", "quantize", "us", "most"),
    [
        ("row", "row", [2.0, 1.0], math.inf),
        ("row", "row", [1.0, 2.0], math.inf),
        ("row", "row", [], 1.0),
        ("block", None, [2.0, 1.0], math.inf),
        *volume(("tensor", "static", [2.0, 1.0], math.inf)),
    ],
)
def test_a_tuned_kernel_of_product_sum_and_norm_runs_where_it_was_faster(
    ranks: Ranks, tmp_path: Path, layout: str, quantize: str | None, us: list[float], most: float
) -> None:
    problem = Normed(M, N, "bf16", WORLD, quant="row", k=K, scales=layout, quantize=quantize or "none")
    path = database(tmp_path / "winners.db", {problem: usual(problem, "scaled_fused")})
    for ran, errors in ranks.run(normed_in_one, path, layout, quantize, us, most, timeout=120):
        assert ran == (3 if us and us[1] < us[0] else 0)
        assert max(errors) < TOLERANCE


def without_winners(world: World, kind: str) -> list[Any]:
    """Errors of a layer that nothing is tuned for, of calls and of `normed`, where kernels are taken to be fast; and what ran."""
    weight, scales = weight_of("row", world.rank)
    norm = AllReduceNorm(N, 80, dtype=torch.bfloat16, device="cpu")
    with mock.patch.object(ScaledLinear, "kernels_are_fast", return_value=True):
        layer = LAYERS[kind](weight, None, 80, quantize="row", scales=scales, norm=norm, db="/nowhere/none.db")
    norm_weight, ran, errors = torch.linspace(0.5, 1.5, N).bfloat16(), [], []
    with torch.no_grad():
        for rows in (M, 2, 66):
            x, total = x_of(world.rank, rows), right(kind, "row", "row", world.rank, rows) + 1
            residual = torch.ones(len(total), N).bfloat16()
            wanted = torch.nn.functional.rms_norm(total, (N,), norm_weight.float(), 1e-6)
            results = layer(x) + 1, *layer.normed(x, norm_weight, residual)
            for result, expected in zip(results, (total, wanted, total), strict=True):
                errors.append(float((result.float() - expected).norm() / expected.norm()))
            ran.append(type(layer.kernel_for(rows)).__name__)
    world.barrier()
    layer.close()
    norm.close()
    return [ran, max(errors)]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_few_rows_without_a_winner_run_the_bulk_synchronous_kernel(ranks: Ranks, kind: str) -> None:
    for ran, error in ranks.run(without_winners, kind, timeout=120):
        assert ran == ["ScaledBsp", "ScaledBsp", "PlainScaled"]
        assert error < TOLERANCE


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_neither_layout_of_a_weight_is_copied(kind: str, turned: bool) -> None:
    weight, scales = weight_of("row", 0)
    layer = LAYERS[kind](weight.t() if turned else weight, None, M, scales=scales, quantize="row")
    assert layer.weight.data_ptr() == weight.data_ptr() and layer.weight.shape == (N, K)


def errors_of_chain(world: World, layout: str) -> float:
    """The relative error of a gather of rows that a row-parallel layer has normed and quantised."""
    norm = AllReduceNorm(K, M * WORLD, dtype=torch.bfloat16, quant=layout, device="cpu")
    partial = torch.randn(K, K, generator=torch.Generator().manual_seed(world.rank)).bfloat16() / 16
    weight, scales = weight_of(layout, world.rank)
    down = LinearReduceScatter(partial, None, M * WORLD, norm=norm)
    up = AllGatherLinear(weight, None, M * WORLD, scales=scales)
    of_y = torch.full((1,), 1 / 64) if layout == "tensor" else None
    with torch.no_grad():
        y, _, *made = down.normed(x_of(world.rank, M * WORLD), torch.ones(K).bfloat16(), torch.zeros(M, K).bfloat16(), of_y)
        output = up(y, *(made or [of_y]))
    own = dequantised(y, (made or [of_y])[0], layout, weight=False)
    parts = [torch.empty_like(own) for _ in range(WORLD)]
    dist.all_gather(parts, own)
    good = torch.cat(parts) @ dequantised(weight, scales, layout, weight=True).t()
    world.barrier()
    for module in (down, up, norm):
        module.close()
    return float((output.float() - good).norm() / good.norm())


@pytest.mark.parametrize("layout", ["row", "block", "tensor"])
def test_a_layer_takes_the_rows_that_another_has_normed_and_quantised(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(errors_of_chain, layout, timeout=120)) < TOLERANCE


def several(world: World, layout: str, config: Config | None) -> bool:
    """Whether two weights in one layer give the bits of two layers."""
    pairs = [weight_of(layout, seed) for seed in (1, 2)]
    pairs = [(torch.cat([weight, weight[:32]]), scales) for weight, scales in pairs] if layout == "block" else pairs
    given: dict[str, Any] = {"quantize": "block" if layout == "block" else "row", "config": config}
    both = AllGatherLinear([weight for weight, _ in pairs], None, M * WORLD, scales=[scales for _, scales in pairs], **given)
    layers = [AllGatherLinear(weight, None, M * WORLD, scales=scales, **given) for weight, scales in pairs]
    x = x_of(world.rank, M)
    alike = all(torch.equal(output, layer(x)) for output, layer in zip(both(x), layers, strict=True))
    world.barrier()
    for layer in (both, *layers):
        layer.close()
    return alike


@pytest.mark.parametrize(
    ("layout", "config"), [("row", None), ("block", None), ("tensor", None), ("tensor", CONFIGS["all_gather"])]
)
def test_several_weights_share_one_gather(ranks: Ranks, layout: str, config: Config | None) -> None:
    assert ranks.run(several, layout, config, timeout=120) == [True] * WORLD


def refusals_of(world: World) -> list[str]:
    weight, scales = weight_of("row", world.rank)
    x = x_of(world.rank, M)
    layer = AllGatherLinear(weight, None, M * WORLD, scales=scales, quantize="row")
    codes = AllGatherLinear(weight, None, M * WORLD, scales=scales)
    said = []

    def refused(call: Any) -> None:
        with contextlib.suppress(AssertionError):
            try:
                call()
            except UsageError as error:
                said.append(str(error))
            else:
                said.append("accepted")

    refused(lambda: AllGatherLinear(weight, None, M))
    refused(lambda: AllGatherLinear(weight, None, M, scales=scales[:, :5]))
    refused(lambda: AllGatherLinear(weight, None, M, scales=scales, quantize="rows"))
    refused(lambda: AllGatherLinear(weight, None, M, scales=scales, quantize="block"))
    refused(lambda: AllGatherLinear(weight, None, M, scales=scales, accumulate="quick"))
    refused(lambda: AllGatherLinear(weight.bfloat16(), None, M, accumulate="fast"))
    refused(lambda: AllGatherLinear(weight.bfloat16(), None, M, scale_ub=1.0))
    for scale_ub in (0, float("nan"), torch.ones(1)):
        refused(lambda: AllGatherLinear(weight, None, M, scales=scales, quantize="row", scale_ub=scale_ub))  # noqa: B023
    refused(lambda: AllGatherLinear(weight, None, M, scales=scales, scale_ub=1.0))
    for layout, quantize in (("block", "block"), ("tensor", "static")):
        given = {"scales": weight_of(layout, 0)[1], "quantize": quantize, "scale_ub": 1.0}
        refused(lambda: LinearAllReduce(weight, None, M, input_scale=torch.ones(1), **given))  # noqa: B023
    refused(lambda: AllGatherLinear(weight.bfloat16(), None, M, scales=scales))
    refused(lambda: layer(x, scales))
    refused(lambda: codes(x.to(torch.float8_e4m3fn)))
    refused(lambda: codes(x, scales))
    refused(lambda: layer(x.clone().requires_grad_()))
    refused(lambda: layer(x, residual=x))
    refused(lambda: layer(x_of(0, 2 * M)))
    world.barrier()
    layer.close()
    codes.close()
    return said


def test_refusals_say_in_one_line_what_to_do(ranks: Ranks) -> None:
    for said in ranks.run(refusals_of, timeout=120):
        assert len(said) == 20 and sum("scale_ub" in line for line in said) == 7
        assert all("\n" not in line and ":" in line and line != "accepted" for line in said), said


def compiled(world: World) -> float:
    weight, scales = weight_of("row", world.rank)
    layer = LinearAllReduce(weight, None, M, scales=scales, quantize="row", config=CONFIGS["all_reduce"])
    x = x_of(world.rank, M)
    with torch.no_grad():
        again = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        exported = torch.export.export(layer, (x,)).module()(x)
        output = layer(x)
    world.barrier()
    layer.close()
    return float((again.float() - output.float()).abs().max() + (exported.float() - output.float()).abs().max())


@pytest.mark.volume
def test_compiled_and_exported_calls_have_equal_bits(ranks: Ranks) -> None:
    assert ranks.run(compiled, timeout=120) == [0.0] * WORLD


def gradients(world: World, kind: str) -> list[float]:
    """Relative errors of the gradients of x and of the weight in bf16, against those of the layer in bf16."""
    weight, scales = weight_of("row", world.rank)
    wide = dequantised(weight, scales, "row", weight=True).bfloat16()
    x = x_of(world.rank, M)
    kept, theirs = wide.clone().requires_grad_(), wide.clone().requires_grad_()
    layer = LAYERS[kind](weight, None, M * WORLD, scales=scales, quantize="row", backward_weight=torch.nn.Parameter(kept))
    like = LAYERS[kind](torch.nn.Parameter(theirs), None, M * WORLD)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, good = layer(mine), like(other)
    dy = torch.ones_like(good)
    y.backward(dy)
    good.backward(dy)
    pairs = ((mine.grad, other.grad), (layer.backward_weight.grad, like.weight.grad))
    world.barrier()
    layer.close()
    like.close()
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]


def gradients_between_graphs(world: World, kind: str) -> list[str]:
    """Faults of gradients of a compiled program whose first recorded call prepares the backward, and of its refusals."""
    weight, scales = weight_of("row", world.rank)
    wide = torch.nn.Parameter(dequantised(weight, scales, "row", weight=True).bfloat16())
    layers = [LAYERS[kind](weight, None, M * WORLD, scales=scales, quantize="row", backward_weight=b) for b in (wide, None)]
    x, kept, lines = x_of(world.rank, M).requires_grad_(), [], []

    def program(x: Tensor, layer: Any) -> Tensor:
        return torch.relu(layer(x * 2)).float().sum()

    for run in (torch.compile(program, backend="aot_eager"), program):
        kept.append(torch.autograd.grad(run(x, layers[0]), [x, wide]))
    lines += [name for name, compiled, eager in zip(("x", "weight"), *kept, strict=True) if not torch.equal(compiled, eager)]
    torch._dynamo.reset()  # else it takes the graphs that it has
    for layer in layers:
        with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
            torch.compile(program, backend="aot_eager", fullgraph=True)(x, layer)
        lines.append(str(refused.value))
    world.barrier()
    for layer in layers:
        layer.close()
    return lines


@pytest.mark.parametrize("kind", ["all_gather", *volume("reduce_scatter", "all_reduce")])
def test_a_backward_runs_between_compiled_graphs_and_not_in_one(ranks: Ranks, kind: str) -> None:
    for whole, without in ranks.run(gradients_between_graphs, kind, timeout=120):
        assert "call prepare_backward() on all ranks, and compile without fullgraph=True" in whole
        assert "make the layer with backward_weight" in without


@pytest.mark.parametrize("kind", LAYERS)
def test_a_backward_by_the_weight_in_bf16(ranks: Ranks, kind: str) -> None:
    assert max(map(max, ranks.run(gradients, kind, timeout=120))) < TOLERANCE
