"""The model of the kernels: no admitted config has a fault, and faults that others have shipped are found."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotax.core.config import Config
from autotax.core.problem import Problem, ceil_div
from autotax.kernels import tiling
from autotax.kernels import tiling as order
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.spaces import space_for
from autotax.spaces.gemm_tiles import MOST_ROWS
from tests.models import schedule as model
from tests.models.plan import Plan, Task, Wait, faults
from tests.models.schedule import attended, check, schedule, tokens
from tests.spaces.drawing import CPU, H200, HARDWARE, MI300X, configs, problems
from tests.volume import volume


def named(value: object) -> str:
    """The id of a case: as str, but for functions, whose address differs between processes that share the tests out."""
    return getattr(value, "__name__", str(value))


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@pytest.mark.parametrize("examples", [100, *volume(300)])
def test_no_admitted_config_has_a_fault(examples: int) -> None:
    settings(relaxed, max_examples=examples)(given(st.data())(_has_no_fault))()


def _has_no_fault(data: st.DataObject) -> None:
    problem, hardware = data.draw(problems), data.draw(st.sampled_from(HARDWARE))
    assert check(problem, data.draw(configs(space_for(problem, hardware)))) is None


@pytest.mark.sampled(by=lambda problem, hardware: {"op": problem.op, "backend": hardware.backend})
@pytest.mark.parametrize("hardware", HARDWARE, ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        AllGatherGemm(512, 7168, 8192, world_size=4),
        AllGatherGemm(509, 7168, 8192, shard="k", world_size=4),
        AllGatherGemm(9, 33, 100, world_size=8),
        FlashDecode(1, 64, 8, 128, 131072, world_size=4),
        FlashDecode(7, 96, 12, 128, 10007, world_size=3),
        FlashDecode(3, 96, 2, 128, 10007, world_size=4, output="head_scatter"),
    ],
    ids=str,
)
def test_no_seed_has_a_fault(problem: Problem, hardware: object) -> None:
    for config in space_for(problem, hardware).seeds():  # type: ignore[arg-type]
        assert check(problem, config) is None, config


@settings(relaxed, max_examples=200)
@given(block=st.sampled_from([16, 32, 64, 128, 256]), splits=st.integers(1, 128), length=st.integers(0, 20000))
def test_each_token_of_any_length_is_attended_once_in_whole_blocks(block: int, splits: int, length: int) -> None:
    spans = tokens(length, Config.of("bsp", block_s=block, splits=splits))
    attended = [token for first, last in spans for token in range(first, last)]
    assert attended == list(range(length))
    assert all(first % block == 0 for first, _ in spans)


@settings(relaxed, max_examples=200)
@given(
    heads=st.integers(1, 96), splits=st.integers(1, 64), dies=st.integers(1, 12),
    order=st.sampled_from(["item_first", "split_first"]),
)  # fmt: skip
def test_the_four_mappings_attend_every_piece_once_as_published(heads: int, splits: int, dies: int, order: str) -> None:
    problem = FlashDecode(1, heads, heads, 16, 4096)
    mapped = attended(problem, Config.of("bsp", splits=splits, order=order, chiplets=dies))
    assert sorted(mapped) == [(head, split) for head in range(heads) for split in range(splits)]
    if heads % dies == 0:  # where the published formulas hold
        for wid, (head, split) in enumerate(mapped):
            if order == "split_first":
                assert (head, split) == (wid % heads % dies * (heads // dies) + wid % heads // dies, wid // heads)
            else:
                expected = wid % dies * (heads // dies) + wid // (dies * splits), wid % (dies * splits) // dies
                assert (head, split) == expected


@given(sequences=st.integers(1, 9), share=st.integers(1, 12), world=st.integers(1, 8))
def test_rows_of_a_rank_stand_together_in_the_order_of_its_output(sequences: int, share: int, world: int) -> None:
    heads = share * world
    rows = sequences * heads
    placed = sorted(range(rows), key=lambda row: order.place(row, rows, heads, share))
    expected = [s * heads + rank * share + own for rank in range(world) for s in range(sequences) for own in range(share)]
    assert placed == expected


@settings(relaxed, max_examples=60)
@given(st.data())
def test_no_config_of_warps_with_roles_has_a_fault(data: st.DataObject) -> None:
    """Shards of whole boxes, which few problems drawn at random have."""
    world, boxes = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6))
    columns = data.draw(st.integers(1, 90)) * 8
    problem = AllGatherGemm(world * boxes * 64, data.draw(st.integers(1, 90)) * 8, columns, "bf16", "m", world)
    space = space_for(problem, H200)
    assert "push_specialized" in space.variants
    assert check(problem, data.draw(configs(space.only(["bsp", "push_specialized"])))) is None


@settings(relaxed, max_examples=40)
@given(st.data())
def test_no_config_of_few_rows_has_a_fault(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 8))
    rows = data.draw(st.integers(1, MOST_ROWS // world))
    n, k = data.draw(st.integers(1, 90)) * 8, data.draw(st.integers(1, 90)) * 8
    problem = AllGatherGemm(world * rows, n, k, "bf16", "m", world)
    space = space_for(problem, H200)
    assert "push_words" in space.variants
    assert check(problem, data.draw(configs(space.only(["bsp", "push_words"])))) is None


@settings(relaxed, max_examples=40)
@given(st.data())
def test_no_config_of_few_rows_without_roles_has_a_fault(data: st.DataObject) -> None:
    world, shard = data.draw(st.integers(1, 8)), data.draw(st.sampled_from("mk"))
    k = data.draw(st.integers(1, 90)) * 2 * (world if shard == "k" else 1)
    m, dtype = data.draw(st.integers(1, MOST_ROWS)), data.draw(st.sampled_from(("bf16", "fp32")))
    problem = AllGatherGemm(m, data.draw(st.integers(1, 700)), k, dtype, shard, world)
    space = space_for(problem, data.draw(st.sampled_from((MI300X, CPU))))
    assert "push_packets" in space.variants
    assert check(problem, data.draw(configs(space.only(["bsp", "push_packets"])))) is None


def test_a_usual_config_takes_milliseconds() -> None:
    problem = AllGatherGemm(512, 7168, 8192, world_size=4)
    for variant in space_for(problem, H200).variants:
        config = space_for(problem, H200).default(variant)
        assert min(_seconds(problem, config) for _ in range(3)) < 0.25


def _seconds(problem: Problem, config: Config) -> float:
    start = time.process_time()  # a busy machine takes none of it
    assert check(problem, config) is None
    return time.process_time() - start


# Known-bad configs, which `check` must find.

GEMM = AllGatherGemm(300, 200, 304, "bf16", "m", 3)
TILES = {"block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2, "group_m": 4, "loads": "tma"}
PUSH = Config.of("push", TILES, order="interleaved", chunk_rows=32, comm=2, k_groups=2, pieces=2, across=0, splits=1)
PIECES = {name: value for name, value in PUSH.values.items() if name not in ("across", "splits")}
TWO = Config.of("push_two_kernel", PIECES, beside=1)
PULL = Config.of("pull", TILES, order="ring")
COPY = Config.of("copy_engine", TILES, order="ring", chunk_rows=32, streams=2, splits=1)
ENGINES = Config.of("decomposed", products="two", comm=0, warm=0)
HALVES = Config.of("decomposed", products="halves", comm=0, warm=0)
PROGRAMS = Config.of("decomposed", products="each", comm=2, warm=0)
SHARDS = AllGatherGemm(768, 200, 328, "bf16", "m", 4)
"""Shards of whole boxes, and tiles that lie across shards."""
TILE = {"block_m": 64, "block_n": 128, "num_stages": 4, "group_m": 4, "order": "interleaved"}
ROLES = Config.of("push_specialized", TILE, chunk_rows=128, by_words=128, k_groups=2, boxes=1, pace=0)
ACROSS = Config.of("push_specialized", ROLES.values | {"block_m": 128})
FEW = AllGatherGemm(100, 200, 512, "bf16", "m", 4)
WORDS = Config.of("push_words", block_m=32, block_n=64, block_k=128, num_stages=4, k_groups=4)
PACKETS = Config.of("push_packets", TILES | {"group_m": 8}, splits=1, piece=1024)
DECODE = FlashDecode(3, 44, 11, 128, 3000, "bf16", 2)
SCATTER = dataclasses.replace(DECODE, output="head_scatter")
PIECES = {"attend": "by_block", "block_s": 32, "splits": 4}
ATTENTION = PIECES | {"num_warps": 4, "num_stages": 2, "order": "item_first", "chiplets": 8}
GATHER = Config.of("gather", ATTENTION, heads=2, senders=4)
FINE_GRAINED = Config.of("fine_grained", ATTENTION, heads=1, senders=2)
FUSED = Config.of("fused", ATTENTION, heads=2, protocol="flags", payload="packed")
SINGLE = Config.of("single", ATTENTION, heads=2, receivers=4, protocol="flags", payload="fp32")
RESIDENT = Config.of("resident", ATTENTION | {"chiplets": 1}, heads=4, parts=1, per_processor=1)
GEMMS = [PUSH, TWO, PULL, COPY, ENGINES, HALVES, PROGRAMS]
SOUND = [(GEMM, config) for config in GEMMS] + [(DECODE, config) for config in (GATHER, FINE_GRAINED, FUSED, SINGLE, RESIDENT)]
SOUND += [(SCATTER, config) for config in (GATHER, FUSED)] + [(SHARDS, config) for config in (ROLES, ACROSS)]
SOUND += [(FEW, WORDS), (FEW, PACKETS)]


@pytest.mark.parametrize(("problem", "config"), SOUND, ids=str)
def test_without_a_mutation_there_is_no_fault(problem: Problem, config: Config) -> None:
    hardware = CPU if isinstance(problem, AllGatherGemm) or config == RESIDENT else MI300X
    if config.variant in ("push_specialized", "push_words"):
        hardware = H200
    assert config in space_for(problem, hardware)
    assert check(problem, config) is None


def _group_of_fixed_height(tile: int, rows: int, cols: int, group: int) -> int:  # noqa: ARG001
    band, within = tile // (group * cols), tile % (group * cols)
    return (band * group + within % group) * cols + within // group


def _naive_chiplet(program: int, programs: int, chiplets: int) -> int:
    return (program % chiplets) * (programs // chiplets) + program // chiplets


def _naive_head_first(program: int, programs: int, chiplets: int) -> int:
    """A published fallback: whole heads a die, as if the dies divided the heads."""
    splits, heads = ATTENTION["splits"], programs // ATTENTION["splits"]  # type: ignore[operator]
    head = program % chiplets * (heads // chiplets) + program // (chiplets * splits)  # type: ignore[operator]
    return head * splits + program % (chiplets * splits) // chiplets  # type: ignore[operator]


def _last_chunk_dropped(unit: int, chunks: int, pieces: int, world: int, interleaved: int) -> int:
    what = ORDER["push_unit"](unit, chunks, pieces, world, interleaved)
    return what - pieces if what // pieces % chunks == chunks - 1 else what


def _sent_to_oneself(unit: int, chunks: int, pieces: int, world: int, interleaved: int) -> int:
    return ORDER["push_unit"](unit, chunks, pieces, world, interleaved) - chunks * pieces


def _first_source_twice(row: int, rows: int, world: int, interleaved: int) -> int:  # noqa: ARG001
    return rows + row % rows


def _heads_in_turn(row: int, rows: int, heads: int, share: int) -> int:
    """A bijection too, but ranks would own every so-many-th head."""
    ranks = heads // share
    return row % ranks * (rows // ranks) + row // ranks


def _of_one_sequence(row: int, rows: int, heads: int, share: int) -> int:  # noqa: ARG001
    return row // share * share % rows + row % share


def _strip_by_strip(number: int, rows: int, strips: int, chunk: int) -> int:  # noqa: ARG001
    """An order of strips that ignores chunks."""
    return number % (rows // 64) * 64


ORDER: dict[str, Callable[..., int]] = {name: getattr(order, name) for name in ("grouped", "push_unit", "remote_row")}
BAD_ORDERS: list[tuple[str, Callable[..., int], Problem, Config, str]] = [
    ("grouped", _group_of_fixed_height, GEMM, PULL, "output rows"),
    ("grouped", _group_of_fixed_height, GEMM, PUSH, "output rows"),
    ("remote_row", _first_source_twice, GEMM, COPY, "output rows"),
    ("push_unit", _last_chunk_dropped, GEMM, PUSH, "on its way to rank"),
    ("push_unit", _sent_to_oneself, GEMM, PUSH, "on its way to rank"),
    ("chiplet", _naive_chiplet, DECODE, FUSED, "pieces of the cache are never attended"),
    ("chiplet", _naive_chiplet, DECODE, SINGLE, "pieces of the cache are never attended"),
    ("chiplet", _naive_head_first, DECODE, SINGLE, "pieces of the cache are never attended"),
    ("place", _heads_in_turn, SCATTER, FUSED, "goes astray"),
    ("place", _of_one_sequence, SCATTER, FUSED, "goes astray"),
]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("box_row", _strip_by_strip, "on its way to rank"),
        ("box_strip", lambda number, *_: number % 3, "on its way to rank"),
        ("boxes_of", lambda group, *_: 6 - group, "signals a call"),
    ],
    ids=named,
)
def test_a_bad_order_of_boxes_is_found(name: str, bad: Callable[..., int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, name, bad)
    assert message in (check(SHARDS, ROLES) or "")


@pytest.mark.parametrize(("name", "bad", "problem", "config", "message"), BAD_ORDERS, ids=named)
def test_a_bad_order_is_found(
    name: str, bad: Callable[..., int], problem: Problem, config: Config, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, name, bad)
    fault = check(problem, config)
    assert fault
    assert message in fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    "bad",
    [
        lambda length, block, splits: length // block // splits * block,  # the rest is lost
        lambda length, block, splits: ceil_div(length, splits * block) * block - (block if length > 1000 else 0),
    ],
    ids=["rounded down", "too little of a long one"],
)
def test_bad_splits_are_found(bad: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "tokens_per_split", bad)
    assert "never" in (check(DECODE, FUSED) or "")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda rows, _: [(0, rows // 2), (rows // 2, rows - 1)], "never"),  # the last row is lost
        (lambda rows, _: [(0, rows // 2 + 1), (rows // 2, rows)], "more than once"),
    ],
    ids=["a gap", "an overlap"],
)
def test_bad_pieces_are_found(bad: Callable[..., list[tuple[int, int]]], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "last_pieces", bad)
    assert message in (check(GEMM, HALVES) or "")


# Mutations of a sound plan, each made on one task of one rank.


def _one_signal_more(task: Task) -> Task:
    return dataclasses.replace(task, sends=task.sends + task.sends[:1])


def _signal_lost(task: Task) -> Task:
    return dataclasses.replace(task, sends=task.sends[1:])


def _bare_signal(task: Task) -> Task:
    """Adds a signal without data."""
    return dataclasses.replace(task, sends=(*task.sends, dataclasses.replace(task.sends[0], span=(0, 0))))


def _wait_for_less(task: Task) -> Task:
    return dataclasses.replace(task, waits=tuple(dataclasses.replace(wait, signals=wait.signals - 1) for wait in task.waits))


def _wait_for_another(task: Task) -> Task:
    return dataclasses.replace(task, waits=(Wait(0, ("nobody", 7), 1), *task.waits))


def _read_unguarded(task: Task) -> Task:
    return dataclasses.replace(task, waits=())


def _never(_: Task) -> Task:
    return Task()


MUTATIONS: list[tuple[Callable[[Task], Task], str, str]] = [
    (_one_signal_more, "sends", "more than once|signals a call"),
    (_signal_lost, "sends", "never|signals a call"),
    (_bare_signal, "sends", "signals a call"),
    (_wait_for_less, "waits", "signals a call"),
    (_wait_for_another, "waits", "signals a call for nobody 7 of rank 0 and gets 0"),
    (_read_unguarded, "reads", "behind too few waits|never waits"),
    (_never, "columns", "never"),
]


@pytest.mark.parametrize(("problem", "config"), [case for case in SOUND if case[1] != COPY], ids=str)
@pytest.mark.parametrize(("mutate", "part", "message"), MUTATIONS, ids=named)
def test_a_mutated_plan_has_a_fault(
    mutate: Callable[[Task], Task], part: str, message: str, problem: Problem, config: Config
) -> None:
    plan = _mutated(schedule(problem, config), mutate, part)
    fault = faults(plan)
    assert fault
    assert re.search(message, fault)
    assert "\n" not in fault


def _mutated(plan: Plan, mutate: Callable[[Task], Task], part: str) -> Plan:
    """`mutate` on the first task of rank 1 that has such a part."""
    tasks = [list(of_rank) for of_rank in plan.tasks]
    index = min(i for i, task in enumerate(tasks[1]) if getattr(task, part))
    tasks[1][index] = mutate(tasks[1][index])
    return dataclasses.replace(plan, tasks=tasks)


@pytest.mark.parametrize(("problem", "config"), SOUND, ids=str)
def test_consumers_before_producers_are_found(problem: Problem, config: Config) -> None:
    """Where receivers had the low program ids, a rank that runs programs in turn would wait for itself."""
    plan = schedule(problem, config)
    backwards = dataclasses.replace(plan, tasks=[tasks[::-1] for tasks in plan.tasks])
    assert "cannot be signalled before" in (faults(backwards) or "")


def test_a_tile_computed_twice_is_found() -> None:
    plan = schedule(GEMM, PULL)
    last = plan.tasks[2].pop()
    twice = dataclasses.replace(plan, tasks=[*plan.tasks[:2], [*plan.tasks[2], last, last]])
    assert "more than once" in (faults(twice) or "")
    plan.tasks[2].append(dataclasses.replace(last, columns=[0, 1, 2, 3, 4, 5, 5]))
    assert "not each of 7 tiles exactly once" in (faults(plan) or "")


def test_a_flag_that_nobody_heeds_is_found() -> None:
    """The flag's sender could be a whole call ahead and overwrite data that a peer still reads."""
    plan = schedule(GEMM, COPY)
    plan.tasks[0][0] = Task()
    assert "rank 0 never waits for finished" in (faults(plan) or "")


def test_every_variant_of_the_spaces_is_modelled() -> None:
    for problem in (GEMM, DECODE):
        for variant in space_for(problem, H200).variants:
            schedule(problem, space_for(problem, H200).default(variant))


def test_the_constants_are_those_of_the_kernels() -> None:
    pull = pytest.importorskip("autotax.kernels.all_gather_gemm.pull")
    assert model.PUBLISHERS == pull.PUBLISH_PROGRAMS
