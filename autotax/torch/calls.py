"""Translates calls of torch's operators into problems, and their tensors into a kernel's arguments and results.

Every answer here follows from shapes, types and layouts, which are the same on all ranks; addresses never decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotax.kernels.all_gather_gemm.gathered import gathered, keeps_gathered
from autotax.nn.consensus import DTYPES
from autotax.nn.tensor_checks import FREED, VECTOR_BYTES, require_memory
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter

GATHER, SCATTER, REDUCE = "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "fused_matmul_all_reduce"
_LAYOUT = "B is neither row-major nor laid out as W.t() is"
_TORCHS = "torch says what is wrong with these arguments"


class NotTaken(Exception):
    """Raised for a call that stays torch's. The message is the reason, in a few words."""


@dataclass(frozen=True)
class GatherCall:
    """One kind of call of fused_all_gather_matmul: the product with `bs[first]` is fused, the others follow."""

    problem: AllGatherGemm
    gather_dim: int
    first: int
    products: int
    return_a: bool

    @classmethod
    def of(cls, a: Tensor, bs: Sequence[Tensor], gather_dim: int, ranks: int, *, return_a: bool) -> GatherCall:
        """Raises NotTaken."""
        if a.dim() < 2 or not bs or not 0 <= gather_dim < a.dim():
            raise NotTaken(_TORCHS)
        last = gather_dim == a.dim() - 1
        k = a.shape[-1] * (ranks if last else 1)
        if any(b.dim() != 2 or b.shape[0] != k for b in bs):
            raise NotTaken(_TORCHS)
        _require_types(a, *bs)
        rows = math.prod(a.shape[:-1]) * (1 if last else ranks)
        layouts = [layout_of(b) for b in bs]
        # The weight's present layout comes first: most variants read it without a copy.
        order = sorted(range(len(bs)), key=lambda index: (layouts[index] != "nk", -bs[index].shape[1]))
        first = next((index for index in order if layouts[index]), None)
        if first is None:
            raise NotTaken(_LAYOUT)
        n, layout = bs[first].shape[1], str(layouts[first])
        problem = AllGatherGemm(rows, n, k, DTYPES[a.dtype], "k" if last else "m", ranks, layout)
        return cls(problem, gather_dim, first, len(bs), return_a)

    @property
    def needs_gathered(self) -> bool:
        """Whether the caller or a further product needs the gathered A."""
        return self.return_a or self.products > 1

    def require(self, kernel: Any) -> None:
        """Raises NotTaken if `kernel` cannot return the gathered A that this call needs."""
        if self.needs_gathered and not keeps_gathered(kernel):
            raise NotTaken(f"{kernel.config.variant} does not keep the gathered A that is asked for")

    def run(self, kernel: Any, a: Tensor, bs: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
        """Runs the kernel. The results have the layouts of torch's operator."""
        dim, problem = self.gather_dim, self.problem
        last, flat = problem.shard == "k", a.dim() == 2
        moved = a if last or not dim else a.movedim(dim, 0)
        lead = moved.shape[:-1] if last else (moved.shape[0] * problem.world_size, *moved.shape[1:-1])
        x = ready(a if flat else moved.reshape(-1, a.shape[-1]))
        out = x.new_empty(problem.m, problem.n)
        kernel(x, aligned(bs[self.first].t()), out)
        whole = gathered(kernel, x, own=self.return_a) if self.needs_gathered else None

        def shaped(matrix: Tensor) -> Tensor:
            if flat:
                return matrix
            result = matrix.view(*lead, matrix.shape[1])
            return result if last or not dim else result.movedim(0, dim)

        results = [shaped(out if index == self.first else torch.mm(whole, b)) for index, b in enumerate(bs)]  # type: ignore[arg-type]
        return shaped(whole) if self.return_a and whole is not None else None, results


@dataclass(frozen=True)
class ScatterCall:
    """One kind of call of fused_matmul_reduce_scatter."""

    problem: GemmReduceScatter
    scatter_dim: int
    average: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, ranks: int) -> ScatterCall:
        """Raises NotTaken."""
        if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0] or reduce_op not in ("sum", "avg"):
            raise NotTaken(_TORCHS)
        if not 0 <= scatter_dim < a.dim():
            raise NotTaken(_TORCHS)
        if scatter_dim == a.dim() - 1:
            raise NotTaken("columns are scattered, and kernels scatter rows")
        if a.shape[scatter_dim] % ranks:
            raise NotTaken(_TORCHS)
        _require_types(a, b)
        layout = layout_of(b)
        if layout is None:
            raise NotTaken(_LAYOUT)
        rows = math.prod(a.shape[:-1])
        problem = GemmReduceScatter(rows, b.shape[1], b.shape[0], DTYPES[a.dtype], "scattered", ranks, layout)
        return cls(problem, scatter_dim, reduce_op == "avg")

    def require(self, kernel: Any) -> None:
        """Every kernel can serve this call."""

    def run(self, kernel: Any, a: Tensor, b: Tensor) -> Tensor:
        """Runs the kernel. The result is contiguous, like torch's."""
        dim, problem = self.scatter_dim, self.problem
        moved = a.movedim(dim, 0) if dim else a
        x = ready(a if a.dim() == 2 else moved.reshape(-1, problem.k))
        out = x.new_empty(problem.out_rows, problem.n)
        kernel(x, aligned(b.t() if problem.weight == "nk" else b), out)
        if self.average:
            out.div_(problem.world_size)
        if a.dim() == 2:
            return out
        result = out.view(moved.shape[0] // problem.world_size, *moved.shape[1:-1], problem.n)
        return result.movedim(0, dim).contiguous() if dim else result


@dataclass(frozen=True)
class ReduceCall:
    """One kind of call of fused_matmul_all_reduce, which torch lacks: every rank gets the whole sum."""

    problem: GemmReduceScatter
    batch_invariant: bool = False

    @classmethod
    def of(cls, a: Tensor, b: Tensor, ranks: int, batch_invariant: bool = False) -> ReduceCall:
        """Raises NotTaken."""
        if not a.dim() or b.dim() != 2 or a.shape[-1] != b.shape[0]:
            raise NotTaken(_TORCHS)
        _require_types(a, b)
        layout = layout_of(b)
        if layout is None:
            raise NotTaken(_LAYOUT)
        rows = math.prod(a.shape[:-1])
        problem = GemmReduceScatter(rows, b.shape[1], b.shape[0], DTYPES[a.dtype], "replicated", ranks, layout)
        return cls(problem, batch_invariant)

    def require(self, kernel: Any) -> None:
        """Raises NotTaken if the winner is a separate product and all-reduce, which the caller runs itself."""
        if kernel.config.variant == registry.of(self.problem).baseline:
            raise NotTaken("a product and then an all-reduce are the fastest")

    def run(self, kernel: Any, a: Tensor, b: Tensor) -> Tensor:
        """Runs the kernel. The result is contiguous."""
        problem = self.problem
        x = ready(a.reshape(-1, problem.k))
        out = x.new_empty(problem.m, problem.n)
        kernel(x, aligned(b.t() if problem.weight == "nk" else b), out)
        return out.view(*a.shape[:-1], problem.n)


Asked = GatherCall | ScatterCall | ReduceCall


def _require_types(a: Tensor, *bs: Tensor) -> None:
    if a.dtype not in DTYPES:
        raise NotTaken(f"A is {a.dtype}; kernels take {', '.join(DTYPES.values())}")
    if any(b.dtype is not a.dtype or b.device != a.device for b in bs):
        raise NotTaken("A and B have different types or devices")
    if not a.numel() or not all(b.numel() for b in bs):
        raise NotTaken("a tensor is empty")


def layout_of(b: Tensor) -> str | None:
    """How B [k, n] lies in memory: `nk`, the transposed view of a contiguous weight; `kn`, row-major; or None."""
    return "nk" if b.t().is_contiguous() else "kn" if b.is_contiguous() else None


def ready(matrix: Tensor) -> Tensor:
    """Returns the matrix, or a copy if it is not contiguous and aligned."""
    return aligned(matrix.contiguous())


def aligned(matrix: Tensor) -> Tensor:
    """Returns the matrix, or a copy if its address is not aligned. A copy does not affect other ranks.

    Raises UsageError if its storage was freed.
    """
    address = matrix.data_ptr()
    if address < FREED:
        require_memory("A or B", matrix)
    return matrix.clone(memory_format=torch.preserve_format) if address % VECTOR_BYTES else matrix
