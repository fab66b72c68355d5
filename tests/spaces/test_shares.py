"""Work that is dealt out before a launch: every piece of work has one program, and no wave is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotax.core.problem import ceil_div
from autotax.kernels import tiling


@given(tiles=st.integers(0, 300), programs=st.integers(1, 140), splits=st.integers(1, 8))
def test_pieces_of_the_first_tiles_come_first(tiles: int, programs: int, splits: int) -> None:
    whole = tiling.whole_tiles(tiles, programs, splits)
    ends = [tiling.pieces(first, whole, splits) for first in range(tiles + 1)]
    of_each = [[tiling.tile_of(item, whole, splits) for item in range(*ends[tile : tile + 2])] for tile in range(tiles)]
    assert ends[0] == 0
    assert all(tiles_of == [tile] * len(tiles_of) for tile, tiles_of in enumerate(of_each))


@given(items=st.integers(0, 3000), programs=st.integers(2, 140), data=st.data())
def test_what_is_dealt_out_costs_no_wave(items: int, programs: int, data: st.DataObject) -> None:
    workers = programs - data.draw(st.integers(0, programs - 1), label="comm")
    dealt = tiling.dealt_out(items, programs, programs - workers, 1)
    waves, busiest = ceil_div(items, programs), ceil_div(dealt, workers)
    assert 0 <= dealt <= items
    assert busiest <= (waves if dealt == items else max(0, waves - 2))
    assert workers < programs or dealt == items
    assert tiling.dealt_out(items, programs, programs - workers, 2) == 0
