"""What needs Hopper and one GPU: variants in Gluon, which nothing interprets, on ranks that share it."""

from __future__ import annotations

import pytest
import torch

from autotax.config import Config, Value
from autotax.problem import AllGatherGemm
from autotax.runner.reference import TOLERANCE
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


def test_words_that_are_all_minus_zeros_arrive() -> None:
    """They look like words that have not come."""
    problem = PROBLEMS[1]
    usual = space_for(problem, ranks_of_one_gpu.share_of(WORLD)).default("push_specialized").values
    assert usual["by_words"]
    assert ranks_of_one_gpu.of_minus_zeros(problem, Config.of("push_specialized", usual), 5) == 0


def run(problem: AllGatherGemm, config: Config) -> None:
    worst, wrong = ranks_of_one_gpu.replay(problem, config, REPLAYS)
    assert worst <= TOLERANCE[problem.dtype]
    assert wrong == 0
    torch.cuda.empty_cache()
