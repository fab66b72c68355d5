"""The boundary between two products under sequence parallelism, three ways, in graphs whose weights come from memory:

    PYTHONPATH=. python results/runtime/boundary.py [--db winners.db] [--json boundary.json]

- NCCL: the vendor's product, the reduce-scatter, one kernel that adds and norms, the gather, the vendor's product.
- torch: `fused_matmul_reduce_scatter`, the same kernel, `fused_all_gather_matmul`.
- ours: `LinearReduceScatter(norm=)` and `AllGatherLinear`, with the configs that look-ups answer.

`sum` is the first product, its sum and the norm; `all` is the whole boundary. The ways take turns, replay by replay, and the
results of each are compared with those of NCCL before it is timed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from norms import add_and_norm, baseline
from torch import Tensor
from turns import main, timed

from autotax.heap import World
from autotax.nn import AllGatherLinear, AllReduceNorm, LinearReduceScatter

ROWS = (512, 1024, 2048, 4096)
HIDDEN, BEFORE, AFTER = 8192, 7168, 7168
"""Columns of the residual, and those of a rank before and after the boundary."""
LAYERS = 2


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    """The microseconds of each way on this rank, for each number of rows."""
    with torch.no_grad():
        return [ways_of(world, m, db) for m in ROWS]


def ways_of(world: World, m: int, db: str | None) -> dict[str, Any]:
    """The microseconds of each way for this number of rows, and the configs of ours."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=world.device, dtype=torch.bfloat16)

    downs = [drawn(HIDDEN, BEFORE) / BEFORE**0.5 for _ in range(LAYERS)]
    ups = [drawn(AFTER, HIDDEN) / HIDDEN**0.5 for _ in range(LAYERS)]
    x, residual = drawn(m, BEFORE), drawn(m // world.size, HIDDEN)
    weight = torch.ones(HIDDEN, device=world.device, dtype=torch.bfloat16)
    norm, library_norm = AllReduceNorm(HIDDEN, m, sizes=[m], db=db), baseline(world, m // world.size, HIDDEN)
    down = LinearReduceScatter(downs[0], None, m, sizes=[m], db=db, norm=norm)
    up = AllGatherLinear(ups[0], None, m, sizes=[m], db=db)
    layers = [(LinearReduceScatter(b, like=down), AllGatherLinear(c, like=up)) for b, c in zip(downs, ups, strict=True)]
    products, sums, gathered, last = (
        x.new_empty(shape) for shape in ((m, HIDDEN), tuple(residual.shape), (m, HIDDEN), (m, AFTER))
    )
    y, more = torch.empty_like(residual), torch.empty_like(residual)
    name = world.data.group_name

    def nccl(whole: bool) -> list[Tensor]:
        for b, c in zip(downs, ups, strict=True):
            torch.mm(x, b.t(), out=products)
            dist.reduce_scatter_tensor(sums, products)
            add_and_norm(library_norm, sums, residual, weight, more, y)
            if whole:
                dist.all_gather_into_tensor(gathered, y)
                torch.mm(gathered, c.t(), out=last)
        return [y, more, *[last] * whole]

    def fused(whole: bool) -> list[Tensor]:
        after: list[Tensor] = []
        for b, c in zip(downs, ups, strict=True):
            total = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b.t(), "sum", 0, name)
            add_and_norm(library_norm, total, residual, weight, more, y)
            if whole:
                after = torch.ops.symm_mem.fused_all_gather_matmul(y, [c.t()], 0, name)[1]
        return [y, more, *after]

    def ours(whole: bool) -> list[Tensor]:
        after: list[Tensor] = []
        for first, second in layers:
            rows, total = first.normed(x, weight, residual)
            if whole:
                after = [second(rows)]
        return [rows, total, *after]

    ways = {"nccl": nccl, "torch": fused, "ours": ours}
    parts = {"sum": False, "all": True}
    us = {
        part: timed(world, {name: partial(way, whole) for name, way in ways.items()}, LAYERS) for part, whole in parts.items()
    }
    return {"m": m, "configs": [str(layer.choices[-1].config) for layer in (down, up)]} | us



def show(record: dict[str, Any]) -> str:
    parts = [f"{part} {', '.join(f'{way} {us:.1f}' for way, us in record[part].items())} us" for part in ("sum", "all")]
    return f"m {record['m']}: {'; '.join(parts)}; configs {record['configs']}"


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
