"""A kernel of one GPU without any communication: autotax tunes its block and warps against torch.

Run it: python examples/callables/local_kernel.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import autotax
from autotax.kernels.context import Context
from autotax.operators.inputs import Call, Draw

ROWS, COLUMNS = 64, 250


@triton.jit
def softmax_kernel(x, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS_EACH: tl.constexpr, TARGET: tl.constexpr):  # noqa: ARG001 - launch gives it
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0) * ROWS_EACH, (tl.program_id(0) + 1) * ROWS_EACH):
        values = tl.load(x + row * COLUMNS + at, mask=at < COLUMNS, other=-float("inf")).to(tl.float32)
        powers = tl.exp(values - tl.max(values, 0))
        tl.store(out + row * COLUMNS + at, powers / tl.sum(powers, 0), mask=at < COLUMNS)


def make(params: Mapping[str, Any], context: Context) -> Callable[..., Any]:
    def call(x: Tensor, out: Tensor) -> None:
        context.launch(
            softmax_kernel, (ROWS // params["rows_each"],), x, out, COLUMNS=COLUMNS, BLOCK=256, ROWS_EACH=params["rows_each"],
            num_warps=params["num_warps"],
        )  # fmt: skip

    return call


def baseline(context: Context) -> Callable[..., Any]:
    return lambda x, out: None if context.dry else torch.softmax(x, 1, out=out)


def inputs(draw: Draw) -> Call:
    return Call((draw.normal(ROWS, COLUMNS, tensor=1),), draw.empty(ROWS, COLUMNS))


def reference(calls: Sequence[Call], rank: int) -> Tensor:
    return calls[rank].tensors[0].float().softmax(1)


def main(**settings: Any) -> autotax.Verdict:
    """Tunes on one rank. Settings are those of `autotax.tune`."""
    return autotax.tune_callable(
        make, tunables={"rows_each": [1, 4, 16], "num_warps": [1, 4]}, inputs=inputs, reference=reference, baseline=baseline,
        world_size=1, **{"dtype": "fp32", "trials": 7} | settings,
    )  # fmt: skip


if __name__ == "__main__":
    verdict = main()
    print(verdict)
