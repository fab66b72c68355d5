"""Names of tiles of warps with roles."""


def tile_for(scales: str, tile: str) -> str:
    """The name of a tile. Without scales groups take no turns at the buffers, and there are no strips."""
    rows, columns, stages, warps, strips = tile.split("x")
    if scales == "none":
        warps, strips = str(int(rows) // 16), "1"
    return "roles-" + "x".join((rows, columns, stages, warps, strips))
