"""Torch's fused operators with products of e4m3: their calls as problems, and the operators that `install` puts in their place.

`quantised_matmul` has no counterpart in torch: it is the parallel layer of a serving engine, with an FP8 weight and wide inputs.
A call keeps torch's own operator where it has a bias in front of the collective, a scale of the result, gathers or scatters
another dimension than the first, or has scales of blocks. Fast accumulation is a permission: it makes a problem of its own, for
which a winner with exact sums may answer too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.heap.collectives import all_gather, reduce_scatter
from autotax.kernels.all_gather_gemm.gathered import gathered_codes, keeps_codes
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.scaled import (
    ACCUMULATE,
    SCALES_OF,
    accumulate_of,
    greatest_magnitude,
    laid_out,
    library_product,
    limit_scales,
    quantised,
    scales_of,
    scales_shape,
)
from autotax.torch.plans import Call, NotTaken, plan_of
from autotax.torch.symm_mem import REFUSED_BY_TORCH, aligned, layout_of, ready

GATHER_SCALED, SCATTER_SCALED = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
QUANTISED = "fused_quantised_matmul"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
"""The collectives of `quantised_matmul`."""
ARGUMENTS = {
    GATHER_SCALED: (
        "A", "Bs", "A_scale", "B_scales", "gather_dim", "group_name", "biases", "result_scales", "out_dtypes", "use_fast_accum",
    ),
    SCATTER_SCALED: (
        "A", "B", "A_scale", "B_scale", "reduce_op", "orig_scatter_dim", "scatter_dim_after_maybe_reshape", "group_name",
        "output_shape", "bias", "result_scale", "out_dtype", "use_fast_accum",
    ),
}  # fmt: skip
"""Names of the arguments in the schemas of torch 2.11 to 2.15."""
FALLBACKS = {
    GATHER_SCALED: "_fused_all_gather_scaled_matmul_fallback",
    SCATTER_SCALED: "_fused_scaled_matmul_reduce_scatter_fallback",
}
TORCHS = {GATHER_SCALED: "_fused_all_gather_scaled_matmul", SCATTER_SCALED: "_fused_scaled_matmul_reduce_scatter"}
CODES = torch.float8_e4m3fn
OPERANDS = {CODES: "e4m3", torch.float8_e5m2: "e5m2"}
"""Types of A: gradients come in e5m2."""
RESULTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _require(a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype | None, bias: object, result_scale: object) -> str:
    """The type of a result. Raises NotTaken."""
    if b.dim() != 2 or a.dim() < 2:
        raise NotTaken(REFUSED_BY_TORCH)
    if a.dtype not in OPERANDS or b.dtype is not CODES:
        raise NotTaken(f"A is {a.dtype} and B {b.dtype}; kernels multiply {CODES}, or an A in e5m2 by it")
    if dtype not in RESULTS:
        raise NotTaken(f"the result is {dtype}; kernels give {', '.join(map(str, RESULTS))}")
    if bias is not None or result_scale is not None:
        raise NotTaken("a bias or a scale of the result is given")
    if layout_of(b) != "nk":
        raise NotTaken("B is not laid out as W.t() is")
    if scale_b.numel() not in (1, b.shape[1]):
        raise NotTaken("B has scales of blocks")
    if not a.numel() or b.shape[1] % 16 or b.shape[0] % 16:
        raise NotTaken("a size is no multiple of 16, or zero")
    return RESULTS[dtype]


def _layout(scale_a: Tensor, scale_b: Tensor, rows: int, whole: int) -> str:
    """`tensor` or `row`. Raises NotTaken. `rows` are those of a shard of A, `whole` those of A."""
    if scale_a.dtype is not torch.float32 or scale_b.dtype is not torch.float32:
        raise NotTaken(f"scales are {scale_a.dtype} and {scale_b.dtype}; kernels take float32")
    count = scale_a.numel()
    if count == scale_b.numel() == 1:
        return "tensor"
    if count in (rows, whole) and scale_b.numel() > 1:
        return "row"
    raise NotTaken("A and B have different kinds of scales")


@dataclass(frozen=True)
class ScaledGatherCall(Call):
    """One kind of call of fused_all_gather_scaled_matmul: the product with the widest B is fused, the others follow."""

    problem: AllGatherGemm
    first: int
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(
        cls, a: Tensor, bs: Sequence[Tensor], scale_a: Tensor, scales_b: Sequence[Tensor], gather_dim: int, ranks: int,
        more: Sequence[tuple[torch.dtype | None, object, object]], *, fast: bool = False,
    ) -> ScaledGatherCall:  # fmt: skip
        if gather_dim or not bs:
            raise NotTaken("another dimension than the first is gathered")
        names = [_require(a, b, scale, *some) for b, scale, some in zip(bs, scales_b, more, strict=True)]
        rows = math.prod(a.shape[:-1])
        layouts = {_layout(scale_a, scale, rows, rows * ranks) for scale in scales_b}
        if len(layouts) > 1:
            raise NotTaken("Bs have different kinds of scales")
        first = max(range(len(bs)), key=lambda index: bs[index].shape[1])
        n, k = bs[first].shape[1], a.shape[-1]
        if any(b.shape[0] != k for b in bs):
            raise NotTaken(REFUSED_BY_TORCH)
        fields = layouts.pop(), names[first], "none", OPERANDS[a.dtype], ACCUMULATE[fast]
        problem = AllGatherGemm(rows * ranks, n, k, "e4m3", "m", ranks, "nk", *fields)
        return cls(problem, first, tuple(dtype for dtype, *_ in more if dtype))

    def require(self, kernel: Any) -> None:
        if not keeps_codes(kernel):
            raise NotTaken(f"{kernel.config.variant} does not keep the gathered A that is asked for")

    def run(
        self, kernel: Any, a: Tensor, bs: Sequence[Tensor], scale_a: Tensor, scales_b: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the kernel, and the vendor's product for every further B."""
        problem, layout = self.problem, self.problem.scales
        x = ready(a.reshape(-1, problem.k))
        scales = scale_a.reshape(-1)
        if layout == "row" and len(scales) > len(x):
            scales = scales[kernel.context.rank * len(x) :][: len(x)]
        scales = aligned(laid_out(scales.view(-1, 1) if layout == "row" else scales, layout, weight=False))
        shape = (1, -1) if layout == "row" else (1,)
        of_b = [aligned(scale.reshape(shape).contiguous()) for scale in scales_b]
        outs = [b.new_empty(problem.m, b.shape[1], dtype=dtype) for b, dtype in zip(bs, self.dtypes, strict=True)]
        kernel(x, aligned(bs[self.first].t()), scales, of_b[self.first], outs[self.first])
        codes, whole_scales = gathered_codes(kernel, x, scales)
        whole = codes.clone()
        for index, b in enumerate(bs):
            if index != self.first:
                library_product(whole, whole_scales, b.t(), of_b[index], layout, outs[index], fast=problem.accumulate == "fast")
        lead = (a.shape[0] * problem.world_size, *a.shape[1:-1])
        return whole.view(*lead, problem.k), [out.view(*lead, out.shape[1]) for out in outs]


@dataclass(frozen=True)
class ScaledScatterCall(Call):
    """One kind of call of fused_scaled_matmul_reduce_scatter."""

    problem: GemmReduceScatter
    average: bool

    @classmethod
    def of(
        cls, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, reduce_op: str, dims: tuple[int, int], ranks: int,
        more: tuple[torch.dtype | None, object, object], *, fast: bool = False,
    ) -> ScaledScatterCall:  # fmt: skip
        name = _require(a, b, scale_b, *more)
        rows = math.prod(a.shape[:-1])
        if dims != (0, 0) or reduce_op not in ("sum", "avg") or rows % ranks or a.shape[-1] != b.shape[0]:
            raise NotTaken("another dimension than the first is scattered, or ranks do not divide it")
        layout = _layout(scale_a, scale_b, rows, rows)
        fields = layout, name, "none", OPERANDS[a.dtype], ACCUMULATE[fast]
        problem = GemmReduceScatter(rows, b.shape[1], b.shape[0], "e4m3", "scattered", ranks, "nk", *fields)
        return cls(problem, reduce_op == "avg")

    def run(
        self, kernel: Any, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, shape: Sequence[int] | None
    ) -> Tensor:
        """Runs the kernel. `shape` is that of the sum of all rows."""
        problem, layout = self.problem, self.problem.scales
        of_a, of_b = ((-1, 1), (1, -1)) if layout == "row" else ((1,), (1,))
        out = a.new_empty(problem.out_rows, problem.n, dtype={name: dtype for dtype, name in RESULTS.items()}[problem.result])
        scales = aligned(scale_a.reshape(of_a).contiguous())
        kernel(ready(a.reshape(-1, problem.k)), aligned(b.t()), scales, aligned(scale_b.reshape(of_b).contiguous()), out)
        if self.average:
            out.div_(problem.world_size)
        lead = a.shape[:-1] if shape is None else shape[:-1]
        return out.view(lead[0] // problem.world_size, *lead[1:], problem.n)


@dataclass(frozen=True)
class QuantisedCall(Call):
    """One kind of call of fused_quantised_matmul."""

    problem: AllGatherGemm | GemmReduceScatter

    @classmethod
    def of(cls, a: Tensor, b: Tensor, quantize: str, collective: str, ranks: int) -> QuantisedCall:
        if a.dtype not in RESULTS or not a.numel():
            raise NotTaken(f"A is {a.dtype} {list(a.shape)}; kernels quantise {', '.join(map(str, RESULTS))}")
        if collective == REDUCE_SCATTER and a.shape[0] % ranks:
            raise NotTaken("the ranks do not divide the rows")
        rows, (n, k) = math.prod(a.shape[:-1]), b.shape
        more = "nk", SCALES_OF[quantize], RESULTS[a.dtype], quantize, "e4m3", accumulate_of(quantize)
        try:
            if collective == ALL_GATHER:
                return cls(AllGatherGemm(rows * ranks, n, k, "e4m3", "m", ranks, *more))
            output = "replicated" if collective == ALL_REDUCE else "scattered"
            return cls(GemmReduceScatter(rows, n, k, "e4m3", output, ranks, *more))
        except UsageError as error:
            raise NotTaken(str(error)) from None

    def require(self, kernel: Any) -> None:
        # The caller itself runs a separate product and collective.
        if kernel.config.variant == registry.of(self.problem).baseline:
            raise NotTaken("a product and a collective one after another are the fastest")

    def run(self, kernel: Any, a: Tensor, b: Tensor, scale_a: Tensor | None, scales_b: Tensor, most: float) -> Tensor:
        problem = self.problem
        limit_scales(kernel, most)
        rows = problem.m if isinstance(problem, AllGatherGemm) else problem.out_rows
        x, out = ready(a.reshape(-1, problem.k)), a.new_empty(rows, problem.n)
        of_a = () if scale_a is None else (scale_a.view(1),)
        kernel(x, aligned(b), *of_a, of_weight(scales_b, problem.scales, b), out)
        return out.view(-1, *a.shape[1:-1], problem.n)


def all_gather_scaled_matmul(
    A: Tensor, Bs: list[Tensor], A_scale: Tensor, B_scales: list[Tensor], gather_dim: int, group_name: str,
    biases: list[Tensor | None], result_scales: list[Tensor | None], out_dtypes: list[Any], use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The gathered A, and its product with each B, like symm_mem::fused_all_gather_scaled_matmul."""
    dtypes = [_dtype(dtype) for dtype in out_dtypes]
    more = list(zip(dtypes, biases, result_scales, strict=True))
    odd = any(tensor is not None for tensor in (*biases, *result_scales))
    of_b = [(B.shape, B.stride(), B.dtype, scale.numel(), scale.dtype) for B, scale in zip(Bs, B_scales, strict=True)]
    fast = all(use_fast_accum)
    key = (GATHER_SCALED, A.shape, A.dtype, gather_dim, A_scale.numel(), A_scale.dtype, *of_b, *dtypes, odd, fast)
    plan = plan_of(
        key, group_name, A.device, lambda ranks: ScaledGatherCall.of(A, Bs, A_scale, B_scales, gather_dim, ranks, more, fast=fast)
    )
    if not plan.counted():
        return _torchs_gather(A, Bs, A_scale, B_scales, gather_dim, group_name, biases, result_scales, dtypes, use_fast_accum)
    return cast(tuple[Tensor, list[Tensor]], plan.run(A.device, A, Bs, A_scale, B_scales))


def scaled_matmul_reduce_scatter(
    A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, reduce_op: str, orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None, bias: Tensor | None = None,
    result_scale: Tensor | None = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """This rank's rows of the sum of A @ B over the ranks, like symm_mem::fused_scaled_matmul_reduce_scatter."""
    dtype, dims = _dtype(out_dtype), (orig_scatter_dim, scatter_dim_after_maybe_reshape)
    more = dtype, bias, result_scale
    odd = bias is not None or result_scale is not None
    of_scales = A_scale.numel(), A_scale.dtype, B_scale.numel(), B_scale.dtype
    key = (SCATTER_SCALED, A.shape, A.dtype, dims, reduce_op, B.shape, B.stride(), *of_scales, dtype, odd, use_fast_accum)

    def read(ranks: int) -> ScaledScatterCall:
        return ScaledScatterCall.of(A, B, A_scale, B_scale, reduce_op, dims, ranks, more, fast=use_fast_accum)

    plan = plan_of(key, group_name, A.device, read)
    if not plan.counted():
        rest = group_name, output_shape, bias, result_scale, dtype, use_fast_accum
        return _torchs_scatter(A, B, A_scale, B_scale, reduce_op, dims, *rest)
    return cast(Tensor, plan.run(A.device, A, B, A_scale, B_scale, output_shape))


def quantised_matmul(
    A: Tensor, B: Tensor, A_scale: Tensor | None, B_scale: Tensor, quantize: str, collective: str, group_name: str,
    scale_ub: float | None = None,
) -> Tensor:  # fmt: skip
    """quantised A @ B: of the rows of all ranks, or summed over the ranks.

    A call without a kernel is the one set by `run_by`, or a quantiser, a product and a collective of torch.

    Args:
        A: [..., k], bf16 or fp16; with a collective of rows its first dimension holds them.
        B: e4m3 [n, k], or [k, n] if that is its transposed view.
        A_scale: float32 [1] with `quantize="static"`, else None.
        B_scale: float32, of rows, of blocks, or at least one of the tensor.
        quantize: row, block or static.
        collective: all_gather, reduce_scatter or all_reduce.
        group_name: of the process group.
        scale_ub: With `quantize="row"` the greatest magnitude that a scale follows.

    Raises:
        UsageError: `scale_ub` is not above 0, or is given for another quantize.
    """
    most = greatest_magnitude(scale_ub, quantize)
    b = by_rows(B, A.shape[-1])
    key = (QUANTISED, A.shape, A.dtype, b.shape, quantize, collective)
    plan = plan_of(key, group_name, A.device, lambda ranks: QuantisedCall.of(A, b, quantize, collective, ranks))
    if plan.counted():
        return cast(Tensor, plan.run(A.device, A, b, A_scale, B_scale, most))
    if (by := _runs.get(B.data_ptr())) and (result := by.call(A)) is not None:
        return result

    def product(x: Tensor) -> Tensor:
        flat, layout = x.reshape(-1, b.shape[1]), SCALES_OF[quantize]
        scales, out = scales_of(flat, quantize, most) if A_scale is None else A_scale.view(1), x.new_empty(*x.shape[:-1], len(b))
        codes = quantised(flat, scales, quantize)
        library_product(codes, scales, b, of_weight(B_scale, layout, b), layout, out.view(-1, len(b)))
        return out

    return with_collective(A, product, collective, dist.distributed_c10d._resolve_process_group(group_name))  # type: ignore[arg-type]


def meta_of_quantised_matmul(A: Tensor, B: Tensor, *more: Any) -> Tensor:
    collective, group_name = more[3:5]
    ranks, first = dist.distributed_c10d._resolve_process_group(group_name).size(), A.shape[0]
    rows = {ALL_GATHER: first * ranks, REDUCE_SCATTER: first // ranks, ALL_REDUCE: first}[collective]
    return A.new_empty(rows, *A.shape[1:-1], B.numel() // A.shape[-1])


def with_collective(x: Tensor, product: Callable[[Tensor], Tensor], collective: str, group: dist.ProcessGroup) -> Tensor:
    """A product between, or behind, what the collective library does."""
    if collective == ALL_GATHER:
        whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        all_gather(whole, x.contiguous(), group)
        return product(whole)
    y = product(x)
    if collective == ALL_REDUCE:
        dist.all_reduce(y, group=group)
        return y
    own = y.new_empty(y.shape[0] // group.size(), *y.shape[1:])
    reduce_scatter(own, y, group)
    return own


class Layer(NamedTuple):
    """An engine's layer: what serves calls of `quantised_matmul` where there is no kernel, and its product alone. Both may return
    None.
    """

    call: Callable[[Tensor], Tensor | None]
    product: Callable[[Tensor], Tensor | None]


_runs: dict[int, Layer] = {}
"""By the address of a weight, for as long as the weight lives."""


def run_by(weight: Tensor, layer: Layer) -> None:
    """Sets the layer of a weight.

    An engine's layer is found by its weight, so that compiled graphs of equal layers are equal.
    """
    address = weight.data_ptr()
    _runs[address] = layer

    def forget() -> None:
        if _runs.get(address) is layer:  # another weight may have come to this address
            del _runs[address]

    weakref.finalize(weight, forget)


def product_by(weight: Tensor, x: Tensor) -> Tensor | None:
    """The product of the layer with this weight; None if there is none."""
    layer = _runs.get(weight.data_ptr())
    return layer.product(x) if layer else None


def by_rows(weight: Tensor, k: int) -> Tensor:
    """A weight as [n, k], contiguous, without a copy. Raises NotTaken."""
    for b in (weight, weight.t()):
        if b.dim() == 2 and b.shape[1] == k and b.is_contiguous():
            return b
    raise NotTaken("B is neither [n, k] nor the transposed view of it")


def of_weight(scales: Tensor, layout: str, b: Tensor) -> Tensor:
    """The scales of B [n, k] as kernels take them: the first of `scales` where one serves the whole tensor. Not a copy."""
    shape = scales_shape(layout, *b.shape, weight=True)
    return scales.reshape(-1)[: math.prod(shape)].view(shape)


def _torchs_gather(
    a: Tensor, bs: list[Tensor], scale_a: Tensor, scales_b: list[Tensor], gather_dim: int, group_name: str, *more: Any
) -> tuple[Tensor, list[Tensor]]:
    """Torch's operator. On CPU ranks its definition, with a gather of bytes: gloo gathers no e4m3."""
    if a.is_cuda:
        run: Any = torch_symm_mem._fused_all_gather_scaled_matmul
        result: tuple[Tensor, list[Tensor]] = run(a, bs, scale_a, scales_b, gather_dim, group_name, *more)
        return result
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]

    def whole_of(shard: Tensor) -> Tensor:
        received = shard.new_empty(group.size(), *shard.shape)
        all_gather(received, shard.contiguous(), group)
        return received.movedim(gather_dim + 1, 1).flatten(0, 1)

    whole = whole_of(a)
    if scale_a.numel() == math.prod(a.shape[:-1]) > 1:
        scale_a = whole_of(scale_a)
    elif scale_a.numel() > 1:
        scale_a = scale_a.movedim(gather_dim, 0)
    scale_a = scale_a if scale_a.numel() == 1 else scale_a.reshape(-1, 1).contiguous()

    def product(b: Tensor, scale_b: Tensor, *of_b: Any) -> Tensor:
        flat = torch._scaled_mm(whole.flatten(0, -2), b, scale_a, scale_b, *of_b)
        return flat.unflatten(0, whole.shape[:-1]).movedim(0, gather_dim)

    return whole.movedim(0, gather_dim), [product(*operands) for operands in zip(bs, scales_b, *more, strict=True)]


def _torchs_scatter(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, reduce_op: str, dims: tuple[int, int], group_name: str,
    shape: list[int] | None, *more: Any,
) -> Tensor:  # fmt: skip
    """Torch's operator; gloo has no average."""
    run = getattr(torch_symm_mem, (TORCHS if a.is_cuda else FALLBACKS)[SCATTER_SCALED])
    average = reduce_op == "avg" and not a.is_cuda
    result: Tensor = run(a, b, scale_a, scale_b, "sum" if average else reduce_op, *dims, group_name, shape, *more)
    return result / dist.distributed_c10d._resolve_process_group(group_name).size() if average else result  # type: ignore[arg-type]


def _dtype(dtype: Any) -> torch.dtype | None:
    """A torch.dtype from what torch's dispatcher passes, which may be a number."""
    return torch_symm_mem._maybe_convert_scalar_types_to_dtypes([dtype])[0] if isinstance(dtype, int) else dtype


OPERATORS: dict[str, Any] = {GATHER_SCALED: all_gather_scaled_matmul, SCATTER_SCALED: scaled_matmul_reduce_scatter}
