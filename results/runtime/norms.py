"""A row-parallel layer, its sum, residual and norm for few rows, three ways, in graphs whose weights come from memory:

    python results/runtime/norms.py --db winners.db [--json norms.json]

- The vendor's product, NCCL's sum in place, and our kernel that adds and norms.
- A winner of GEMM + All-Reduce with the residual, and our norm.
- The vendor's product, and a winner of all-reduce-norm.

Each graph has as many layers as weights of 192 MiB in all; a figure is the median of replays by the number of layers. The ways
take turns, and their results are compared first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from turns import main, timed

from autotax.core.problem import ceil_div
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels.all_reduce_norm.norm import norm_kernel
from autotax.nn import AllReduceNorm, LinearAllReduce
from autotax.operators.all_reduce_norm import AllReduceNorm as Problem
from autotax.spaces import space_for

SHAPES = ((8192, 7168), (8192, 2560), (8192, 4096), (5120, 2560))
"""n and k of a rank."""
ROWS = (1, 16)
BYTES = 192 << 20


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    """The microseconds of each way on this rank."""
    records = []
    with torch.no_grad():
        for n, k in SHAPES:
            for m in ROWS:
                records.append({"m": m, "n": n, "k": k} | ways_of(world, m, n, k, db))
    return records


def ways_of(world: World, m: int, n: int, k: int, db: str | None) -> dict[str, Any]:
    layers = max(2, BYTES // (2 * n * k))
    weights = [torch.randn(n, k, device=world.device, dtype=torch.bfloat16) / k**0.5 for _ in range(layers)]
    torch.manual_seed(0)  # ranks have one residual
    x, residual = (torch.randn(m, size, device=world.device, dtype=torch.bfloat16) for size in (k, n))
    weight, products = torch.ones(n, device=world.device, dtype=torch.bfloat16), torch.empty_like(residual)
    norm, library_norm = AllReduceNorm(n, m, sizes=[m], db=db), baseline(world, m, n)
    first = LinearAllReduce(weights[0], None, m, sizes=[m], db=db, norm=norm)
    rest = [first, *(LinearAllReduce(weight_of_layer, like=first) for weight_of_layer in weights[1:])]
    total, y = torch.empty_like(residual), torch.empty_like(residual)

    def library() -> list[Tensor]:
        for own in weights:
            torch.mm(x, own.t(), out=products)
            dist.all_reduce(products)
            add_and_norm(library_norm, products, residual, weight, total, y)
        return [y, total]

    def ours(apart: bool) -> Callable[[], Sequence[Tensor]]:
        def run() -> Sequence[Tensor]:
            first._apart = {m: apart}
            return [layer.normed(x, weight, residual) for layer in rest][-1]

        return run

    measured, chosen = dict(first._apart), [weight_of_layer.config for weight_of_layer in (first.choices[-1], norm.choices[-1])]
    ways = {"library": library, "sum, norm": ours(False), "product, norm": ours(True)}
    us = timed(world, ways, layers)
    assert first.failure() is None and norm.failure() is None
    first.close()
    norm.close()
    library_norm.close()
    return us | {"configs": [config and str(config) for config in chosen], "measured": measured.get(m)}


def add_and_norm(module: AllReduceNorm, total: Tensor, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor) -> None:
    """Enqueues the kernel that the baseline of all-reduce-norm runs behind its sum."""
    kernel, rows = module._of_greatest()[0], len(total)
    grid = (ceil_div(rows, kernel.rows),)
    kernel.context.launch(norm_kernel, grid, total, residual, weight, new_residual, y, y, rows, 1e-6, **kernel.constants)


def baseline(world: World, m: int, hidden: int) -> AllReduceNorm:
    """The module with the config of the baseline."""
    problem = Problem(m, hidden, world_size=world.size)
    config = space_for(problem, detect(world.backend)).default("bsp")
    return AllReduceNorm(hidden, m, sizes=[m], config=config, device=world.device)


def show(record: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {record[name]:.1f}" for name in ("library", "sum, norm", "product, norm"))
    m, n, k, configs, measured = (record[name] for name in ("m", "n", "k", "configs", "measured"))
    return f"m {m:3} x {n} x {k}: {times} us; configs {configs}, measured {measured}"


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
