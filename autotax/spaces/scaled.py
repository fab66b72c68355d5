"""Products of e4m3 that a search tries: names as `kernels/scaled_product.py` reads them."""

from __future__ import annotations

from autotax.core.config import Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.hardware import Hardware
from autotax.operators.scaled import GROUP

LIBRARY = "library"
FEW_ROWS = 128
"""With at most so many rows Triton's products are seeds before the library's: they cut K, and so read B at full rate."""
TILES = {
    16: ((64, 6, 4), (128, 5, 4), (32, 7, 4)),
    32: ((64, 6, 4), (128, 5, 4)),
    64: ((64, 6, 4), (128, 5, 4)),
    128: ((128, 5, 8), (64, 6, 4), (256, 3, 8)),
}
"""Columns, stages and warps of tiles, by their rows."""
ON_AMD = {rows: tuple((columns, 2, warps) for columns, _, warps in tiles if columns <= 128) for rows, tiles in TILES.items()}
ON_CPU = {16: ((32, 2, 4),), 32: ((32, 2, 4),)}
MOST_SPLITS = 16


def tiles(rows: int, n: int, k: int, hardware: Hardware) -> tuple[str, ...]:
    """Tiles for `rows` rows of A, those that occupy all processors once with the fewest parts first."""
    table = ON_CPU if not hardware.on_gpu else ON_AMD if hardware.backend == "rocm" else TILES
    highest = max(size for size in table if size <= max(min(table), power_of_two(rows)))
    heights = [size for size in (highest, highest // 2) if size in table and size * 2 >= min(highest, max(table))]
    found = []
    for height in heights:
        for columns, stages, warps in table[height]:
            count = ceil_div(rows, height) * ceil_div(n, columns)
            enough = min(MOST_SPLITS, power_of_two(ceil_div(hardware.processors, count)))
            for splits in dict.fromkeys((enough, max(1, enough // 2), min(MOST_SPLITS, 2 * enough))):
                if splits * GROUP <= k or splits == 1:
                    found.append(f"{height}x{columns}x{stages}x{warps}x{splits}")
    return tuple(dict.fromkeys(found))


def products(problem: object, rows: int, hardware: Hardware) -> tuple[Value, ...]:
    """All products of `rows` rows of A, the most promising first. The library multiplies blocks on Hopper only."""
    n, k, scales = (getattr(problem, name) for name in ("n", "k", "scales"))
    made = tiles(rows, n, k, hardware)
    # On gfx942 the library multiplies another format (e4m3fnuz).
    served = not hardware.on_gpu or (hardware.backend == "cuda" and scales != "block") or (hardware.target == "cuda:90" and k % (4 * GROUP) == 0)
    library = (LIBRARY,) if served else ()
    return (*made, *library) if rows <= FEW_ROWS and hardware.on_gpu else (*library, *made)
