"""Variants in Gluon, on ranks that share one Hopper GPU: no interpreter runs Gluon."""

from __future__ import annotations

import re

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.kernels.tiling import TILES_BY_WORDS
from autotax.operators.problems import AllGatherGemm
from autotax.operators.verification import TOLERANCE
from autotax.spaces import space_for
from tests.gpu import ranks_of_one_gpu
from tests.spaces.drawing import drawn

pytestmark = pytest.mark.gpu

REPLAYS = 500
WORLD = 4
PROBLEMS = [
    AllGatherGemm(512, 776, 1032, "bf16", "m", WORLD),
    AllGatherGemm(1024, 1000, 2048, "fp16", "m", WORLD),
    AllGatherGemm(256, 264, 4096, "bf16", "m", 2),
    AllGatherGemm(768, 520, 328, "bf16", "m", 4),
    AllGatherGemm(256, 520, 1096, "bf16", "m", 4),
]
TILES = [(64, 64, 8), (64, 80, 8), (64, 112, 7), (64, 128, 4), (64, 192, 4), (128, 48, 8), (128, 96, 6), (128, 112, 6)]
TILES += [(128, 128, 5), (128, 160, 5), (128, 192, 4), (128, 224, 4), (128, 256, 3), (128, 320, 3), (256, 128, 3), (256, 192, 3)]
WORDS = AllGatherGemm(256, 520, 1096, "bf16", "m", WORLD)
FEW = [
    AllGatherGemm(64, 776, 1032, "bf16", "m", WORLD),
    AllGatherGemm(12, 520, 2048, "fp16", "m", WORLD),
    AllGatherGemm(200, 264, 4096, "bf16", "m", 2),
    AllGatherGemm(102, 520, 328, "bf16", "m", 3),
]
TILES_OF_FEW = [(m, n) for m, blocks in TILES_BY_WORDS.items() for n in blocks]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_every_tile_of_specialised_warps_never_errs(problem: AllGatherGemm, tile: tuple[int, int, int]) -> None:
    space = space_for(problem, ranks_of_one_gpu.share_of(problem.world_size))
    usual = space.default("push_specialized").values
    config = Config.of("push_specialized", usual | dict(zip(("block_m", "block_n", "num_stages"), tile, strict=True)))
    if config not in space:
        pytest.skip("shards have no such rows")
    run(problem, config)


@pytest.mark.parametrize("name", "abcdefgh")
def test_configs_of_specialised_warps_drawn_at_random_never_err(name: str) -> None:
    problem = PROBLEMS[ord(name) % len(PROBLEMS)]
    run(problem, drawn(space_for(problem, ranks_of_one_gpu.share_of(problem.world_size)), "push_specialized", name))


@pytest.mark.parametrize(("block_m", "block_n", "stages"), [(64, 80, 8), (64, 128, 4), (128, 224, 4), (128, 320, 3)])
def test_calls_of_fewer_rows_may_come_between_others(block_m: int, block_n: int, stages: int) -> None:
    problem = AllGatherGemm(1024, 776, 1032, "bf16", "m", WORLD)
    usual = space_for(problem, ranks_of_one_gpu.share_of(WORLD)).default("push_specialized").values
    tile: dict[str, Value] = {"block_m": block_m, "block_n": block_n, "num_stages": stages, "chunk_rows": 64, "by_words": 256}
    config = Config.of("push_specialized", usual | tile)
    assert ranks_of_one_gpu.mix(problem, config, (256, 64, 1, 200, 130, 256, 65, 128), 120) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("problem", FEW, ids=str)
@pytest.mark.parametrize("tile", TILES_OF_FEW, ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("block_k", [64, 128])
def test_every_tile_of_few_rows_never_errs(problem: AllGatherGemm, tile: tuple[int, int], block_k: int) -> None:
    space = space_for(problem, ranks_of_one_gpu.share_of(problem.world_size))
    config = Config.of("push_words", block_m=tile[0], block_n=tile[1], block_k=block_k, num_stages=3, k_groups=1)
    if config not in space:
        pytest.skip("there are not so many rows")
    run(problem, config)


@pytest.mark.parametrize("name", "abcdef")
def test_configs_of_few_rows_drawn_at_random_never_err(name: str) -> None:
    problem = FEW[ord(name) % len(FEW)]
    run(problem, drawn(space_for(problem, ranks_of_one_gpu.share_of(problem.world_size)), "push_words", name))


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (32, 128), (64, 80), (128, 112)])
def test_calls_of_even_fewer_rows_may_come_between_others(block_m: int, block_n: int) -> None:
    problem = AllGatherGemm(256, 776, 1024, "bf16", "m", WORLD)
    config = Config.of("push_words", block_m=block_m, block_n=block_n, block_k=64, num_stages=4, k_groups=4)
    assert ranks_of_one_gpu.mix(problem, config, (64, 16, 1, 50, 33, 64, 17, 3), 120) <= TOLERANCE["bf16"]


@pytest.mark.parametrize("variant", ["push_specialized", "push_words"])
def test_words_that_are_all_minus_zeros_arrive(variant: str) -> None:
    """Words of minus zeros look like words that have not arrived."""
    assert ranks_of_one_gpu.of_minus_zeros(WORDS, words_of(variant), 5) == 0


@pytest.mark.parametrize("variant", ["push_specialized", "push_words"])
@pytest.mark.parametrize("missing", range(WORLD))
def test_a_rank_that_never_sends_its_words_is_named_by_all_others(variant: str, missing: int) -> None:
    said = ranks_of_one_gpu.without(missing, WORDS, words_of(variant))
    for rank, line in zip([rank for rank in range(WORLD) if rank != missing], said, strict=True):
        assert re.match(f"rank {rank} waited for .* of rank {missing}:", str(line))


CODES = [
    AllGatherGemm(512, 784, 1024, "e4m3", "m", WORLD, scales="row"),
    AllGatherGemm(768, 528, 1280, "e4m3", "m", 3, scales="block"),
    AllGatherGemm(256, 1024, 2048, "e4m3", "m", 2, scales="tensor"),
    AllGatherGemm(512, 784, 1152, "e4m3", "m", 2, scales="row", quantize="row"),
    AllGatherGemm(12, 528, 1280, "e4m3", "m", WORLD, scales="row"),
    AllGatherGemm(102, 784, 1024, "e4m3", "m", 3, scales="block", quantize="block"),
]
OF_CODES = ["scaled_packets", "scaled_specialized", "scaled_push_words"]


@pytest.mark.parametrize("problem", CODES, ids=str)
@pytest.mark.parametrize("variant", OF_CODES)
@pytest.mark.parametrize("name", "ab")
def test_gathers_of_codes_drawn_at_random_never_err(problem: AllGatherGemm, variant: str, name: str) -> None:
    space = space_for(problem, ranks_of_one_gpu.share_of(problem.world_size))
    if variant not in space.variants:
        pytest.skip("the variant has no config for this number of rows")
    run(problem, drawn(space, variant, name))


def words_of(variant: str) -> Config:
    config = space_for(WORDS, ranks_of_one_gpu.share_of(WORLD)).default(variant)
    assert config.values.get("by_words", WORDS.k)
    return config


def run(problem: AllGatherGemm, config: Config) -> None:
    worst, wrong = ranks_of_one_gpu.replay(problem, config, REPLAYS)
    assert worst <= TOLERANCE[problem.out_dtype]
    assert wrong == 0
    torch.cuda.empty_cache()
