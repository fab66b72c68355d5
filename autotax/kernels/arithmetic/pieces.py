"""How `decomposed` cuts the shard that arrives last, whose product nothing hides: for its host side and for the plan."""

from __future__ import annotations

PIECES = {"halves": 2}
"""The ways of `products` that are `each` with the last shard in pieces. Four were tried: they are slower than two or one."""


def last_pieces(rows: int, products: str) -> list[tuple[int, int]]:
    """The rows (first, end) of each piece of the last shard. All pieces are as high, but the last ones may be lower or empty."""
    count = PIECES.get(products, 1)
    height = -(-rows // count)
    return [(min(piece * height, rows), min((piece + 1) * height, rows)) for piece in range(count)]
