"""Optional addends of the sum, applied when it is stored: a bias [n], and a residual with the shape of the output.

Both are added in float32 before the sum is rounded. With a replicated output all ranks get the same rounded sum. Each
rank adds its own bias and residual to it, and the result is rounded again. Rows of padding stay zero. A call without
addends compiles to a kernel without their arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels.kernel import Kernel
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

BIAS, RESIDUAL = 1, 2


@triton.jit
def with_addends(
    total, bias, residual, added, row, row_end, col, n, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """total + bias[col:] + residual[row:row_end, col:] for rows below `row_end`. The bits of `added` say which
    addends are present.

    `residual` has rows of n elements, a multiple of ALIGNED.
    """
    if added is not None:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        below = (r < row_end)[:, None]
        shared = tl.load(bias + c, mask=(c < n) & (added % 2 == 1), other=0.0).to(tl.float32)
        total += tl.where(below, shared[None, :], 0.0)
        size: tl.constexpr = residual.dtype.element_ty.primitive_bitwidth // 8
        at = tl.multiple_of(residual + r.to(tl.int64)[:, None] * n + c[None, :], (size, ALIGNED * size))
        total += tl.load(at, mask=below & (c < n)[None, :] & (added >= 2), other=0.0).to(tl.float32)
    return total


def addends(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Any, Any, Any]:
    """Returns the kernel arguments (bias, residual, which). All are None if nothing is added. Otherwise `out`
    replaces a missing addend, and the kernel does not read it.
    """
    if bias is None and residual is None:
        return None, None, None
    which = BIAS * (bias is not None) + RESIDUAL * (residual is not None)
    return out if bias is None else bias, out if residual is None else residual, which


class Adding(Kernel[GemmReduceScatter]):
    """A kernel whose calls also take a bias and a residual. Both are contiguous, start at multiples of 16 bytes, and
    share no memory with the output.
    """

    ADDS = True
    """For callers that may not import this module: they test this attribute."""

    @abstractmethod
    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        """See Kernel.__call__."""
