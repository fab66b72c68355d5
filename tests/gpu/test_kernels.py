"""Every variant on real GPUs: sizes that no tile divides, each type, replayed graphs, both shardings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels.all_gather_gemm.gathered import gathered_codes
from autotax.operators.problems import AllGatherGemm, FlashDecode, GatherAttention, GemmReduceScatter
from autotax.operators.scaled import ACCUMULATE
from autotax.operators.verification import TOLERANCE, make_inputs
from autotax.runner.precompile import CompileAhead
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.conformance import calls as conformance
from tests.gpu.tiles import by_words
from tests.spaces.drawing import ways_to_exchange

pytestmark = pytest.mark.gpu

WORLD = max(1, min(4, torch.cuda.device_count()))
REPLAYS = 1000
PROBLEMS: list[Problem] = [
    problem
    for dtype in ("bf16", "fp16", "fp32")
    for problem in (
        AllGatherGemm(301, 777, 1032, dtype, "m", WORLD),
        AllGatherGemm(97, 131, 331, dtype, "m", WORLD),
        AllGatherGemm(301, 777, 264 * WORLD, dtype, "k", WORLD),
        AllGatherGemm(97, 131, 83 * WORLD, dtype, "k", WORLD),
        FlashDecode(3, 6, 2, 80, 1001, dtype, WORLD),
        FlashDecode(2, 32, 4, 128, 4099, dtype, WORLD),
        GemmReduceScatter(301, 776, 1032, dtype, "scattered", WORLD),
        GemmReduceScatter(97, 131, 331, dtype, "replicated", WORLD, "kn"),
        GemmReduceScatter(16, 1024, 2048, dtype, "replicated", WORLD),
    )
]
PROBLEMS += [
    FlashDecode(3, 12, 4, 80, 1001, "bf16", WORLD, "head_scatter"),
    FlashDecode(2, 48, 8, 128, 4099, "bf16", WORLD, "head_scatter", 16),
    FlashDecode(2, 32, 4, 64, 4099, "fp16", WORLD, "replicated", 64),
    FlashDecode(3, 32, 4, 128, 4099, "bf16", WORLD, kv_dtype="e4m3fnuz" if "gfx942" in detect().target else "e4m3"),
    FlashDecode(2, 64, 8, 64, 4099, "bf16", WORLD, "replicated", 16, sinks="learned", window=3000, queries=3),
]
PROBLEMS += [
    AllGatherGemm(301, 784, 1152, "e4m3", "m", WORLD, scales="block"),
    AllGatherGemm(97, 784, 1040, "e4m3", "m", WORLD, scales="row", quantize="row"),
    GemmReduceScatter(301, 784, 1152, "e4m3", "scattered", WORLD, scales="row"),
    GemmReduceScatter(61, 784, 1152, "e4m3", "scattered", WORLD, scales="tensor", operand="e5m2"),
    AllGatherGemm(97, 784, 1152, "e4m3", "m", WORLD, scales="tensor", operand="e5m2"),
    GemmReduceScatter(97, 784, 1152, "e4m3", "replicated", WORLD, scales="block", quantize="block"),
]
PROBLEMS += [
    GatherAttention(1, 16, 4, 128, 1024 * WORLD, "bf16", WORLD, layout="zigzag"),
    GatherAttention(2, 6, 2, 64, 384 * WORLD, "fp16", WORLD),
    GatherAttention(1, 4, 4, 128, 1002 * WORLD, "bf16", WORLD, layout="zigzag"),  # no block divides the chunks
    GatherAttention(2, 8, 2, 128, 512 * WORLD, "bf16", WORLD, "none"),
    GatherAttention(1, 8, 2, 128, 1024 * WORLD, "bf16", WORLD, layout="zigzag", window=300),
    GatherAttention(2, 8, 2, 64, 500 * WORLD, "fp16", WORLD, window=700),
    GatherAttention(1, 8, 8, 192, 1024 * WORLD, "bf16", WORLD, layout="zigzag", v_dim=128),
]
CASES = [(problem, variant) for problem in PROBLEMS for variant in space_for(problem, detect()).variants]
WAYS = [(problem, way) for problem in PROBLEMS if isinstance(problem, FlashDecode) for way in ways_to_exchange(space_for(problem, detect()))]  # noqa: E501  # fmt: skip
COMPILERS = 32


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Ranks with nearly all kernels in the cache."""
    compile_ahead([(problem, space_for(problem, detect()).default(variant)) for problem, variant in CASES] + WAYS)
    with Ranks(WORLD, detect().backend) as pool:
        yield pool


def compile_ahead(cases: list[tuple[Problem, Config]]) -> None:
    """Fills the cache of the compiler, by many processes: otherwise compilation would dominate the time."""
    hardware = detect()
    compilers = CompileAhead(hardware, min(COMPILERS, os.cpu_count() or 1))
    for problem, config in cases:
        compilers.expect(problem, [config])
    for problem, config in cases:
        compilers.outcome(problem, config)
    compilers.close()


@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_replays_a_graph_with_changing_inputs_and_never_errs(ranks: Ranks, problem: Problem, variant: str) -> None:
    run(ranks, problem, space_for(problem, detect()).default(variant))


@pytest.mark.parametrize(("problem", "config"), WAYS, ids=str)
def test_every_way_to_exchange_results_never_errs(ranks: Ranks, problem: Problem, config: Config) -> None:
    run(ranks, problem, config)


AT_ONCE = ("resident", "compact")


@pytest.mark.parametrize("attend", ["by_block", "by_warp"])
@pytest.mark.parametrize("variant", AT_ONCE)
def test_results_that_are_merged_in_several_steps_never_err(ranks: Ranks, variant: str, attend: str) -> None:
    """More words than a program polls at once: eight heads of sixteen splits."""
    problem = FlashDecode(2, 32, 4, 128, 4099, "bf16", WORLD)
    run(ranks, problem, default_with(problem, variant, heads=problem.group, attend=attend))


@pytest.mark.parametrize("output", ["replicated", "head_scatter"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("variant", AT_ONCE)
def test_several_pieces_that_are_sent_at_once_never_err(ranks: Ranks, variant: str, parts: int, output: str) -> None:
    """KV heads that are not split, more of them than programs."""
    problem = FlashDecode(67, 32, 8, 128, 613, "bf16", WORLD, output)
    run(ranks, problem, default_with(problem, variant, splits=1, block_s=64, parts=parts, heads=problem.group))


@pytest.mark.parametrize("variant", AT_ONCE)
@pytest.mark.parametrize("parts", [1, 2])
def test_two_programs_on_each_processor_never_err(ranks: Ranks, variant: str, parts: int) -> None:
    problem = FlashDecode(2, 32, 4, 128, 16411, "bf16", WORLD)
    small: dict[str, Value] = {"block_s": 32, "num_warps": 2, "num_stages": 3, "splits": 32}
    run(ranks, problem, default_with(problem, variant, parts=parts, per_processor=2, **small))


@pytest.mark.parametrize("products", ["one", "two", "each"])
@pytest.mark.parametrize("comm", [0, 1, 8, 64])
def test_every_way_of_sending_to_the_vendors_products_never_errs(ranks: Ranks, products: str, comm: int) -> None:
    run(ranks, PROBLEMS[0], Config.of("decomposed", products=products, comm=comm, warm=0))


@pytest.mark.parametrize("rows", [3, 301, 4096])
def test_the_last_shard_in_pieces_never_errs(ranks: Ranks, rows: int) -> None:
    problem = AllGatherGemm(rows, 777, 1032, "bf16", "m", WORLD)
    run(ranks, problem, Config.of("decomposed", products="halves", comm=0, warm=0))


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_tiles_in_parts_and_across_shards_never_err(ranks: Ranks, across: int, splits: int) -> None:
    usual = space_for(PROBLEMS[0], detect()).default("push").values
    unusual = {"block_m": 64, "block_n": 64, "k_groups": 8, "splits": splits, "across": across}
    run(ranks, PROBLEMS[0], Config.of("push", usual | unusual))


def test_tiles_that_are_dealt_out_in_part_never_err(ranks: Ranks) -> None:
    usual = space_for(PROBLEMS[0], detect()).default("push").values
    run(ranks, PROBLEMS[0], Config.of("push", usual | {"block_m": 16, "block_n": 32, "comm": 64}))


@pytest.mark.parametrize("variant", ["copy_engine", "pull", "push", "push_two_kernel"])
def test_tiles_of_two_products_never_err(ranks: Ranks, variant: str) -> None:
    """320 columns are 256 and 64 side by side."""
    two: dict[str, Value] = {"block_m": 128, "block_n": 320, "block_k": 64, "num_warps": 8, "num_stages": 3}
    problem = AllGatherGemm(301, 777, 1032, "bf16", "m", WORLD)
    if "splits" in space_for(problem, detect()).variants[variant].parameters:
        two["splits"] = 1
    run(ranks, problem, default_with(problem, variant, **two))


@pytest.mark.parametrize(
    ("rows", "tile"), [(64, (128, 224, 4)), (128, (64, 192, 4)), (768, (128, 320, 3)), (768, (256, 192, 3))]
)
@pytest.mark.parametrize("by_words", [0, 256])
def test_warps_with_roles_never_err(ranks: Ranks, rows: int, tile: tuple[int, int, int], by_words: int) -> None:
    """Every program sends; the first tiles lie across shards. More of them where ranks share one GPU: test_one_gpu.py."""
    problem = AllGatherGemm(rows * WORLD, 776, 1032, "bf16", "m", WORLD)
    sides: dict[str, Value] = dict(zip(("block_m", "block_n", "num_stages"), tile, strict=True))
    run(ranks, problem, default_with(problem, "push_specialized", k_groups=2, by_words=by_words, **sides))


@pytest.mark.parametrize(("rows", "block_m", "block_n"), [(4, 16, 64), (25, 64, 80), (64, 128, 112)])
def test_few_rows_by_words_never_err(ranks: Ranks, rows: int, block_m: int, block_n: int) -> None:
    problem = AllGatherGemm(rows * WORLD, 776, 1024, "bf16", "m", WORLD)
    run(ranks, problem, default_with(problem, "push_words", block_m=block_m, block_n=block_n, num_stages=3, k_groups=4))


@pytest.mark.parametrize(
    ("scales", "rows", "tile"),
    [
        ("row", 64, (128, 160, 4, 256)),
        ("row", 256, (128, 256, 3, 128)),
        ("row", 128, (128, 128, 3, 128)),
        ("block", 128, (128, 128, 5, 128)),
        ("block", 128, (128, 128, 5, 256)),
        ("block", 192, (64, 64, 4, 256)),
        ("tensor", 192, (64, 112, 4, 256)),
        ("row", 256, (128, 256, 4, 0)),
        ("tensor", 64, (128, 160, 4, 0)),
    ],
)
def test_warps_with_roles_that_multiply_codes_never_err(
    ranks: Ranks, scales: str, rows: int, tile: tuple[int, int, int, int]
) -> None:
    problem = AllGatherGemm(rows * WORLD, 784, 1280, "e4m3", "m", WORLD, scales=scales, accumulate=ACCUMULATE[tile[-1] == 0])
    sides: dict[str, Value] = dict(zip(("block_m", "block_n", "num_stages", "strip"), tile, strict=True))
    run(ranks, problem, default_with(problem, "scaled_specialized", k_groups=2, **sides))


@pytest.mark.parametrize("adds", ["warps", "epilogue", "warps ahead"])
@pytest.mark.parametrize("tile", [(64, 128, 5), (64, 256, 4), (128, 128, 4), (128, 256, 4)])
def test_warps_with_roles_that_send_sums_never_err(ranks: Ranks, tile: tuple[int, int, int], adds: str) -> None:
    problem = GemmReduceScatter(301, 784, 1032, "bf16", "scattered", WORLD)
    run(ranks, problem, default_with(problem, "push_specialized", **adding(adds, tile)))


@pytest.mark.parametrize("adds", ["warps", "epilogue", "warps ahead"])
@pytest.mark.parametrize(
    ("scales", "k", "tile"),
    [
        ("row", 1280, (64, 128, 5)),
        ("row", 1280, (64, 256, 4)),
        ("row", 1280, (128, 256, 4)),
        ("block", 1152, (64, 128, 5)),
        ("block", 1152, (128, 128, 4)),
        ("block", 1280, (64, 128, 5)),
        ("block", 1280, (128, 128, 4)),
    ],
)
def test_warps_with_roles_that_send_sums_of_codes_never_err(
    ranks: Ranks, scales: str, k: int, tile: tuple[int, int, int], adds: str
) -> None:
    if tile[:2] == (128, 256) and adds != "epilogue":
        pytest.skip("such a tile leaves no registers to warps that add")
    if scales == "block" and k == 1280 and adds != "epilogue":
        pytest.skip("two products in flight leave no registers to warps that add")
    problem = GemmReduceScatter(301, 784, k, "e4m3", "scattered", WORLD, scales=scales)
    run(ranks, problem, default_with(problem, "scaled_specialized", **adding(adds, tile)))


@pytest.mark.parametrize("tile", [(64, 128, 5), (64, 256, 4), (128, 128, 4), (128, 256, 4)])
def test_warps_with_roles_that_send_fast_sums_never_err(ranks: Ranks, tile: tuple[int, int, int]) -> None:
    problem = GemmReduceScatter(301, 784, 1280, "e4m3", "scattered", WORLD, scales="row", accumulate="fast")
    run(ranks, problem, default_with(problem, "scaled_specialized", **sides_of(tile), strip=0))


@pytest.mark.parametrize("adds", ["warps", "warps ahead"])
@pytest.mark.parametrize(
    ("dtype", "more", "tile"),
    [
        *(("fp16", {}, tile) for tile in [(64, 128, 5), (64, 256, 4), (128, 128, 4), (128, 256, 4)]),
        ("e4m3", {"scales": "row"}, (64, 256, 4)),
        ("e4m3", {"scales": "row", "accumulate": "fast"}, (128, 128, 4)),
        ("e4m3", {"scales": "block"}, (128, 128, 4)),
    ],
)
def test_warps_with_roles_that_send_tiles_to_all_ranks_never_err(
    ranks: Ranks, dtype: str, more: dict[str, str], tile: tuple[int, int, int], adds: str
) -> None:
    problem = GemmReduceScatter(301, 784, 1152, dtype, "replicated", WORLD, **more)
    changes = {name: value for name, value in adding(adds, tile).items() if name != "adds"}
    run(ranks, problem, default_with(problem, "push_one_shot" if dtype == "fp16" else "scaled_push_one_shot", **changes))


@pytest.mark.parametrize("output", ["replicated", "scattered"])
@pytest.mark.parametrize(("scales", "rows"), [("row", 64), ("block", 129), ("tensor", 5), ("none", 129)])
@pytest.mark.parametrize(("tile", "splits"), [("64x64x12x8x2", 1), ("64x128x6x8x1", 3), ("128x64x8x8x2", 1)])
def test_warps_with_roles_that_send_words_never_err(
    ranks: Ranks, scales: str, rows: int, tile: str, splits: int, output: str
) -> None:
    dtype = "fp16" if scales == "none" else "e4m3"
    problem = GemmReduceScatter(rows, 784, 1280, dtype, output, WORLD, scales=scales)
    run(ranks, problem, by_words(problem, default_with, tile, splits))


def sides_of(tile: tuple[int, int, int]) -> dict[str, Value]:
    return dict(zip(("block_m", "block_n", "num_stages"), tile, strict=True))


def adding(adds: str, tile: tuple[int, int, int]) -> dict[str, Value]:
    """A tile, and who adds its sums up and how these warps poll."""
    return {**sides_of(tile), "adds": adds.split()[0], "polls": "ahead" if adds == "warps ahead" else "piece"}


@pytest.mark.parametrize("strip", [128, 256])
def test_sums_of_codes_of_one_sign_are_within_the_limit(ranks: Ranks, strip: int) -> None:
    problem = AllGatherGemm(128 * WORLD, 784, 16384, "e4m3", "m", WORLD, scales="row")
    config = default_with(problem, "scaled_specialized", block_m=128, block_n=128, num_stages=4, strip=strip)
    assert max(ranks.run(conformance.error_of_one_sign, problem, config, timeout=120)) <= TOLERANCE[problem.out_dtype]


@pytest.mark.parametrize(
    ("scales", "rows", "block_m", "block_n"), [("row", 4, 16, 64), ("block", 25, 64, 128), ("row", 64, 128, 112)]
)
def test_few_rows_of_codes_by_words_never_err(ranks: Ranks, scales: str, rows: int, block_m: int, block_n: int) -> None:
    problem = AllGatherGemm(rows * WORLD, 784, 2048, "e4m3", "m", WORLD, scales=scales)
    run(ranks, problem, default_with(problem, "scaled_push_words", block_m=block_m, block_n=block_n, num_stages=3, k_groups=4))


def wrong_bytes(world: World, problem: Problem, config: Config) -> int:
    """Codes and scales of the gathered A of a call that are not those of the shards."""
    _, kernel = conformance.ready(world, problem, config)
    call = make_inputs(problem, 0, world.rank, world.device)
    kernel(*call.tensors, call.out)
    codes, scales = gathered_codes(kernel, call.tensors[0], call.tensors[2])
    shards = [make_inputs(problem, 0, rank, world.device).tensors for rank in range(world.size)]
    bits, right = codes.view(torch.uint8), torch.cat([shard[0].view(torch.uint8) for shard in shards])
    of_all = torch.cat([shard[2].view(-1) for shard in shards])
    return int((bits != right).sum() + (scales.reshape(-1) != of_all).sum())


@pytest.mark.parametrize("variant", ["scaled_specialized", "scaled_push_words"])
def test_callers_get_the_gathered_codes(ranks: Ranks, variant: str) -> None:
    problem = AllGatherGemm(64 * WORLD, 784, 1152, "e4m3", "m", WORLD, scales="row")
    assert ranks.run(wrong_bytes, problem, default_with(problem, variant), timeout=120) == [0] * WORLD


@pytest.mark.parametrize("scales", ["row", "block"])
def test_two_programs_on_each_processor_that_multiply_codes_never_err(ranks: Ranks, scales: str) -> None:
    problem = AllGatherGemm(97, 784, 1152, "e4m3", "m", WORLD, scales=scales)
    small: dict[str, Value] = {"product": "64x64x6x4", "splits": 4, "per_processor": 2}
    run(ranks, problem, default_with(problem, "scaled_packets", **small))


def test_a_product_that_finds_b_in_the_l2_never_errs(ranks: Ranks) -> None:
    run(ranks, PROBLEMS[0], Config.of("decomposed", products="one", comm=8, warm=8))


def default_with(problem: Problem, variant: str, **changes: Value) -> Config:
    """The default config with changes, if the machine has the variant."""
    space = space_for(problem, detect())
    if variant not in space.variants:
        pytest.skip(f"{variant} is not for these GPUs")
    config = Config.of(variant, space.default(variant).values | changes)
    assert config in space
    return config


def run(ranks: Ranks, problem: Problem, config: Config) -> None:
    for worst, wrong in ranks.run(conformance.replay, problem, config, REPLAYS, timeout=120):
        assert worst <= TOLERANCE[problem.out_dtype]
        assert wrong == 0
