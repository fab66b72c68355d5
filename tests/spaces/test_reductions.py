"""GEMM + Reduce-Scatter: no admitted config has a fault, and the model finds the faults that there could be."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotax.core.config import Config
from autotax.kernels import tiling
from autotax.operators.problems import GemmReduceScatter
from autotax.spaces import space_for
from autotax.spaces.gemm_reduce_scatter import time_of
from autotax.spaces.gemm_tiles import MOST_ROWS
from tests.models.plan import Task, faults
from tests.models.reduce_plan import check, cut_fault, reduce_plan, words_fault
from tests.spaces.drawing import CPU, H200, HARDWARE, MI300X, configs, reductions
from tests.volume import volume

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
SHAPES = [(8192, 7168), (8192, 2560), (4096, 1536), (7168, 768)]
"""n and k of row-parallel layers on each of four ranks."""


@pytest.mark.parametrize("examples", [100, *volume(300)])
def test_no_admitted_config_has_a_fault(examples: int) -> None:
    settings(relaxed, max_examples=examples)(given(st.data())(_has_no_fault))()


def _has_no_fault(data: st.DataObject) -> None:
    problem, hardware = data.draw(reductions()), data.draw(st.sampled_from(HARDWARE))
    assert check(problem, data.draw(configs(space_for(problem, hardware)))) is None


@settings(relaxed, max_examples=150)
@given(st.data())
def test_no_config_of_words_has_a_fault(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    m, n = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 150))
    output, dtype = data.draw(st.sampled_from(("scattered", "replicated"))), data.draw(st.sampled_from(("bf16", "fp32")))
    space = space_for(GemmReduceScatter(m, n, 300, dtype, output, world), H200)
    assert check(space.problem, data.draw(configs(space.only(["bsp", "words"])))) is None  # type: ignore[arg-type]


@settings(relaxed, max_examples=100)
@given(st.data())
def test_no_config_of_warps_with_roles_has_a_fault(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 8))
    m, n = data.draw(st.integers(1, 1200)), 8 * data.draw(st.integers(1, 150))
    output, variant = data.draw(st.sampled_from((("scattered", "push_specialized"), ("replicated", "push_one_shot"))))
    space = space_for(GemmReduceScatter(m, n, 64, "bf16", output, world), H200)
    if variant in space.variants:
        assert check(space.problem, data.draw(configs(space.only(["bsp", variant])))) is None  # type: ignore[arg-type]


def test_warps_with_roles_are_for_hopper_and_for_what_it_loads_by_boxes() -> None:
    usual = GemmReduceScatter(2048, 8192, 2560, "bf16", "scattered", 4)
    assert "push_specialized" in space_for(usual, H200).variants
    assert "push_specialized" not in space_for(usual, MI300X).variants
    for other in ({"output": "replicated"}, {"weight": "kn"}, {"dtype": "fp32"}, {"n": 8196}, {"k": 2500}, {"world_size": 16}):
        assert "push_specialized" not in space_for(dataclasses.replace(usual, **other), H200).variants  # type: ignore[arg-type]


def test_one_trip_of_tiles_is_for_many_rows_on_all_ranks() -> None:
    usual = GemmReduceScatter(2048, 8192, 2560, "bf16", "replicated", 2)
    assert "push_one_shot" in space_for(usual, H200).variants
    for other in ({"output": "scattered"}, {"m": 127}, {"weight": "kn"}, {"dtype": "fp32"}, {"world_size": 1}, {"world_size": 8}):
        assert "push_one_shot" not in space_for(dataclasses.replace(usual, **other), H200).variants  # type: ignore[arg-type]
    for scales, tiles in ("row", {(64, 128), (64, 256), (128, 128)}), ("block", {(64, 128), (128, 128)}):
        space = space_for(dataclasses.replace(usual, dtype="e4m3", scales=scales), H200).variants["scaled_push_one_shot"]
        assert {(seed["block_m"], seed["block_n"]) for seed in space.seeds} == tiles


@pytest.mark.parametrize("m", [16, 64, 256, 512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_seeds_of_warps_with_roles_fill_shared_memory(m: int, n: int, k: int) -> None:
    space = space_for(GemmReduceScatter(m, n, k, "bf16", "scattered", 4), H200)
    seeds = space.variants["push_specialized"].seeds
    assert len(seeds) >= 4
    for seed in seeds:
        assert seed in space
        assert Config.of(seed.variant, seed.values | {"num_stages": int(seed["num_stages"]) + 1}) not in space


@pytest.mark.sampled(by=lambda output, m, **_: {"output": output, "m": m})
@pytest.mark.parametrize("hardware", HARDWARE, ids=str)
@pytest.mark.parametrize("m", [3, 64, 100])
@pytest.mark.parametrize("output", ["scattered", "replicated"])
def test_no_seed_has_a_fault(output: str, m: int, hardware: object) -> None:
    for n, k in SHAPES[2:]:
        problem = GemmReduceScatter(m, n, k, "bf16", output, 4)
        for config in space_for(problem, hardware).seeds():  # type: ignore[arg-type]
            assert check(problem, config) is None, config


@pytest.mark.parametrize("m", [16, 64, 256, 512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_seeds_are_many_and_admitted_the_quickest_first_and_of_several_tiles(m: int, n: int, k: int) -> None:
    problem = GemmReduceScatter(m, n, k, "bf16", "scattered", 4)
    space = space_for(problem, H200)
    for variant in ("push", "pull_reduce"):
        seeds = space.variants[variant].seeds
        assert len(seeds) >= 5
        assert all(space.why_not(seed) is None for seed in seeds)
        times = [time_of(problem, H200, seed) for seed in seeds]
        assert times[0] == min(times)
        assert len({(seed["block_m"], seed["block_n"]) for seed in seeds}) >= 2
    assert ("words" in space.variants) == (m <= MOST_ROWS)


def test_few_rows_go_by_words_and_many_do_not() -> None:
    for hardware in (H200, MI300X, CPU):
        assert "words" in space_for(GemmReduceScatter(16, 4096, 1536, "bf16", "replicated", 4), hardware).variants
        assert "words" not in space_for(GemmReduceScatter(4096, 4096, 1536, "bf16", "replicated", 4), hardware).variants


def test_float32_is_sent_as_float32_and_16_bits_as_either() -> None:
    for dtype, sent in (("fp32", {"fp32"}), ("bf16", {"bf16", "fp32"}), ("fp16", {"fp16", "fp32"})):
        space = space_for(GemmReduceScatter(64, 4096, 1536, dtype, "scattered", 4), H200)
        for variant in ("push", "pull_reduce", "words"):
            assert set(space.variants[variant].parameters["payload"]) == sent


# Faults

PUSHED = GemmReduceScatter(70, 100, 64, "bf16", "replicated", 3)
PUSH = Config.of(
    "push", block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2, group_m=4, loads="pointer", splits=1, order="ring",
    payload="bf16", adders=0, flag_tiles=2, signals="late", flat=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a tile nobody sends", "never"),
        ("a tile nobody waits for", "too few waits"),
        ("a rank that adds before it sends", "cannot be signalled before"),
        ("sums nobody takes", "never waits"),
    ],
)
def test_faults_are_found(what: str, message: str) -> None:
    plan = reduce_plan(PUSHED, PUSH)
    own = list(plan.tasks[1])
    if what == "a tile nobody sends":
        own.pop(0)
    elif what == "a tile nobody waits for":
        at = next(i for i, task in enumerate(own) if task.reads)
        own[at] = dataclasses.replace(own[at], waits=own[at].waits[1:])
    elif what == "a rank that adds before it sends":
        plan.tasks[:] = [sorted(tasks, key=lambda task: not task.waits) for tasks in plan.tasks]
        own = plan.tasks[1]
    else:
        own = [Task(rows=task.rows, columns=task.columns) if _takes_sums(task) else task for task in own]
    fault = faults(dataclasses.replace(plan, tasks=[plan.tasks[0], own, plan.tasks[2]]))
    assert message in str(fault)


def _takes_sums(task: Task) -> bool:
    return any(wait.flag[0] == "sums" for wait in task.waits)


def test_a_k_block_that_is_lost_is_found() -> None:
    config = Config.of("push", PUSH.values | {"splits": 2})
    assert cut_fault(PUSHED, config) is None
    with mock.patch.object(tiling, "last_block", lambda *of: of[3] - 1):
        assert "never" in str(cut_fault(PUSHED, config))


def test_words_that_come_to_the_wrong_place_are_found() -> None:
    problem = GemmReduceScatter(5, 70, 64, "bf16", "replicated", 2)
    config = Config.of("words", block_m=16, block_n=32, splits=1, payload="bf16", shots="two", block_k=32, group_m=1)
    assert words_fault(problem, config) is None
    with mock.patch("tests.models.reduce_plan.sent_cells", lambda *_: iter([(0, 0)])):
        assert "is sent 1 words" in str(words_fault(problem, config))
