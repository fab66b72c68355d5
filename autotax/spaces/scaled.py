"""Products of e4m3 that a search tries: names as `kernels/scaled_product.py` reads them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotax.core.config import Config, Value
from autotax.core.problem import busy_share, ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.kernels.tiling import GROUP_ROWS, GROUP_WARPS, MOST_TOGETHER, PART_ROWS, ROLES, ProductTile, parts_of
from autotax.operators.scaled import FEW_ROWS, GROUP, as_words, has_library_product
from autotax.spaces import gemm_roles

LIBRARY = "library"
TILES: dict[int, tuple[tuple[int, ...], ...]] = {
    16: ((64, 5, 4, 2), (64, 10, 4), (128, 6, 4), (64, 5, 4)),
    32: ((64, 4, 4, 2), (64, 8, 4), (128, 6, 4), (64, 4, 4)),
    64: ((64, 6, 4), (128, 5, 4)),
    128: ((128, 5, 8), (64, 6, 4), (256, 3, 8)),
}
"""Columns, stages and warps of tiles, by their rows. A fourth number: a strip of K has twice 128 columns, which takes 0.94
of the time for 1 and 16 rows of 8192 x 4096 (one H200).
"""
ON_AMD: dict[int, tuple[tuple[int, ...], ...]] = {
    rows: tuple(dict.fromkeys((tile[0], 2, tile[2]) for tile in tiles if tile[0] <= 128)) for rows, tiles in TILES.items()
}
ON_CPU: dict[int, tuple[tuple[int, ...], ...]] = {16: ((32, 2, 4), (32, 2, 4, 2)), 32: ((32, 2, 4),)}
COLUMNS_BY_ROLES = {64: (64, 80, 96, 112, 128, 160), 128: (64, 80, 96, 112, 128, 160)}
"""Columns of tiles of `specialized_product` by their rows."""
USUAL_STRIP_US = (0.07, 0.001)
STRIP_US = {1: (0.2, 0.0012), 2: (0.1, 0.001)}
"""Microseconds of a strip of 128 columns of K in such a tile, and of each row and column; below with scales of blocks, where one
group has the rows and where two take turns. Measured on one H200 at 1 to 512 rows, like the constants below.
"""
PARTS_US, PART_US = 5.0, 1.0
"""Microseconds that it takes to store a part of a tile, and to add one up."""
BEST_WITH_ROLES = {"block": range(33, 129), "row": range(33, 257), "tensor": range(33, 257)}
"""Rows of A at which such a product is the fastest of all, mostly, by scales: 23 of 30 products (results/h200x1/products.txt)."""
READ_GBPS, HIDDEN = 3600.0, 0.8
"""GB/s at which such a product reads B, and the share of the shorter of loads and multiplications that the other hides."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
BUSY = 0.84
"""The share of its programs' time that a processor must be busy: at 128 x 5120 x 12800 three parts of 40 tiles take 40.4 us, two
parts 45.2 (2 H200).
"""
BLOCKS_OF_ONE_SCALE = (64, 128)
"""Columns of warp-specialized tiles that lie in one block of B with scales `block`."""
WHOLE = 0
"""The strip of fast accumulation: all of K."""
STRIP_STAGES, WIDE_STRIP_STAGES = 3, 4
"""Fewest stages with two strips at a time, of which a wider tile holds both for longer."""


def with_strips(space: VariantSpace, problem: Any) -> VariantSpace:
    """The space of a warp-specialized kernel with the parameter `strip`: columns of K that a group multiplies at a time.

    Without scales `block` tensor cores add them up. If all terms have one sign, the worst case, a C in bf16 is 0.33 % off with
    sums of 256 columns (measured). With sums of 512 it would be 0.6 % off before it is rounded (a model of the hardware), beyond
    the limit of 0.5 %. With such scales a group scales the sum of the first 128 columns while the second 128 are multiplied.

    With fast accumulation seeds have no strips. Else they have the widest strip that their tiles take; those with the widest come
    first. Products with strips of 256 columns took 0.93 to 0.97 of the time with strips of 128 (nine problems, two H200); with
    scales `block` 0.81 and 0.86 (two products, one H200).
    """
    allowed: tuple[Value, ...] = (GROUP, 2 * GROUP) if problem.k % (2 * GROUP) == 0 else (GROUP,)
    if problem.accumulate == "fast":
        allowed = (*allowed, WHOLE)

    def loads(block_n: int, stages: int, strip: int) -> bool:
        return strip <= GROUP or stages >= (STRIP_STAGES if block_n <= MOST_TOGETHER else WIDE_STRIP_STAGES)

    constraint = Constraint(("block_n", "num_stages", "strip"), loads, "two strips leave too few stages for those that come next")
    space = replace(
        space, parameters=space.parameters | {"strip": allowed}, former=space.former | {"strip": GROUP},
        constraints=(*space.constraints, constraint),
    )  # fmt: skip
    choices = [[Config.of(space.variant, seed.values | {"strip": strip}) for strip in allowed[::-1]] for seed in space.seeds]
    seeds = [next(seed for seed in some if space.why_not(seed) is None) for some in choices]
    return replace(space, seeds=tuple(sorted(seeds, key=lambda seed: -int(seed["strip"]))))


def heights(rows: int, hardware: Hardware) -> list[int]:
    """Rows of tiles for so many rows of A, the most usual first."""
    table = _table(hardware)
    height = max(size for size in table if size <= max(min(table), power_of_two(rows)))
    return [size for size in (height, height // 2, 2 * height) if size in table]


def _table(hardware: Hardware) -> dict[int, tuple[tuple[int, ...], ...]]:
    return ON_CPU if not hardware.on_gpu else ON_AMD if hardware.backend == "rocm" else TILES


def tiles(problem: Any, rows: int, hardware: Hardware) -> tuple[Value, ...]:
    """Tiles of Triton's product for `rows` rows of A, those with all rows first. With scales `block` a strip has 128 columns."""
    table = _table(hardware)
    wide = problem.scales != "block" and problem.k % (2 * GROUP) == 0
    high = [(high, *tile) for high in heights(rows, hardware) for tile in table[high] if wide or len(tile) == 3]
    return tuple("x".join(map(str, tile)) for tile in high)


@functools.lru_cache(maxsize=256)
def with_roles(problem: Any, rows: int, hardware: Hardware, columns: range | tuple[int, ...] = range(257)) -> Mapping[Value, int]:
    """Tiles of `specialized_product` with so many columns, of the least estimated time first, and the parts along K that give it.
    There is none where the GPU or the matrices do not allow it.

    Each has as many stages as fit, since loads take longer than products. Groups take turns only with scales of blocks, for with
    others they gain nothing (results/notes/gemm-reduce-scatter.md). Numbers of 16 bits have no strips.
    """
    codes = problem.dtype == "e4m3"
    if codes and (problem.operand != "e4m3" or problem.k % 2):
        return {}
    if not gemm_roles.have_roles(as_words(problem) if codes else problem, hardware):
        return {}
    estimates = []
    for high in COLUMNS_BY_ROLES if rows > GROUP_ROWS else [GROUP_ROWS]:
        widths = BLOCKS_OF_ONE_SCALE if problem.scales == "block" else COLUMNS_BY_ROLES[high]
        for wide in filter(columns.__contains__, widths):
            for turns in (1, 2) if problem.scales == "block" and high == GROUP_ROWS else (1,):
                sums = 4 * high * wide if turns > 1 else 0
                room = hardware.shared_memory - gemm_roles.BARRIER_BYTES - 2 * high * min(parts_of(wide)[0], PART_ROWS) - sums
                fitting = room // ((high + wide) * GROUP)
                # Groups that take turns need a multiple of their strips: see `multiply_tile`. Many single strips beat few pairs.
                strips = 2 if codes and problem.k % (2 * GROUP) == 0 and fitting // (2 * turns) * 2 * turns >= fitting - 1 else 1
                stages = fitting // (strips * turns) * strips * turns if turns > 1 else fitting
                tile = ProductTile(high, wide, stages, high // GROUP_ROWS * turns * GROUP_WARPS, strips)
                us, splits = min((_time_with_roles(tile, parts, problem, rows, hardware), parts) for parts in splits_of(problem))
                estimates.append((us, ROLES + "x".join(map(str, tile)), splits))
    return {name: splits for _, name, splits in sorted(estimates)}


def _time_with_roles(tile: ProductTile, splits: int, problem: Any, rows: int, hardware: Hardware) -> float:
    """Microseconds of a product: those of a processor, in whole waves of parts of tiles, and of reading B."""
    waves = ceil_div(_tiles_of(tile, rows, problem.n) * splits, hardware.processors)
    base_us, line_us = STRIP_US[tile.turns] if problem.scales == "block" else USUAL_STRIP_US
    length = problem.k * problem.item_size
    multiplied = waves * ceil_div(length, GROUP * splits) * (base_us + line_us * (tile.rows + tile.columns))
    loaded = problem.n * length / (READ_GBPS * 1e3)
    added_up = PARTS_US * waves + PART_US * splits if splits > 1 else 0.0
    return max(multiplied, loaded) + (1 - HIDDEN) * min(multiplied, loaded) + added_up


def shared_bytes(name: Value) -> int:
    """About the shared memory of a program with these tiles: its stages, and a little for barriers."""
    tile = ProductTile.of(name)
    return (tile.rows + tile.columns) * GROUP * tile.strips * tile.stages + 4096


def with_tiles(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values of a config, with the tile of its product by name if that is one of Triton's."""
    name = values.get("product", LIBRARY)
    if name == LIBRARY:
        return dict(values)
    rows, columns, stages, warps, strips = ProductTile.of(name)
    more = {"block_m": rows, "block_n": columns, "block_k": GROUP * strips, "num_stages": stages, "num_warps": warps}
    return {**values, **more}


def _tiles_of(tile: ProductTile, rows: int, n: int) -> int:
    """The number of tiles of a product."""
    return ceil_div(rows, tile.rows) * ceil_div(n, tile.columns)


def splits_for(name: Value, rows: int, n: int, hardware: Hardware) -> int:
    """The fewest parts along K with which the tiles of a product keep the processors busy, or those that keep them busiest."""
    if name == LIBRARY:
        return 1
    count = _tiles_of(ProductTile.of(name), rows, n)

    def busy(splits: int) -> float:
        return busy_share(splits * count, hardware.processors)

    return next((splits for splits in SPLITS if busy(splits) > BUSY), max(SPLITS, key=busy))


def splits_at_once(name: Value, rows: int, n: int, hardware: Hardware) -> int:
    """The most parts along K of which no processor gets two.

    A kernel with one program a processor takes them one after the other. A strip of few rows takes it a constant time, about 600
    cycles on H100, and so does one more part: at 16 x 8192 x 4096, 64 columns a tile, one part takes 21.7 us and two 25.9.
    """
    if name == LIBRARY:
        return 1
    count = _tiles_of(ProductTile.of(name), rows, n)
    return max((splits for splits in SPLITS if splits * count <= hardware.processors), default=1)


def parameters(
    problem: Any, rows: int, hardware: Hardware, *, library: bool = True, roles: bool = False
) -> dict[str, tuple[Value, ...]]:
    """`product`, the most promising first, and `splits`, its parts along K.

    `library`: the vendor's is among the products. `roles`: so are those by warps with roles, where the GPU has them.
    """
    vendors = (LIBRARY,) if library and has_library_product(problem, hardware) else ()
    made = tiles(problem, rows, hardware)
    names = (made[0], *vendors, *made[1:]) if rows <= FEW_ROWS and hardware.on_gpu else (*vendors, *made)
    if roles:
        ours = tuple(with_roles(problem, rows, hardware))
        firsts = (*ours[:1], *names[:2]) if rows in BEST_WITH_ROLES[problem.scales] else (*names[:2], *ours[:1])
        names = (*firsts, *ours[1:], *names[2:])
    return {"product": names, "splits": splits_of(problem)}


def splits_of(problem: Any) -> tuple[int, ...]:
    """Parts along K. Each has at least one strip of 128 bytes of a row."""
    return tuple(splits for splits in SPLITS if splits * GROUP <= max(problem.k * problem.item_size, GROUP))


def whole() -> Constraint:
    """The library's product has no parts."""
    return Constraint(("product", "splits"), lambda name, splits: name != LIBRARY or splits == 1, "the library decides on parts")


def choices(
    problem: Any, rows: int, hardware: Hardware, *, library: bool = True, roles: bool = False, one_program_each: bool = False
) -> list[dict[str, Value]]:
    """Products for seeds: each with the parts that occupy all processors, then Triton's with twice as many.

    `one_program_each`: for a kernel with one program a processor, first with `splits_at_once`, then with those that occupy all.
    """
    space = parameters(problem, rows, hardware, library=library, roles=roles)
    parts = with_roles(problem, rows, hardware) if roles else {}
    choices_: list[dict[str, Value]] = []
    for attempt in (0, 1):
        for name in space["product"]:
            if name in parts:
                choices_.append({"product": name, "splits": parts[name]})
                continue
            filling = splits_for(name, rows, problem.n, hardware)
            twice = 1 if name == LIBRARY else 2 * filling
            at_once = splits_at_once(name, rows, problem.n, hardware)
            splits = ((at_once, filling) if one_program_each else (filling, twice))[attempt]
            choices_.append({"product": name, "splits": min(splits, int(space["splits"][-1]))})
    return list({tuple(choice.values()): choice for choice in choices_}.values())


def bsp(problem: Any, hardware: Hardware) -> VariantSpace:
    """The baseline has no parameters, but for e4m3 its product."""
    if problem.dtype != "e4m3":
        return VariantSpace("bsp", seeds=(Config("bsp"),))
    seeds = tuple(Config.of("bsp", choice) for choice in choices(problem, problem.m, hardware)[:3])
    return VariantSpace("bsp", parameters(problem, problem.m, hardware), (whole(),), seeds)
