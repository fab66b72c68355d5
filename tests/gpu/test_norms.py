"""All-Reduce + RMSNorm on real GPUs: y, the new residual and the scales of every variant, in graphs and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autotax.core.config import Config, Value
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import AllReduceNorm as AllReduceNormModule
from autotax.nn import LinearAllReduce
from autotax.operators.problems import AllReduceNorm
from autotax.operators.verification import TOLERANCE
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.kernels.test_all_reduce_norm import codes_of, digests_behind, outputs_of, quotients_of

pytestmark = pytest.mark.gpu

WORLD = 2
LATE: dict[str, Value] = {"ahead": 2, "signals": "late"}
WAYS: dict[str, tuple[str, dict[str, Value]]] = {
    "few rows, split": ("one_shot", {"words": "blank", "split": 8, "num_warps": 16, "per_processor": 1}),
    "words of calls": ("one_shot", {"words": "epoch", "split": 2, "num_warps": 8, "per_processor": 1}),
    "two shots": ("two_shot", {"words": "blank", "num_warps": 8, "per_processor": 2}),
    "two shots, words of calls": ("two_shot", {"words": "epoch", "num_warps": 16, "per_processor": 1}),
    "push": ("push", LATE | {"shots": "one", "rows": 2, "owners": "straight", "num_warps": 16, "per_processor": 1}),
    "push, two shots": ("push", LATE | {"shots": "two", "rows": 1, "owners": "straight", "num_warps": 8, "per_processor": 2}),
    "push, owners in turn": ("push", LATE | {"shots": "two", "rows": 4, "owners": "turned", "num_warps": 8, "per_processor": 2}),
    "bsp": ("bsp", {"rows": 1, "num_warps": 8}),
}
QUANTS = ("none", "tensor", "row", "block")
ROWS = (138, 1, 64, 138, 2, 133)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD, detect().backend) as pool:
        yield pool


def problem_of(quant: str, hidden: int = 6144, m: int = 138) -> AllReduceNorm:
    return AllReduceNorm(m, hidden, "bf16", WORLD, quant=quant)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quant", QUANTS)
def test_every_output_of_replays_is_right(ranks: Ranks, way: str, quant: str) -> None:
    config = Config.of(*WAYS[way])
    problem = problem_of(quant, m=64 if config.values.get("split") == 8 else 138)
    assert space_for(problem, detect()).why_not(config) is None
    for worst, wrong in ranks.run(conformance.replay, problem, config, 300, timeout=100):
        assert worst <= TOLERANCE[problem.out_dtype]
        assert wrong == 0


@pytest.mark.parametrize("way", [way for way in WAYS if way != "bsp"])
@pytest.mark.parametrize("quant", QUANTS)
def test_every_output_is_the_same_bits_on_all_ranks_for_any_rows(ranks: Ranks, way: str, quant: str) -> None:
    one, two = ranks.run(outputs_of, problem_of(quant), Config.of(*WAYS[way]), ROWS, timeout=100)
    assert one == two


FUSED: dict[str, dict[str, Value]] = {
    "blank words": {"words": "blank", "split": 4},
    "words of calls": {"words": "epoch", "split": 1},
    "pointers": {"words": "blank", "split": 2, "loads": "pointer", "per_processor": 2, "block_n": 32, "num_stages": 4},
}


@pytest.mark.parametrize("way", FUSED)
@pytest.mark.parametrize("quant", QUANTS)
def test_products_are_summed_and_normed_by_one_kernel(ranks: Ranks, way: str, quant: str) -> None:
    problem = replace(problem_of(quant, m=16), k=1032)
    space = space_for(problem, detect())
    config = Config.of("fused", space.default("fused").values | FUSED[way])
    assert space.why_not(config) is None
    for worst, wrong in ranks.run(conformance.replay, problem, config, 300, timeout=100):
        assert worst <= TOLERANCE[problem.out_dtype]
        assert wrong == 0
    if quant == "block":
        one, two = ranks.run(digests_behind, problem, config, (16, 1, 7, 16, 2), timeout=100)
        assert one == two


@pytest.mark.parametrize("hidden", [4096, 5120, 7168, 8192, 16384])
def test_defaults_are_right_for_other_hidden_sizes(ranks: Ranks, hidden: int) -> None:
    for m in (1, 300):
        problem = replace(problem_of("block", hidden), m=m)
        for variant in space_for(problem, detect()).variants:
            for errors in ranks.run(
                conformance.errors_of, problem, space_for(problem, detect()).default(variant), 4, timeout=100
            ):
                assert max(errors) <= TOLERANCE[problem.out_dtype], variant


def test_codes_and_quotients_are_those_of_torch(ranks: Ranks) -> None:
    right = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat(
        [right, torch.randn(700) * 100, torch.tensor([torch.inf, -torch.inf, 1e30, 449.0, 464.0, 465.0]), torch.zeros(62)]
    )
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    numbers, scales = some_quotients()
    for codes, quotients in ranks.run(codes_and_quotients, values, numbers, scales):
        finite = ~values.isnan()
        assert torch.equal(codes[finite], expected[finite])
        assert ((codes[~finite] & 0x7F) == 0x7F).all()
        assert torch.equal(quotients.view(torch.int32), (numbers / scales[:, None]).view(torch.int32))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("way", ["few rows, split", "two shots"])
def test_modules_are_right_in_graphs(ranks: Ranks, way: str, quant: str) -> None:
    for errors in ranks.run(errors_of_modules, quant, Config.of(*WAYS[way]), timeout=100):
        assert max(errors.values()) <= 0.06 if quant != "none" else max(errors.values()) <= 8e-3, errors


def errors_of_modules(world: World, quant: str, config: Config) -> dict[str, float]:
    """Relative errors of y and of the new residual, of the norm module and of layers with it, replayed from graphs."""
    m, n, k = 16, 6144, 512
    drawn = torch.Generator().manual_seed(0)
    parts = [torch.randn(m, k, generator=drawn) for _ in range(world.size)]
    weights = [torch.randn(n, k, generator=drawn) / k**0.5 for _ in range(world.size)]
    weight, residual = torch.randn(n, generator=drawn), torch.randn(m, n, generator=drawn)
    mine = [tensor.to(world.device).bfloat16() for tensor in (parts[world.rank], weights[world.rank], weight, residual)]
    products = [(x.bfloat16().float() @ w.bfloat16().float().t()) for x, w in zip(parts, weights, strict=True)]
    total = torch.stack(products).sum(0) + residual.bfloat16().float()
    right = torch.nn.functional.rms_norm(total, (n,), weight.bfloat16().float(), 1e-6)
    norm = AllReduceNormModule(n, m, quant=quant, config=config)
    layer = LinearAllReduce(mine[1], None, m, norm=norm)
    scale = torch.full((1,), 1 / 32, device=world.device) if quant == "tensor" else None
    errors = {}
    with torch.no_grad():
        for apart in (True, False):
            layer._apart = {m: apart}
            layer.normed(mine[0], mine[2], mine[3], scale)
            world.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(3):
                    y, new_residual, *scales = layer.normed(mine[0], mine[2], mine[3], scale)
            for _ in range(5):
                graph.replay()
            world.synchronize()
            if scale is not None:
                scales = [scale.expand(m, 1)]
            shape = (m, scales[0].numel() // m, 1) if scales else (1, 1, 1)
            factor = scales[0].reshape(shape) if scales else torch.ones(shape, device=world.device)
            dequantised = y.float().view(m, shape[1], -1) * factor
            errors[f"y, apart {apart}"] = float((dequantised.view(m, n).cpu() - right).norm() / right.norm())
            errors[f"residual, apart {apart}"] = float((new_residual.float().cpu() - total).norm() / total.norm())
    assert layer.failure() is None and norm.failure() is None
    layer.close()
    norm.close()
    return errors


def some_quotients() -> tuple[Tensor, Tensor]:
    """Numbers of 16 bits in groups of 128, and the scales of the groups."""
    numbers = (torch.randn(4096, 128) * torch.exp2(torch.randint(-30, 60, (4096, 1)).float())).bfloat16().float()
    return numbers, numbers.abs().amax(1).clamp_min(1e-10) / 448


def codes_and_quotients(world: World, values: Tensor, numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return codes_of(world, values), quotients_of(world, numbers, scales)
