"""Who does which piece of work of a GEMM: what is dealt out beforehand. Integer arithmetic for kernels, as in `order`."""

from __future__ import annotations


def pieces(tiles, whole, splits):
    """How many pieces of work the first `tiles` tiles are: see `order.tile_of`."""
    return tiles if tiles < whole else whole + (tiles - whole) * splits


def dealt_out(items, programs, comm, splits):
    """How many pieces of work are dealt out beforehand, in turn, to the programs that do not communicate: their loop over
    whole tiles is one pipeline. The rest go to whoever is free first.

    All are, unless the `comm` programs can save a wave by joining: then not the last two waves. None where tiles are cut,
    for parts are shorter.
    """
    workers = programs - comm
    waves = (items + programs - 1) // programs
    first = items if (items + workers - 1) // workers == waves else (waves - 2) * workers
    return first if splits == 1 and first > 0 else 0
