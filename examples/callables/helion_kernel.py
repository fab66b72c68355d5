"""A kernel of Helion: Helion generates and tunes the kernel of one GPU, autotax verifies it and measures it against torch.

Run it where Helion is installed (pip install helion): python examples/callables/helion_kernel.py
`tunables` are parameters of the Helion config, which Helion would otherwise search by itself without other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import helion
import helion.language as hl
import torch
from torch import Tensor

import autotax
from autotax.kernels.context import Context
from autotax.operators.inputs import Call, Draw

ON_GPU = torch.cuda.is_available()  # Triton's interpreter runs few programs, and in bf16 it adds wrongly
ROWS, COLUMNS = (4096, 4096) if ON_GPU else (64, 256)


def kernel(x: Tensor, y: Tensor, out: Tensor) -> None:
    for tile in hl.tile(out.size()):
        out[tile] = x[tile] + y[tile]


def make(params: Mapping[str, Any], context: Context) -> Callable[..., Any]:
    config = helion.Config(block_sizes=[params["rows"], params["columns"]], num_warps=params["num_warps"])
    add = helion.kernel(kernel, config=config, static_shapes=True)
    x = context.empty((ROWS, COLUMNS), torch.bfloat16 if ON_GPU else torch.float32)
    if not context.dry:
        add(x, x, torch.empty_like(x))  # compiles here, because no rank may compile while its peers measure

    def call(x: Tensor, y: Tensor, out: Tensor) -> None:
        if not context.dry:
            add(x, y, out)

    return call


def baseline(context: Context) -> Callable[..., Any]:
    return lambda x, y, out: None if context.dry else torch.add(x, y, out=out)


def inputs(draw: Draw) -> Call:
    return Call((draw.normal(ROWS, COLUMNS, tensor=1), draw.normal(ROWS, COLUMNS, tensor=2)), draw.empty(ROWS, COLUMNS))


def reference(calls: Sequence[Call], rank: int) -> Tensor:
    x, y = calls[rank].tensors
    return x.float() + y.float()


def main(**settings: Any) -> autotax.Verdict:
    """Tunes on one GPU. Settings are those of `autotax.tune`."""
    return autotax.tune_callable(
        make, tunables={"rows": [1, 4, 16], "columns": [COLUMNS // 4, 256], "num_warps": [4, 8]}, inputs=inputs,
        reference=reference, baseline=baseline, world_size=1,
        **{"dtype": "bf16" if ON_GPU else "fp32", "trials": 12} | settings,
    )  # fmt: skip


if __name__ == "__main__":
    print(main())
