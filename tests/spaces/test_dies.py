"""Orders for several dies are bijections, and give the locality on a die that the simulation of its L2 predicts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotax.kernels import tiling
from autotax.operators.problems import GatherAttention
from tests.models import l2

MAPPINGS = pytest.mark.parametrize("mapping", l2.MAPPINGS)


@settings(deadline=None)
@given(first=st.integers(0, 700), tiles=st.integers(1, 700), programs=st.integers(1, 310), count=st.integers(1, 9))
def test_remapped_takes_each_tile_of_a_range_once_and_leaves_waves_as_they_are(
    first: int, tiles: int, programs: int, count: int
) -> None:
    items = range(first, first + tiles)
    taken = [tiling.remapped(item, first, first + tiles, programs, count) for item in items]
    assert sorted(taken) == list(items)
    assert [item // programs for item in taken] == [item // programs for item in items]


@settings(deadline=None)
@given(programs=st.integers(1, 310), count=st.integers(1, 9))
def test_a_die_takes_neighbouring_tiles_of_a_wave(programs: int, count: int) -> None:
    for die in range(min(count, programs)):
        taken = [tiling.remapped(item, 0, programs, programs, count) for item in range(die, programs, count)]
        assert taken == list(range(taken[0], taken[0] + len(taken)))


@settings(deadline=None)
@given(programs=st.integers(1, 310), waves=st.integers(1, 4))
def test_one_die_changes_nothing(programs: int, waves: int) -> None:
    assert all(tiling.remapped(item, 0, waves * programs, programs, 1) == item for item in range(waves * programs))


@settings(deadline=None)
@given(rows=st.integers(1, 8), count=st.integers(1, 9), strips=st.integers(1, 6))
def test_in_groups_as_high_as_the_grid_a_die_owns_a_strip_and_walks_down_its_columns(rows: int, count: int, strips: int) -> None:
    cols = strips * count
    programs = rows * cols
    for die in range(count):
        walk = [tiling.remapped(item, 0, programs, programs, count) for item in range(die, programs, count)]
        tiles = [divmod(tiling.grouped(tile, rows, cols, rows), cols) for tile in walk]
        assert tiles == [(row, col) for col in range(die * strips, (die + 1) * strips) for row in range(rows)]


@MAPPINGS
@settings(deadline=None)
@given(items=st.integers(1, 100), parts=st.integers(1, 40))
def test_mappings_of_attention_give_each_piece_to_one_program(mapping: str, items: int, parts: int) -> None:
    work = l2.mapped(mapping, items, parts)
    assert sorted(map(work, range(items * parts))) == [(item, part) for item in range(items) for part in range(parts)]


@settings(deadline=None)
@given(eighths=st.integers(1, 16), tiles=st.integers(1, 40))
def test_swizzled_head_first_is_the_formula_of_the_paper(eighths: int, tiles: int) -> None:
    heads, x = 8 * eighths, 8
    work = l2.mapped("swizzled head-first", heads, tiles)
    for wid in range(heads * tiles):
        assert work(wid) == ((wid % x) * (heads // x) + wid // (x * tiles), wid % (x * tiles) // x)


def test_head_first_swizzled_keeps_a_head_in_one_l2_and_block_first_in_none() -> None:
    """The direction of the paper's measurements, at 128 heads."""
    mappings = ("naive block-first", "naive head-first", "swizzled head-first")
    rates = {mapping: l2.several_query_tiles(mapping, 128, 64, 4096) for mapping in mappings}
    assert rates["swizzled head-first"] > 0.9
    assert rates["naive block-first"] < 0.05
    assert rates["naive block-first"] < rates["naive head-first"] < rates["swizzled head-first"]


def test_the_same_holds_for_gather_and_attention() -> None:
    """Without a mask, for as many KV heads as query heads."""
    problem = GatherAttention(1, 128, 128, 128, 12288, "bf16", 2, "none")
    assert l2.gathered("swizzled head-first", problem, 0) > 0.9
    assert l2.gathered("naive block-first", problem, 0) < 0.05


@MAPPINGS
def test_with_one_tile_of_queries_a_head_no_mapping_hits(mapping: str) -> None:
    assert l2.one_query_tile(mapping, 16, 8, 4096) == 0.0


@pytest.mark.parametrize(("m", "n", "fewer"), [(512, 7168, 0.25), (2048, 7168, 0.27), (4096, 7168, 0.20), (8192, 3584, -0.12)])
def test_remapped_tiles_share_more_blocks_on_a_die_but_for_tall_products(m: int, n: int, fewer: float) -> None:
    rows, cols = m // 256, n // 256
    plain, remapped = (
        min(l2.distinct_blocks(rows, cols, group, 304, remap) for group in (1, 4, 8, rows)) for remap in (False, True)
    )
    assert 1 - remapped / plain == pytest.approx(fewer, abs=0.01)
