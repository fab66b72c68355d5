"""Orders of work for GPUs of several dies, each with an L2 of its own. Integer arithmetic for kernels, as in `order`.

The hardware gives programs to the dies in turn. Nothing but locality depends on that: all orders here are bijections.
"""

from __future__ import annotations


def remapped(item, first, end, programs, dies):
    """What is done in place of an item of first ... end - 1 by programs that take every `programs`-th item, so that programs of one
    die do neighbouring ones at a time; a bijection for any numbers.

    With `order.grouped` in groups as high as the grid, a die has some whole columns of tiles of each wave, a strip of N, and walks M.
    """
    wave = item - item % programs
    start = wave if wave > first else first
    stop = wave + programs if wave + programs < end else end
    count = stop - start
    place = item - start
    # As `order.chiplet` of `count` programs.
    per = (count + dies - 1) // dies
    tall = count % dies
    tall = dies if tall == 0 else tall
    die = place % dies
    local = place // dies
    return start + (die * per + local if die < tall else tall * per + (die - tall) * (per - 1) + local)
