"""The modules on CPU ranks: correct for every size and variant, and the same choices on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.operators.verification import TOLERANCE
from autotax.runner.ranks import Ranks
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner
from tests.nn import checks

ROWS = (20, 3, 19, 1, 16, 17, 7, 20, 2, 16)
"""Rows a rank from call to call: inboxes and flags are used again in sizes that neither tile nor chunk divides."""
TILES: dict[str, Value] = {
    "block_m": 16, "block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2, "group_m": 1, "loads": "tma", "order": "ring",
}  # fmt: skip
PARAMETERS: dict[str, dict[str, Value]] = {
    "push": {"comm": 2, "pieces": 4, "k_groups": 1, "chunk_rows": 32, "across": 0, "splits": 1},
    "copy_engine": {"chunk_rows": 16, "streams": 1, "splits": 1},
    "pull": {},
}
EXCHANGE: dict[str, Value] = {"protocol": "ll", "payload": "fp32"}
ATTENTION: dict[str, Value] = {
    "attend": "by_block", "block_s": 16, "splits": 2, "num_warps": 4, "num_stages": 2, "order": "item_first", "chiplets": 1,
}  # fmt: skip


def linear(variant: str, **more: int) -> Config:
    return Config.of(variant, TILES | PARAMETERS[variant] | more)


ROW_PARAMETERS: dict[str, dict[str, Value]] = {
    "push": {"adders": 0, "flag_tiles": 1, "signals": "late", "flat": 0, "order": "ring"},
    "words": {"shots": "one"},
}


def row_linear(variant: str, **more: Value) -> Config:
    tiles: dict[str, Value] = {name: value for name, value in TILES.items() if name != "order"}
    return Config.of(variant, tiles | {"splits": 1, "payload": "fp32"} | ROW_PARAMETERS[variant] | more)


PACKETS = Config.of("push_packets", {name: value for name, value in TILES.items() if name != "order"}, splits=1, piece=1024)
ANY_ROWS = [
    Config("bsp"),
    Config.of("decomposed", products="one", comm=1, warm=0),
    Config.of("decomposed", products="two", comm=0, warm=0),
    linear("copy_engine"),
    linear("pull"),
    linear("push"),
    PACKETS,
]
CASES = [(world, config) for world in (2, 3) for config in ANY_ROWS]
WAYS = (("each", 2), ("halves", 0))
CASES += [(3, Config.of("decomposed", products=way, comm=comm, warm=0)) for way, comm in WAYS]


def _by_variant(world: int, config: Config) -> dict[str, object]:
    return {"world": world, "config": (config.variant, config.values.get("products"))}


@pytest.mark.sampled(by=_by_variant)
@pytest.mark.parametrize(("world", "config"), CASES, ids=str)
def test_a_config_that_takes_any_number_of_rows_is_right_at_all(ranks: dict[int, Ranks], world: int, config: Config) -> None:
    for errors, tuned in ranks[world].run(checks.forced_linear, config, world * 20, ROWS, torch.bfloat16):
        assert max(errors) <= TOLERANCE["bf16"]
        assert tuned == [config.variant != "bsp"] * len(ROWS)


def test_a_call_that_one_rank_is_refused_does_not_part_the_ranks(ranks: dict[int, Ranks]) -> None:
    for errors in ranks[2].run(checks.linear_where_one_was_refused):
        assert max(errors) <= TOLERANCE["fp32"]


def test_push_runs_itself_where_it_has_as_many_chunks_and_bsp_elsewhere(ranks: dict[int, Ranks]) -> None:
    for errors, tuned in ranks[2].run(checks.forced_linear, linear("push", chunk_rows=16), 40, ROWS, torch.float32):
        assert max(errors) <= TOLERANCE["fp32"]
        assert tuned == [rows > 16 for rows in ROWS]


BATCHES = ((3, 24), (1, 24), (3, 5), (2, 24), (3, 1), (3, 24))
SINGLE = Config.of("single", ATTENTION | EXCHANGE | {"heads": 1, "receivers": 2})
DECODE = {
    "bsp": (Config.of("bsp", ATTENTION | {"heads": 1}), [True] * 6),
    "fused": (Config.of("fused", ATTENTION | EXCHANGE | {"heads": 2}), [True, False, True, False, True, True]),
    "single": (SINGLE, [True, False, True, False, True, True]),
    "nothing": (None, [False] * 6),
}


@pytest.mark.sampled(by=lambda kind, world: {"taken": DECODE[kind][1], "world": world})
@pytest.mark.parametrize("kind", DECODE)
@pytest.mark.parametrize("world", [2, 3])
def test_attention_is_right_for_any_batch_and_any_room(ranks: dict[int, Ranks], kind: str, world: int) -> None:
    config, expected = DECODE[kind]
    for errors, tuned in ranks[world].run(checks.forced_decode, config, 3, world * 24, BATCHES, torch.bfloat16):
        assert max(errors) <= TOLERANCE["bf16"]
        assert tuned == expected


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["bsp", "single", "nothing"])
@pytest.mark.parametrize("page", [0, 16])
def test_each_rank_gets_its_own_heads_of_a_cache_with_and_without_pages(ranks: dict[int, Ranks], kind: str, page: int) -> None:
    config, expected = DECODE[kind]
    sizes = BATCHES[:3]
    for errors, tuned in ranks[2].run(checks.forced_decode, config, 3, 48, sizes, torch.bfloat16, "head_scatter", page):
        assert max(errors) <= TOLERANCE["bf16"]
        assert tuned == expected[:3]


def database(path: Path, *winners: tuple[int | Problem, Config], conditions: Conditions = ON_CPU) -> str:
    """A database with winners for these CPU ranks. Each has its problem, or only its M for the layer under test."""
    here = detect("cpu")
    with Store.open(f"sqlite:///{path}") as store:
        for what, config in winners:
            problem = AllGatherGemm(what, checks.N, checks.K, "fp32", "m", 2) if isinstance(what, int) else what
            assert space_for(problem, here).why_not(config) is None

            keep_winner(store, problem, config, here, environment("cpu"), conditions)
    return str(path)


def test_each_size_runs_what_is_tuned_for_it(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", (16, linear("pull")), (64, linear("push")))
    for errors, variants, warnings in ranks[2].run(checks.looked_up, [path, path], 64, (4, 8, 32, 20, 8, 32)):
        assert max(errors) <= TOLERANCE["fp32"]
        # M = 2, 4, 8, 16, 32, 64; what is tuned serves down to half of its size, where it fits.
        assert variants == ["bsp", "bsp", "pull", "pull", "bsp", "push"]
        assert warnings == []


def test_ranks_with_different_databases_all_fall_back_and_say_so(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    one = database(tmp_path / "a.db", (16, linear("pull")), (64, linear("push")))
    other = database(tmp_path / "b.db", (16, linear("pull")), (64, linear("push", comm=1)))
    reports = ranks[2].run(checks.looked_up, [one, other], 64, (4, 8, 32, 20, 8, 32))
    for errors, variants, warnings in reports:
        assert max(errors) <= TOLERANCE["fp32"]
        assert variants == ["bsp", "bsp", "pull", "pull", "bsp", "bsp"]
        assert len(warnings) == 1
        assert "gemm/m=64," in warnings[0]
        assert "gemm/m=16," not in warnings[0]
        assert "rank 0: push(" in warnings[0]
        assert "comm=2" in warnings[0]
        assert "rank 1: push(" in warnings[0]
        assert "comm=1" in warnings[0]


def test_a_rank_without_a_database_brings_all_to_bulk_synchronous(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    one = database(tmp_path / "a.db", (64, linear("push")))
    for errors, variants, warnings in ranks[2].run(checks.looked_up, [one, str(tmp_path / "no.db")], 64, (32, 4)):
        assert max(errors) <= TOLERANCE["fp32"]
        assert set(variants) == {"bsp"}
        assert "rank 1: bsp" in warnings[0]


SKEWED = replace(ON_CPU, skew_us=20.0)


def test_what_was_tuned_as_deployed_serves_a_layer_that_says_so_and_is_told_to_another(
    ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    path = database(tmp_path / "a.db", (16, linear("pull")), conditions=SKEWED)
    for errors, variants, warnings in ranks[2].run(checks.looked_up, [path, path], 16, (8,), SKEWED):
        assert max(errors) <= TOLERANCE["fp32"]
        assert (variants[-1], warnings) == ("pull", [])
    for other, reason in ((path, "(the winner"), (str(tmp_path / "no.db"), "(rank 0: the winner")):
        for _, variants, warnings in ranks[2].run(checks.looked_up, [path, other], 16, (8,)):
            assert set(variants) == {"bsp"}
            assert len(warnings) == 1
            assert f"gemm/m=16,n={checks.N}," in warnings[0]
            assert reason in warnings[0]
            assert "skew 20 us (here 0 us)" in warnings[0]


def test_a_winner_of_other_parameters_is_told(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store:
        problem = AllGatherGemm(16, checks.N, checks.K, "fp32", "m", 2)
        keep_winner(store, problem, Config.of("pull", block_m=16), detect("cpu"), environment("cpu"), ON_CPU)
    for _, variants, warnings in ranks[2].run(checks.looked_up, [str(path)] * 2, 16, (8,)):
        assert set(variants) == {"bsp"}
        assert len(warnings) == 1
        assert "does not fit: pull takes block_m, " in warnings[0]


def test_attention_looks_up_its_greatest_length_under_the_conditions_given(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    problem = FlashDecode(2, checks.HEADS, checks.KV_HEADS, checks.DIM, 64, "fp32", 2)
    path = database(tmp_path / "a.db", (problem, SINGLE), conditions=SKEWED)
    assert ranks[2].run(checks.attention_looked_up, path, (2, 64), SKEWED) == [["single"]] * 2
    assert ranks[2].run(checks.attention_looked_up, path, (2, 128), SKEWED) == [["bsp"]] * 2
    for variant, warning in ranks[2].run(checks.attention_looked_up, path, (2, 64), None):
        assert variant == "bsp"
        assert "skew 20 us (here 0 us)" in warning


REFUSED = {
    "too many rows": "x has 9 rows on each of 2 ranks; it must have at most 8 (M at most 16)",
    "another K": "x is torch.float32 [2, 48]",
    "another type": "x is torch.float16",
    "a wrong out": "out is torch.float32 [2, 24]",
    "a gradient into out": "call this without out",
    "closed": "was closed",
    "max_m below the ranks": "max_m is 1",
    "a weight of integers": "weight is torch.int64",
    "a weight of one dimension": "weight is torch.float32 [4]",
    "no columns": "weight is torch.float32 [0, 4]",
    "sizes that no rank can share": "a multiple of 2 from 2 to 16",
    "a config that is not admitted": "config is push(block_m=7)",
    "an unknown variant": "the variant is best",
    "a bad size on one rank": "rank 0: max_m is 1",
    "different sizes": "differs between the ranks (rank 0: ",
    "different conditions": "deployed as eager/warm/20; rank 1: ",
    "different conditions of attention": "deployed as eager/warm/20; rank 1: ",
    "conditions that are none": "conditions is 'eager'",
    "different columns": "n=8,",
    "like a layer of another size": "weight is torch.float32 [32, 40]",
    "a broken database": "rank 0: ",
    "heads that the ranks cannot own": "with --output head_scatter it must be a multiple of the world size",
    "heads that do not share": "q_heads must be a multiple of kv_heads",
    "no head": "kv_heads is 0",
    "no batch": "batch is 0",
    "a type of integers": "dtype is torch.int8",
    "too many sequences": "q has 3 sequences",
    "too many tokens": "k_shard has room for 17 tokens",
    "a page of another size": "page is 32; allowed are 0 (contiguous), 16, 64",
    "no block table": "block_table is not given, and page is 16",
    "a block table without pages": "block_table is given, and page is 0",
    "too many pages": "block_table has 2 pages a sequence; a rank can have 1 to 1 of max_kv_len 32",
    "lengths of another type": "kv_lens is torch.int64",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_allowed_is_one_line_on_every_rank(ranks: dict[int, Ranks], kind: str) -> None:
    messages = ranks[2].run(checks.refusal, kind)
    assert REFUSED[kind] in messages[0]
    assert "\n" not in messages[0]
    assert ":" in messages[0]
    assert messages[0] == messages[1]
