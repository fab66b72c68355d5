"""The orders of work are bijections, whatever the sizes: nothing is done twice, nothing is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autotax.kernels import tiling

small = st.integers(1, 40)
either = st.booleans()


@given(rows=small, cols=small, group=st.integers(1, 64))
def test_grouped_takes_each_tile_once(rows: int, cols: int, group: int) -> None:
    tiles = [tiling.grouped(tile, rows, cols, group) for tile in range(rows * cols)]
    assert sorted(tiles) == list(range(rows * cols))


@given(rows=small, cols=small, group=st.integers(1, 64))
def test_grouped_walks_bands(rows: int, cols: int, group: int) -> None:
    """A band is finished before the next one begins, and within it a column before the next one."""
    places = [divmod(tiling.grouped(tile, rows, cols, group), cols) for tile in range(rows * cols)]
    walk = [(row // group, col, row) for row, col in places]
    assert walk == sorted(walk)


@given(rows=small, world=st.integers(1, 12), interleaved=either)
def test_remote_row_takes_each_row_of_each_other_rank_once(rows: int, world: int, interleaved: bool) -> None:
    positions = [tiling.remote_row(row, rows, world, interleaved) for row in range((world - 1) * rows)]
    assert sorted(positions) == list(range(rows, world * rows))


@given(rows=small, world=st.integers(2, 12))
def test_remote_row_takes_source_after_source_or_all_in_turn(rows: int, world: int) -> None:
    count = (world - 1) * rows
    ring = [tiling.remote_row(row, rows, world, False) // rows for row in range(count)]
    assert ring == sorted(ring)
    mixed = [tiling.remote_row(row, rows, world, True) // rows for row in range(count)]
    assert mixed == [1 + row % (world - 1) for row in range(count)]


@given(blocks=st.integers(1, 300), programs=st.integers(1, 40), world=st.integers(1, 8), turned=either)
def test_owner_of_gives_each_rank_one_of_world_neighbouring_blocks(blocks: int, programs: int, world: int, turned: bool) -> None:
    """So a rank has room for its blocks at block // world."""
    owners = [tiling.owner_of(block, programs, world, turned) for block in range(world * blocks)]
    assert all(sorted(owners[first : first + world]) == list(range(world)) for first in range(0, len(owners), world))


@given(per=st.integers(1, 20), world=st.integers(1, 8), turns=st.integers(1, 20))
def test_owner_of_changes_from_one_block_of_a_program_to_the_next(per: int, world: int, turns: int) -> None:
    programs = per * world
    for program in range(programs):
        owners = [tiling.owner_of(turn * programs + program, programs, world, True) for turn in range(turns)]
        assert owners == [(program + turn) % world for turn in range(turns)]


@given(chunks=small, pieces=st.integers(1, 16), world=st.integers(1, 8), interleaved=either)
def test_push_unit_takes_each_piece_for_each_peer_once(chunks: int, pieces: int, world: int, interleaved: bool) -> None:
    per_peer = chunks * pieces
    units = [tiling.push_unit(unit, chunks, pieces, world, interleaved) for unit in range((world - 1) * per_peer)]
    assert sorted(units) == list(range(per_peer, world * per_peer))


@given(chunks=small, world=st.integers(2, 8), interleaved=either)
def test_chunks_are_sent_in_the_order_in_which_they_are_read(chunks: int, world: int, interleaved: bool) -> None:
    sent = [tiling.push_unit(unit, chunks, 1, world, interleaved) for unit in range((world - 1) * chunks)]
    read = [tiling.remote_row(row, chunks, world, interleaved) for row in range((world - 1) * chunks)]
    assert sent == read


@given(tiles=st.integers(0, 300), programs=st.integers(1, 140), splits=st.integers(1, 8), blocks=st.integers(1, 70))
def test_tiles_in_parts_cover_each_k_block_of_each_tile_once(tiles: int, programs: int, splits: int, blocks: int) -> None:
    whole = tiling.whole_tiles(tiles, programs, splits)
    done: list[tuple[int, int]] = []
    for item in range(tiling.pieces(tiles, whole, splits)):
        span = range(tiling.first_block(item, whole, splits, blocks), tiling.last_block(item, whole, splits, blocks))
        done += [(tiling.tile_of(item, whole, splits), block) for block in span]
    assert sorted(done) == [(tile, block) for tile in range(tiles) for block in range(blocks)]
    assert tiles - whole < programs or splits == 1


@given(programs=st.integers(1, 3000), chiplets=st.integers(1, 64))
def test_programs_of_one_chiplet_get_neighbouring_places(programs: int, chiplets: int) -> None:
    for die in range(min(chiplets, programs)):
        places = [tiling.chiplet(program, programs, chiplets) for program in range(die, programs, chiplets)]
        assert places == list(range(places[0], places[0] + len(places)))
