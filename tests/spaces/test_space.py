"""Spaces: the configs they admit, the reasons for refusals, and the first configs of a search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.tiling import ProductTile
from autotax.operators.problems import AllGatherGemm, FlashDecode, GatherAttention, GemmReduceScatter
from autotax.spaces import Space, scaled, space_for
from tests.spaces.drawing import CPU, H200, HARDWARE, MI300X, configs, problems

GEMM = AllGatherGemm(40, 70, 90, "bf16", "m", 4)
DECODE = FlashDecode(2, 6, 2, 80, 400, "bf16", 2)
EXTREMES: list[Problem] = [
    AllGatherGemm(1, 1, 1),
    AllGatherGemm(1, 1, 64, "fp32", "k", 64),
    AllGatherGemm(1, 2**31 - 1, 1, world_size=64),
    AllGatherGemm(2**31 - 1, 2**31 - 1, 2**31 - 1, "fp32", world_size=8),
    AllGatherGemm(2**31 - 1, 1, 8 * 10**8, "fp16", "k", 8),
    FlashDecode(1, 1, 1, 1, 1),
    FlashDecode(1, 1, 1, 256, 1, "fp32", 64),
    FlashDecode(65535, 4096, 1, 256, 2**31 - 1, "fp32", 8),
    FlashDecode(65535, 4096, 4096, 256, 2**31 - 1, "bf16", 1),
    FlashDecode(1, 512, 1, 256, 2**31 - 1, "bf16", 1),
]
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@pytest.mark.parametrize("hardware", HARDWARE, ids=str)
@pytest.mark.parametrize("problem", EXTREMES, ids=str)
def test_every_variant_has_a_default_whatever_the_shape(problem: Problem, hardware: Hardware) -> None:
    space = space_for(problem, hardware)
    for variant in space.variants:
        assert space.default(variant) in space


@pytest.mark.parametrize(("m", "chunks"), [(8192, {4096, 2048}), (2048, {1024})])
def test_large_shards_are_seeded_in_halves_too(m: int, chunks: set[int]) -> None:
    seeds = space_for(AllGatherGemm(m, 1536, 4096, "bf16", "m", 2), H200).variants["copy_engine"].seeds
    assert {seed["chunk_rows"] for seed in seeds} == chunks


@settings(relaxed, max_examples=60)
@given(problem=problems, hardware=st.sampled_from(HARDWARE))
def test_seeds_are_admitted_and_unique_and_defaults_come_first(problem: Problem, hardware: Hardware) -> None:
    space = space_for(problem, hardware)
    seeds = space.seeds()
    assert all(space.why_not(seed) is None for seed in seeds)
    assert len(set(seeds)) == len(seeds)
    assert seeds[: len(space.variants)] == [space.default(variant) for variant in space.variants]
    assert next(iter(space.variants)) == "bsp"


@pytest.mark.parametrize("hardware", [H200, MI300X], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_each_variant_begins_with_a_seed_that_fits_the_machine(hardware: Hardware, dtype: str) -> None:
    """The first seed is not the first config of the space, which is the smallest."""
    for problem in (AllGatherGemm(2048, 7168, 8192, dtype, "m", 8), FlashDecode(8, 64, 8, 128, 32768, dtype, 8)):
        for variant in space_for(problem, hardware).variants.values():
            assert any(variant.why_not(seed) is None for seed in variant.seeds), variant.variant


def test_pipelines_may_fill_the_shared_memory_of_an_amd_gpu() -> None:
    """There a pipeline keeps one block fewer than it has stages (test_compile compiles to that), and wavefronts are of 64."""
    space = space_for(AllGatherGemm(2048, 7168, 8192, "bf16", "m", 8), MI300X)
    usual = space.default("push").values | {"block_n": 256, "block_k": 64, "num_warps": 8, "splits": 1}
    assert space.why_not(Config.of("push", usual | {"block_m": 128, "num_stages": 2})) is None
    assert "shared memory" in str(space.why_not(Config.of("push", usual | {"block_m": 128, "num_stages": 3})))
    assert space.why_not(Config.of("push", usual | {"block_m": 256, "block_k": 32, "num_stages": 2})) is None


@pytest.mark.parametrize(
    ("problem", "saves"),
    [
        (AllGatherGemm(2048, 2560, 8192), True),  # 128 tiles of 320 columns are one wave, 160 of 256 two
        (AllGatherGemm(512, 7168, 8192), False),  # 112 tiles are one wave already
        (AllGatherGemm(8192, 7168, 8192), False),
        (AllGatherGemm(2048, 256, 8192), False),
    ],
    ids=str,
)
def test_tiles_of_two_products_are_tried_first_where_they_save_a_wave(problem: AllGatherGemm, saves: bool) -> None:
    space = space_for(problem, H200)
    default = space.default("copy_engine")
    assert (default["block_n"] == 320) is saves and (default["splits"] == 1 or not saves)
    assert space.default("push")["block_n"] != 320, "128 tiles leave four processors to send"


@pytest.mark.parametrize(
    ("m", "n", "k", "splits"), [(2048, 1536, 4096, 1), (1024, 2560, 8192, 1), (1024, 7168, 8192, 1), (2048, 2560, 8192, 1)]
)
def test_tiles_are_cut_where_that_was_measured_to_pay_and_both_ways_are_tried(m: int, n: int, k: int, splits: int) -> None:
    """A wave that 80 to 112 tiles fill in part is worth more than four times as many parts; so are two of tiles half the size."""
    space = space_for(AllGatherGemm(m, n, k, "bf16", "m", 4), H200)
    assert space.default("push")["splits"] == splits
    tried = {seed["splits"] == 1 for seed in space.variants["push"].seeds}
    assert tried == {True, False}


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [(512, 7168, 8192, (128, 256)), (2048, 1536, 4096, (128, 256)), (2048, 2560, 8192, (128, 128)), (512, 1536, 4096, (64, 128))],
)
def test_the_first_tiles_leave_few_processors_idle(m: int, n: int, k: int, tile: tuple[int, int]) -> None:
    """For each measured problem, the first tile is the one that was fastest."""
    first = space_for(AllGatherGemm(m, n, k, "bf16", "m", 4), H200).default("push")
    assert (first["block_m"], first["block_n"]) == tile


@pytest.mark.parametrize("m", [2048, 16384])
def test_the_first_tiles_on_amd_are_the_largest(m: int) -> None:
    first = space_for(AllGatherGemm(m, 7168, 8192, "bf16", "m", 8), MI300X).default("push")
    assert (first["block_m"], first["block_n"]) == (256, 256)


@pytest.mark.parametrize(("batch", "several"), [(1, False), (8, False), (16, False), (32, True), (64, True)])
@pytest.mark.parametrize("variant", ["resident", "compact"])
def test_two_programs_a_processor_are_tried_early(variant: str, batch: int, several: bool) -> None:
    """On whole pieces where each has several of them, or else on halves."""
    space = space_for(FlashDecode(batch, 64, 8, 128, 8192, "bf16", 4), H200)
    first, second, *_ = space.variants[variant].seeds
    assert (first["per_processor"], second["per_processor"]) == (1, 2)
    assert second["splits"] == (1 if several else 2) * int(first["splits"])


@pytest.mark.parametrize(("dtype", "scales", "variant"), [("bf16", "none", "decomposed"), ("e4m3", "row", "scaled_decomposed")])
@pytest.mark.parametrize(("m", "world_size", "apart"), [(1, 2, False), (2, 2, True), (9, 4, False), (10, 4, True), (16, 8, True)])
def test_ranks_multiply_their_own_rows_apart_only_where_all_have_some(
    dtype: str, scales: str, variant: str, m: int, world_size: int, apart: bool
) -> None:
    space = space_for(AllGatherGemm(m, 512, 512, dtype, "m", world_size, scales=scales), H200).variants[variant]
    assert (set(space.parameters["products"]) > {"one"}) == apart
    assert apart or {seed["products"] for seed in space.seeds} == {"one"}


@pytest.mark.parametrize(
    ("scales", "k", "strips"),
    [(scales, k, strips) for scales in ("row", "tensor", "block") for k, strips in ((8192, (128, 256)), (1152, (128,)))],
)
def test_groups_multiply_strips_as_wide_as_k_and_registers_allow(scales: str, k: int, strips: tuple[int, ...]) -> None:
    """The widest strips come first, and wide tiles have room for them."""
    for problem in (
        AllGatherGemm(2048, 28672, k, "e4m3", "m", 2, scales=scales),
        GemmReduceScatter(2048, 8192, k, "e4m3", "scattered", 2, scales=scales),
    ):
        space = space_for(problem, H200).variants["scaled_specialized"]
        assert space.parameters["strip"] == strips and {seed["strip"] for seed in space.seeds[:3]} == {strips[-1]}
        if scales != "block":
            fast = space_for(replace(problem, accumulate="fast"), H200).variants["scaled_specialized"]  # type: ignore[type-var]
            assert fast.parameters["strip"] == (*strips, 0) and {seed["strip"] for seed in fast.seeds} == {0}


@pytest.mark.parametrize(
    ("rows", "n", "name", "splits"),
    [(128, 5120, "128x128x5x8", 3), (64, 5120, "64x64x6x4", 3), (128, 8192, "128x64x6x4", 1), (16, 8192, "16x128x6x4", 2)],
)
def test_parts_of_tiles_keep_processors_busy(rows: int, n: int, name: str, splits: int) -> None:
    """40, 80, 128 and 64 tiles for 132 processors."""
    assert scaled.splits_for(name, rows, n, H200) == splits


@pytest.mark.parametrize("scales", ["row", "block", "tensor"])
@pytest.mark.parametrize("k", [1152, 1280, 14336])
def test_tiles_by_warps_with_roles_fit_and_keep_their_buffers(scales: str, k: int) -> None:
    """Winners of one number of rows serve others, so all of up to 64 and all of more have the same tiles."""

    def tiles(rows: int) -> list[str]:
        problem = GemmReduceScatter(rows, 5120, k, "e4m3", "replicated", 2, scales=scales)
        assert not scaled.with_roles(problem, rows, replace(H200, target="cuda:100"))
        return [str(name) for name in scaled.with_roles(problem, rows, H200)]

    assert {*tiles(1)} == {*tiles(64)} < {*tiles(65)} == {*tiles(256)}
    for name in tiles(128):
        tile = ProductTile.of(name)
        turns = tile.turns
        assert tile.groups * turns <= 2 and tile.strips == (1 if k % 256 else tile.strips)
        assert turns == 1 or tile.stages % (turns * tile.strips) == 0
        sums = 4 * tile.rows * tile.columns if turns > 1 else 0
        assert (tile.rows + tile.columns) * 128 * tile.stages + 2 * tile.rows * 64 + sums <= H200.shared_memory
        assert scales != "block" or tile.columns in (64, 128)


def test_a_tile_with_strips_of_twice_the_columns_takes_twice_the_memory() -> None:
    assert scaled.shared_bytes("16x64x5x4x2") == scaled.shared_bytes("16x64x10x4")
    assert scaled.with_tiles({"product": "16x64x5x4x2"})["block_k"] == 2 * scaled.with_tiles({"product": "16x64x5x4"})["block_k"]
    problems = (GemmReduceScatter(16, 8192, 4096, "e4m3", "replicated", 2, scales=scales) for scales in ("row", "block"))
    row, block = (scaled.tiles(problem, problem.m, H200) for problem in problems)
    assert row[0] == "16x64x5x4x2" and not any(name.count("x") > 3 for name in block)


def test_tiles_of_two_products_are_not_cut_into_parts() -> None:
    space = space_for(AllGatherGemm(2048, 2560, 8192), H200)
    config = Config.of("push", space.default("push").values | {"block_n": 320, "num_warps": 8, "num_stages": 3, "splits": 2})
    assert "not cut into parts" in str(space.why_not(config))


@settings(relaxed, max_examples=60)
@given(data=st.data(), problem=problems, hardware=st.sampled_from(HARDWARE))
def test_neighbours_differ_in_one_parameter_and_know_each_other(
    data: st.DataObject, problem: Problem, hardware: Hardware
) -> None:
    space = space_for(problem, hardware)
    config = data.draw(configs(space))
    near = space.neighbours(config)
    assert len(set(near)) == len(near) and config not in near
    for neighbour in near:
        assert neighbour in space and config in space.neighbours(neighbour)
        assert sum(neighbour[name] != value for name, value in config.params) == 1


@pytest.mark.parametrize("problem", [GEMM, DECODE], ids=str)
def test_enumeration_count_and_membership_agree(problem: Problem) -> None:
    space = space_for(problem, CPU)
    listed = list(space)
    assert len(listed) == len(set(listed)) == space.count
    points = [Config.of(v, values) for v in space.variants for values in _grid(space, v)]
    assert {point for point in points if point in space} == set(listed)


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (AllGatherGemm(2048, 4096, 4096), "pull"),
        pytest.param(FlashDecode(1, 64, 8, 128, 9000), "single", marks=pytest.mark.volume),
    ],
    ids=str,
)
def test_constraints_cut_the_grid(problem: Problem, variant: str) -> None:
    """On a machine where constraints apply, the listed configs are the admitted ones."""
    space = space_for(problem, H200).only([variant])
    points = [Config.of(variant, values) for values in _grid(space, variant)]
    assert {point for point in points if point in space} == set(space)
    assert space.count < len(points)


def _grid(space: Space, variant: str) -> list[dict[str, int | str]]:
    parameters = space.variants[variant].parameters
    return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]


@settings(relaxed, max_examples=40)
@given(data=st.data())
def test_a_fixed_trial_gives_back_the_config(data: st.DataObject) -> None:
    space = space_for(data.draw(problems), data.draw(st.sampled_from(HARDWARE)))
    config = data.draw(configs(space))
    assert space.suggest(optuna.trial.FixedTrial(space.as_suggestion(config))) == config


@pytest.mark.parametrize("problem", [GEMM, DECODE], ids=str)
def test_an_enqueued_seed_is_asked_for(problem: Problem) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = space_for(problem, H200)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seeds = space.seeds()
    for seed in seeds:
        study.enqueue_trial(space.as_suggestion(seed))
    assert [space.suggest(study.ask()) for _ in seeds] == seeds


def test_a_suggestion_has_the_parameters_of_its_variant_only() -> None:
    space = space_for(GEMM, H200)
    asked = optuna.trial.FixedTrial(space.as_suggestion(space.default("pull")))
    assert space.suggest(asked).variant == "pull"
    assert all(name == "variant" or name.startswith("pull.") for name in asked.distributions)


def test_only_keeps_the_order_and_the_configs_of_variants() -> None:
    space = space_for(GEMM, H200)
    some = space.only(["push", "bsp"])
    assert list(some.variants) == ["bsp", "push"]
    assert some.default("push") == space.default("push")
    assert some.why_not(space.default("pull")) == "the variant is pull; allowed are bsp, push"


def test_only_refuses_unknown_variants_in_one_line() -> None:
    with pytest.raises(UsageError) as error:
        space_for(GEMM, H200).only(["push", "pusch", "fused"])
    message = str(error.value)
    assert "\n" not in message
    assert "pusch, fused" in message
    assert "bsp, decomposed, copy_engine, pull, push, push_two_kernel" in message
    assert "--variants" in message


@pytest.mark.parametrize(
    ("problem", "variant", "change", "message"),
    [
        (AllGatherGemm(8192, 8192, 8192), "pull", {"block_m": 256, "block_n": 256, "num_warps": 4}, "registers"),
        (
            AllGatherGemm(8192, 8192, 8192), "pull",
            {"block_m": 128, "block_n": 256, "block_k": 128, "num_stages": 5, "num_warps": 8}, "shared memory",
        ),
        (AllGatherGemm(8192, 8192, 8192, "fp32"), "pull", {"block_m": 128, "block_n": 128}, "registers"),
        (AllGatherGemm(2048, 8192, 8192, "e4m3", scales="row"), "scaled_specialized",
         {"block_m": 128, "block_n": 256, "num_stages": 3, "strip": 256}, "too few stages"),
        (FlashDecode(1, 64, 1, 256, 8192), "single", {"block_s": 64, "num_warps": 2, "num_stages": 2}, "registers"),
        (FlashDecode(1, 8, 8, 128, 4096), "fused", {"block_s": 64, "splits": 128, "num_warps": 4}, "block of tokens"),
        (FlashDecode(1, 8, 8, 128, 4096), "fused", {"attend": "by_warp", "block_s": 64, "num_warps": 8}, "too few tokens"),
    ],
)  # fmt: skip
def test_why_not_names_the_constraint_and_the_values(
    problem: Problem, variant: str, change: dict[str, int], message: str
) -> None:
    space = space_for(problem, H200)
    config = Config.of(variant, space.default(variant).values | change)
    why = space.why_not(config)
    assert why
    assert message in why
    assert config not in space
    assert any(f"{name} {value}" in why for name, value in change.items())


def test_why_not_names_what_is_not_a_parameter_or_a_choice() -> None:
    space = space_for(GEMM, H200)
    default = space.default("pull")
    known = "bsp, decomposed, copy_engine, pull, push, push_two_kernel, torch_pipeline, nccl_ll, nccl_ll128"
    assert space.why_not(Config("fused")) == f"the variant is fused; allowed are {known}"
    assert (space.why_not(Config.of("pull", default.values, comm=3)) or "").startswith("pull takes block_m, ")
    assert space.why_not(Config.of("bsp", splits=3)) == "bsp takes no parameters"
    assert space.why_not(Config.of("pull", default.values | {"group_m": 3})) == "group_m is 3; allowed are 1, 4, 8"


@settings(relaxed, max_examples=30)
@given(problem=problems, hardware=st.sampled_from(HARDWARE))
def test_equal_arguments_give_equal_spaces(problem: Problem, hardware: Hardware) -> None:
    one, other = space_for(problem, hardware), space_for(problem, hardware)
    assert one.seeds() == other.seeds()
    for variant in one.variants:
        assert one.variants[variant].parameters == other.variants[variant].parameters
        configs_of = (space.variants[variant].configs() for space in (one, other))
        assert all(a == b for a, b in itertools.islice(zip(*configs_of, strict=True), 500))


@pytest.mark.parametrize(("ranks", "streams"), [(2, (1,)), (4, (1, 2)), (8, (1, 2, 4))])
def test_copies_of_keys_go_to_several_peers_at_once_where_there_are_several(ranks: int, streams: tuple[int, ...]) -> None:
    problem = GatherAttention(1, 32, 8, 128, 16384, "bf16", ranks, layout="zigzag")
    for hardware, variants in ((H200, ("decomposed", "copy_engine")), (MI300X, ("decomposed",)), (CPU, ("decomposed",))):
        space = space_for(problem, hardware)
        assert [space.variants[variant].parameters["streams"] for variant in variants] == [streams] * len(variants)
