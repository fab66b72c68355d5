"""The operators that torch calls in place of its own. Each looks its plan up and runs the plan's kernel, or torch's operator.

Calls are translated into problems, and their tensors into a kernel's arguments and results. Every answer here follows from
shapes, types and layouts, which are the same on all ranks; addresses never decide.

The operators are also torch.ops.autotax.fused_*, which do not depend on `install`. Torch has no counterpart of
`matmul_all_reduce`, which servers compute at the end of attention and of each MLP.

A call without a kernel runs torch's implementation or a server's all-reduce. On GPUs those are torch's pipelined operators. Torch
has none for CPU ranks, where its definition of the operators by plain collectives runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor, is_grad_enabled

from autotax.kernels.all_gather_gemm.gathered import gathered, keeps_gathered
from autotax.nn.consensus import DTYPES
from autotax.nn.tensor_checks import FREED, VECTOR_BYTES, require_memory
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.torch.plans import GRADIENT, TORCH, Call, NotTaken, count_of, plan_of, plans_of

GATHER, SCATTER, REDUCE = "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "fused_matmul_all_reduce"
_LAYOUT = "B is neither row-major nor laid out as W.t() is"
REFUSED_BY_TORCH = "torch says what is wrong with these arguments"


@dataclass(frozen=True)
class GatherCall(Call):
    """One kind of call of fused_all_gather_matmul: the product with `bs[first]` is fused, the others follow."""

    problem: AllGatherGemm
    gather_dim: int
    first: int
    products: int
    return_a: bool

    @classmethod
    def of(cls, a: Tensor, bs: Sequence[Tensor], gather_dim: int, ranks: int, *, return_a: bool) -> GatherCall:
        if a.dim() < 2 or not bs or not 0 <= gather_dim < a.dim():
            raise NotTaken(REFUSED_BY_TORCH)
        last = gather_dim == a.dim() - 1
        k = a.shape[-1] * (ranks if last else 1)
        if any(b.dim() != 2 or b.shape[0] != k for b in bs):
            raise NotTaken(REFUSED_BY_TORCH)
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
class ScatterCall(Call):
    """One kind of call of fused_matmul_reduce_scatter."""

    problem: GemmReduceScatter
    scatter_dim: int
    average: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, ranks: int) -> ScatterCall:
        if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0] or reduce_op not in ("sum", "avg"):
            raise NotTaken(REFUSED_BY_TORCH)
        if not 0 <= scatter_dim < a.dim():
            raise NotTaken(REFUSED_BY_TORCH)
        if scatter_dim == a.dim() - 1:
            raise NotTaken("columns are scattered, and kernels scatter rows")
        if a.shape[scatter_dim] % ranks:
            raise NotTaken(REFUSED_BY_TORCH)
        return cls(_summed(a, b, "scattered", ranks), scatter_dim, reduce_op == "avg")

    def run(self, kernel: Any, a: Tensor, b: Tensor) -> Tensor:
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
class ReduceCall(Call):
    """One kind of call of fused_matmul_all_reduce, which torch lacks: every rank gets the whole sum."""

    problem: GemmReduceScatter
    batch_invariant: bool = False

    @classmethod
    def of(cls, a: Tensor, b: Tensor, ranks: int, batch_invariant: bool = False) -> ReduceCall:
        if not a.dim() or b.dim() != 2 or a.shape[-1] != b.shape[0]:
            raise NotTaken(REFUSED_BY_TORCH)
        return cls(_summed(a, b, "replicated", ranks), batch_invariant)

    def require(self, kernel: Any) -> None:
        # The caller itself runs a separate product and all-reduce.
        if kernel.config.variant == registry.of(self.problem).baseline:
            raise NotTaken("a product and then an all-reduce are the fastest")

    def run(self, kernel: Any, a: Tensor, b: Tensor) -> Tensor:
        problem = self.problem
        x = ready(a.reshape(-1, problem.k))
        out = x.new_empty(problem.m, problem.n)
        kernel(x, aligned(b.t() if problem.weight == "nk" else b), out)
        return out.view(*a.shape[:-1], problem.n)


def _summed(a: Tensor, b: Tensor, output: str, ranks: int) -> GemmReduceScatter:
    """The problem of a sum of products over the ranks. Raises NotTaken."""
    _require_types(a, b)
    if (layout := layout_of(b)) is None:
        raise NotTaken(_LAYOUT)
    return GemmReduceScatter(math.prod(a.shape[:-1]), b.shape[1], b.shape[0], DTYPES[a.dtype], output, ranks, layout)


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


# The operators.

def all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """gather(A) and gather(A) @ B for each B [k, n], like symm_mem::fused_all_gather_matmul.

    A [..., k] holds this rank's part of dimension `gather_dim`. Results have the layouts of torch's results.
    """
    if is_grad_enabled() and (A.requires_grad or any(B.requires_grad for B in Bs)):
        count_of(GATHER, "", TORCH, GRADIENT).calls += 1
        return torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)
    key = (GATHER, A.shape, A.dtype, gather_dim, return_A, *[(B.shape, B.stride(), B.dtype) for B in Bs])
    plan = plan_of(key, group_name, A.device, lambda ranks: GatherCall.of(A, Bs, gather_dim, ranks, return_a=return_A))
    if not plan.counted():
        return torch_all_gather_matmul(A, Bs, gather_dim, group_name, return_A=return_A)
    return cast(tuple[Tensor | None, list[Tensor]], plan.run(A.device, A, Bs))


def matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's part along `scatter_dim` of the sum, or with "avg" the mean, of A @ B over the ranks, like
    symm_mem::fused_matmul_reduce_scatter. A [..., k] and B [k, n] are this rank's.
    """
    if is_grad_enabled() and (A.requires_grad or B.requires_grad):
        count_of(SCATTER, "", TORCH, GRADIENT).calls += 1
        return torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    key = (SCATTER, A.shape, A.dtype, scatter_dim, reduce_op, B.shape, B.stride(), B.dtype)
    plan = plan_of(key, group_name, A.device, lambda ranks: ScatterCall.of(A, B, reduce_op, scatter_dim, ranks))
    if not plan.counted():
        return torch_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    return cast(Tensor, plan.run(A.device, A, B))


def matmul_all_reduce(A: Tensor, B: Tensor, group_name: str, batch_invariant: bool = False) -> Tensor:
    """The sum of A @ B over the ranks, on every rank. A [..., k] and B [k, n] are this rank's.

    With `batch_invariant` a row of the result has the same bits however many rows there are: one config runs all calls. A call
    without a kernel is a product and the all-reduce of the group: torch's all-reduce, or one set by `reduce_by`.
    """
    if is_grad_enabled() and (A.requires_grad or B.requires_grad):
        count_of(REDUCE, "", TORCH, GRADIENT).calls += 1
        return torch_matmul_all_reduce(A, B, group_name)
    if batch_invariant and A.dim() > 1 and A.numel() > (most := plans_of(group_name, A.device).invariant_rows) * A.shape[-1]:
        parts = A.reshape(-1, A.shape[-1]).split(most)
        return torch.cat([matmul_all_reduce(part, B, group_name, True) for part in parts]).view(*A.shape[:-1], B.shape[1])
    key = (REDUCE, A.shape, A.dtype, B.shape, B.stride(), B.dtype, *["batch-invariant"] * batch_invariant)
    plan = plan_of(key, group_name, A.device, lambda ranks: ReduceCall.of(A, B, ranks, batch_invariant))
    if not plan.counted():
        return torch_matmul_all_reduce(A, B, group_name)
    return cast(Tensor, plan.run(A.device, A, B))


# Calls without a kernel.

_all_reduces: dict[str, Callable[[Tensor], Tensor]] = {}


def torch_all_gather_matmul(
    a: Tensor, bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    run = torch_symm_mem._fused_all_gather_matmul if a.is_cuda else torch_symm_mem._fused_all_gather_matmul_fallback
    return run(a, bs, gather_dim, group_name, return_A=return_A)  # type: ignore[arg-type]


def torch_matmul_reduce_scatter(a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    if a.is_cuda:
        return torch_symm_mem._fused_matmul_reduce_scatter(a, b, reduce_op, scatter_dim, group_name)  # type: ignore[arg-type]
    if reduce_op not in ("sum", "avg"):
        raise ValueError("reduce_op must be sum or avg")
    # gloo has no average
    result = torch_symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", scatter_dim, group_name)  # type: ignore[arg-type]
    if reduce_op == "avg":
        result = result / dist.distributed_c10d._resolve_process_group(group_name).size()  # type: ignore[arg-type]
    return result


def reduce_by(group_name: str, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Sets the all-reduce of a group for calls without a kernel. `all_reduce` may write into its argument."""
    _all_reduces[group_name] = all_reduce


def torch_matmul_all_reduce(a: Tensor, b: Tensor, group_name: str) -> Tensor:
    """A product, and then the all-reduce of its group."""
    product = torch.matmul(a, b)
    if all_reduce := _all_reduces.get(group_name):
        return all_reduce(product)
    dist.all_reduce(product, group=dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]
    return product
