"""GEMM + Reduce-Scatter and GEMM + All-Reduce on ranks that share one GPU, which proves their protocols."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.operators.problems import GemmReduceScatter
from autotax.operators.verification import TOLERANCE
from autotax.spaces import space_for
from tests.gpu import ranks_of_one_gpu
from tests.gpu.tiles import by_words
from tests.spaces.drawing import drawn

pytestmark = pytest.mark.gpu

REPLAYS, LONG = 300, 10_000
WORLD = 4
PROBLEMS = [
    GemmReduceScatter(1000, 776, 1032, "bf16", "scattered", WORLD),
    GemmReduceScatter(301, 520, 2048, "fp16", "replicated", WORLD, "kn"),
    GemmReduceScatter(97, 131, 331, "fp32", "scattered", 2),
    GemmReduceScatter(5, 264, 520, "bf16", "replicated", 3),
]
FEW = [
    GemmReduceScatter(16, 776, 1032, "bf16", "scattered", WORLD),
    GemmReduceScatter(64, 1024, 2048, "bf16", "replicated", WORLD),
    GemmReduceScatter(3, 131, 331, "fp32", "replicated", 2, "kn"),
]
VARIANTS = ("push", "pull_reduce")
"""`decomposed` is left out: waiting kernels of other ranks may occupy every processor that its library kernels need."""
SHOTS = ("one", "two")


ROLES = [PROBLEMS[0], replace(PROBLEMS[0], m=64), GemmReduceScatter(300, 264, 136, "fp16", "scattered", 2)]
"""Problems that warp-specialized kernels can compute on Hopper."""


def with_values(problem: GemmReduceScatter, variant: str, **changes: Value) -> Config:
    """The default with changes."""
    space = space_for(problem, ranks_of_one_gpu.share_of(problem.world_size))
    if variant not in space.variants:
        pytest.skip(f"{problem.key} has no {variant} here")
    config = Config.of(variant, space.default(variant).values | changes)
    if config not in space:
        pytest.skip(str(space.why_not(config)))
    return config


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_a_graph_with_late_ranks_and_never_errs(problem: GemmReduceScatter, variant: str) -> None:
    run(problem, with_values(problem, variant))


@pytest.mark.parametrize("problem", FEW, ids=str)
@pytest.mark.parametrize("shots", SHOTS)
def test_words_never_err(problem: GemmReduceScatter, shots: str) -> None:
    run(problem, with_values(problem, "words", shots=shots))


@pytest.mark.parametrize("problem", ROLES, ids=str)
@pytest.mark.parametrize("tile", [(64, 128), (64, 256), (128, 128), (128, 256)], ids=str)
def test_warps_with_roles_never_err(problem: GemmReduceScatter, tile: tuple[int, int]) -> None:
    run(problem, with_values(problem, "push_specialized", block_m=tile[0], block_n=tile[1], num_stages=3))


CODES = [
    GemmReduceScatter(64, 784, 1024, "e4m3", "replicated", 2, scales="row"),
    GemmReduceScatter(130, 1024, 2048, "e4m3", "replicated", 3, scales="block"),
    GemmReduceScatter(5, 528, 1280, "e4m3", "replicated", WORLD, scales="row", quantize="row"),
    GemmReduceScatter(201, 784, 1024, "e4m3", "scattered", 2, scales="row"),
    GemmReduceScatter(129, 528, 1280, "e4m3", "scattered", WORLD, scales="block"),
    GemmReduceScatter(130, 1024, 1152, "bf16", "replicated", 3),
]


@pytest.mark.parametrize("problem", CODES, ids=str)
@pytest.mark.parametrize(("tile", "splits"), [("64x64x8x8x2", 1), ("64x64x9x4x2", 2), ("64x128x6x8x1", 1), ("128x64x6x8x2", 3)])
def test_warps_with_roles_that_send_words_never_err(problem: GemmReduceScatter, tile: str, splits: int) -> None:
    config = by_words(problem, with_values, tile, splits)
    run(problem, config, 100)
    if problem.output == "replicated":
        assert ranks_of_one_gpu.differences(problem, config, 20) == 0


@pytest.mark.parametrize("problem", [CODES[1], *CODES[-2:]], ids=str)
def test_calls_of_fewer_rows_may_come_between_those_of_words_of_warps_with_roles(problem: GemmReduceScatter) -> None:
    smaller = [replace(problem, m=m) for m in (problem.m, 64, 1, 128, 65, problem.m, 3)]
    config = by_words(problem, with_values, "64x64x8x8x2", 2)
    assert ranks_of_one_gpu.mix_of(problem, config, smaller, 60) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("missing", range(3))
def test_warps_with_roles_name_a_rank_that_sends_no_words(missing: int) -> None:
    config = by_words(CODES[1], with_values, "64x64x8x8x2", 1)
    said = ranks_of_one_gpu.without(missing, CODES[1], config)
    for rank, line in zip([rank for rank in range(3) if rank != missing], said, strict=True):
        assert re.match(f"rank {rank} waited for .* of rank {missing}:", str(line))


@pytest.mark.full
@pytest.mark.parametrize(
    ("problem", "variant"),
    [*product(PROBLEMS, VARIANTS), *product(FEW, ["words"]), *product(ROLES, ["push_specialized"])],
    ids=str,
)
def test_ten_thousand_replays_never_err(problem: GemmReduceScatter, variant: str) -> None:
    run(problem, with_values(problem, variant), LONG)


LARGE = [
    (GemmReduceScatter(64, 5120, 4096, "e4m3", "replicated", 2, scales="row"), "64x64x12x8x2", 1),
    (GemmReduceScatter(128, 5120, 4096, "e4m3", "replicated", 2, scales="block"), "64x128x6x8x1", 1),
    (GemmReduceScatter(128, 5120, 4096, "e4m3", "replicated", 2, scales="row"), "128x64x8x8x2", 3),
    (GemmReduceScatter(256, 5120, 4096, "e4m3", "scattered", 2, scales="row"), "128x128x6x8x2", 1),
    (GemmReduceScatter(64, 8192, 2560, "bf16", "replicated", 2), "64x64x13x4x1", 1),
    (GemmReduceScatter(201, 4096, 1536, "bf16", "scattered", 2), "128x64x8x8x1", 2),
]


@pytest.mark.full
@pytest.mark.parametrize(("problem", "tile", "splits"), LARGE, ids=str)
def test_ten_thousand_replays_of_words_of_warps_with_roles_never_err(problem: GemmReduceScatter, tile: str, splits: int) -> None:
    run(problem, by_words(problem, with_values, tile, splits), LONG)


@pytest.mark.parametrize("name", "abcdefgh")
@pytest.mark.parametrize("variant", ["push", "pull_reduce"])
def test_configs_drawn_at_random_never_err(variant: str, name: str) -> None:
    problem = PROBLEMS[ord(name) % len(PROBLEMS)]
    run(problem, drawn(space_for(problem, ranks_of_one_gpu.share_of(problem.world_size)), variant, name))


@pytest.mark.parametrize("name", "abcdef")
def test_words_drawn_at_random_never_err(name: str) -> None:
    problem = FEW[ord(name) % len(FEW)]
    run(problem, drawn(space_for(problem, ranks_of_one_gpu.share_of(problem.world_size)), "words", name))


@pytest.mark.parametrize("signals", ["late", "at_once"])
@pytest.mark.parametrize("adders", [0, 4])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("flag_tiles", [1, 4])
def test_every_way_of_telling_and_adding_never_errs(signals: str, adders: int, splits: int, flag_tiles: int) -> None:
    tile: dict[str, Value] = {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
    ways: dict[str, Value] = {"signals": signals, "adders": adders, "splits": splits, "flag_tiles": flag_tiles, "flat": 0}
    run(PROBLEMS[0], with_values(PROBLEMS[0], "push", **tile, **ways))


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=str)
@pytest.mark.parametrize("tile", [(128, 256, 8, 3), (64, 64, 4, 3)], ids=str)
def test_a_flat_loop_never_errs(problem: GemmReduceScatter, tile: tuple[int, ...]) -> None:
    sides: dict[str, Value] = dict(zip(("block_m", "block_n", "num_warps", "num_stages"), tile, strict=True))
    how: dict[str, Value] = {"block_k": 64, "flat": 1, "signals": "late", "flag_tiles": 1, "splits": 1}
    run(problem, with_values(problem, "push", **sides, **how))


@pytest.mark.parametrize("variant", [*VARIANTS, "push_specialized"])
@pytest.mark.parametrize("output", ["scattered", "replicated"])
def test_calls_of_fewer_rows_may_come_between_others(variant: str, output: str) -> None:
    problem = GemmReduceScatter(512, 776, 1032, "bf16", output, WORLD)
    smaller = [replace(problem, m=m) for m in (512, 64, 1, 300, 130, 512, 65)]
    assert ranks_of_one_gpu.mix_of(problem, with_values(problem, variant), smaller, 100) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("shots", SHOTS)
def test_calls_of_even_fewer_rows_may_come_between_others(shots: str) -> None:
    problem = FEW[1]
    smaller = [replace(problem, m=m) for m in (64, 16, 1, 50, 33, 64, 3)]
    assert ranks_of_one_gpu.mix_of(problem, with_values(problem, "words", shots=shots), smaller, 100) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("variant", ["push", "pull_reduce", "words"])
def test_a_replicated_output_has_the_same_bits_on_all_ranks(variant: str) -> None:
    problem = GemmReduceScatter(64, 1024, 2048, "bf16", "replicated", WORLD)
    assert ranks_of_one_gpu.differences(problem, with_values(problem, variant), 50) == 0


@pytest.mark.parametrize("shots", SHOTS)
def test_both_trips_have_the_same_bits_on_all_ranks(shots: str) -> None:
    assert ranks_of_one_gpu.differences(FEW[1], with_values(FEW[1], "words", shots=shots), 50) == 0


@pytest.mark.parametrize("missing", range(WORLD))
@pytest.mark.parametrize("variant", ["push", "pull_reduce", "words", "push_specialized"])
@pytest.mark.parametrize("output", ["scattered", "replicated"])
def test_a_rank_that_never_calls_is_named_by_all_others(variant: str, missing: int, output: str) -> None:
    problem = GemmReduceScatter(64, 1024, 2048, "bf16", output, WORLD)
    said = ranks_of_one_gpu.without(missing, problem, with_values(problem, variant))
    for rank, line in zip([rank for rank in range(WORLD) if rank != missing], said, strict=True):
        assert re.match(f"rank {rank} waited for .* of rank {missing}:", str(line))


def run(problem: GemmReduceScatter, config: Config, replays: int = REPLAYS) -> None:
    worst, wrong = ranks_of_one_gpu.replay(problem, config, replays)
    assert worst <= TOLERANCE[problem.out_dtype]
    assert wrong == 0
    torch.cuda.empty_cache()
