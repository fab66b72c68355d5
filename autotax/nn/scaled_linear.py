"""The parallel linear layers with a weight in e4m3: AllGatherLinear, LinearReduceScatter and LinearAllReduce make them for one.

`layer(x)` with `quantize`, which makes e4m3 of a bf16 or fp16 x on the way; else `layer(x, scales)` for an x in e4m3.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem, ceil_div
from autotax.hardware import Hardware
from autotax.nn import custom_ops
from autotax.nn.base import NO_OUT, Request, increment_version, module_of
from autotax.nn.fallback import PlainScaled
from autotax.nn.groups import on_device
from autotax.nn.norm import AllReduceNorm, held
from autotax.nn.scaled_normed import ScaledNormed
from autotax.nn.sized import greatest_rows, remember, sizes_up_to
from autotax.nn.tensor_checks import (
    addend,
    aligned,
    ordinal_of,
    plain,
    ready,
    recorded,
    require_apart,
    require_no_tangent,
    require_recordable,
    require_tensor,
    small,
    usable,
)
from autotax.operators import registry
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.all_reduce_norm import AllReduceNorm as NormProblem
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import (
    ACCUMULATE,
    FEW_ROWS,
    GROUP,
    SCALES_OF,
    greatest_magnitude,
    laid_out,
    limit_scales,
    scales_shape,
)

CODES = torch.float8_e4m3fn
RESULTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NO_GRADIENT = (
    "x requires a gradient, and the weight is e4m3: make the layer with backward_weight, the weight in bf16, "
    "or call it under torch.no_grad()"
)
NO_COMPILED_GRADIENT = (
    "x requires a gradient, and a layer with a weight in e4m3 has no compiled backward: call prepare_backward() on all ranks, "
    "and compile without fullgraph=True, so that the layer runs between graphs"
)
NO_GRADIENT_OF_CODES = (
    "the weight in e4m3 or its scales require a gradient, which they cannot have: call requires_grad_(False) on them, "
    "or call the layer under torch.no_grad()"
)
ONLY_WIDE = {"layout": "nk", "keep_gathered": True, "backward_config": None, "like": None, "batch_invariant": None}
"""Options that only layers with a wide weight take, and the values that mean the same as none."""


def layout_of(scales: Tensor, n: int, k: int, quantize: str | None = None) -> str:
    """`tensor`, `row` or `block`: the layout of a weight's scales, by their shape. Raises UsageError.

    Scales [1, n] may be those of rows or of blocks, where k is 128 times n. They are of blocks if x is quantised so.
    """
    if scales.dtype is torch.float32:
        if scales.numel() == 1:
            return "tensor"
        of_rows, of_blocks = scales.shape in ((n,), (1, n), (n, 1)), scales.shape == (ceil_div(n, GROUP), ceil_div(k, GROUP))
        if of_blocks and (not of_rows or quantize == "block"):
            return "block"
        if of_rows:
            return "row"
    raise UsageError(
        f"scales are {scales.dtype} {list(scales.shape)} for a weight [{n}, {k}]; allowed are float32 [1], [1, {n}] and "
        f"[{ceil_div(n, GROUP)}, {ceil_div(k, GROUP)}]: give one of these"
    )


def behind_each_other(weights: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Several weights [n_i, k] as one, and their scales. Scales of tensors become those of rows. Raises UsageError."""
    if len(weights) != len(scales) or len({weight.shape[1:] for weight in weights}) != 1:
        raise UsageError(f"{len(weights)} weights, {len(scales)} scales; weights must have equal rows: give scales for all")
    if wrong := [weight for weight in weights if weight.dtype is not CODES or weight.dim() != 2]:
        raise UsageError(f"a weight is {wrong[0].dtype} {list(wrong[0].shape)}; all must be {CODES} [n, k]: give such ones")
    layouts = [layout_of(scale, *weight.shape) for weight, scale in zip(weights, scales, strict=True)]
    whole = torch.cat([weight.detach().view(torch.uint8) for weight in weights]).view(CODES)
    if "block" not in layouts:
        rows = [scale.reshape(1, -1).expand(1, len(weight)) for weight, scale in zip(weights, scales, strict=True)]
        return whole, torch.cat(rows, 1)
    if set(layouts) != {"block"} or any(len(weight) % GROUP for weight in weights[:-1]):
        raise UsageError(f"weights have scales {', '.join(layouts)}; blocks of 128 rows must not cross weights: split them")
    return whole, torch.cat(scales)


class ScaledLinear(ScaledNormed):
    """A parallel linear layer with a weight in e4m3. AllGatherLinear describes what all layers have in common.

    - `wide_class`: the class of layers that does the same with a weight in bf16. `kind`: all_gather, reduce_scatter, all_reduce.
    - `weight`: e4m3 [n, k], or the transposed view of it that torch._scaled_mm takes. No copy is made.
      Several weights [n_i, k] share one gather and one product: they are copied once into one `weight`. Each has its scales.
    - `scales`: of the weight, float32: [1], [1, n], or [ceil(n / 128), ceil(k / 128)] for blocks of 128 x 128.
    - `quantize`: None for an x in e4m3. `row`, `block` or `static` for an x of the type of the result. `row` takes a weight with
      scales of the tensor or of rows, `static` one with a scale of the tensor.
    - `accumulate`: `exact`, or `fast` where tensor cores may add up all of K with fewer bits, as with torch's `use_fast_accum`.
    - `scale_ub`: with quantize `row` no scale follows a magnitude above it, and greater values saturate: vLLM's upper bound.
    - `input_scale`: float32 [1], the scale of x with quantize `static`. `out_dtype`: bf16 or fp16.
    - `backward_weight`: the weight in bf16 [n, k], for the backward. Without it a gradient is refused.
    - `bias`: [n], of the type of the result. `norm`: an AllReduceNorm for `normed`, for a row-parallel layer.

    Raises UsageError on all ranks alike for what is not allowed.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    backward_weight: Tensor | None
    input_scale: Tensor | None
    _kernels: dict[int, Any]
    _calls: dict[int, Any]
    """Kernels and bulk-synchronous calls by the number of rows."""
    _plain: Any
    _most_of_few: int
    """The most rows of the bulk-synchronous kernel for few rows; 0: there is none."""
    _sides: tuple[int, int]
    """Columns of the result, and elements of a row of x."""

    def __init__(
        self,
        wide_class: Any,
        kind: str,
        weight: Tensor | Sequence[Tensor],
        scales: Tensor | Sequence[Tensor] | None,
        group: dist.ProcessGroup | None = None,
        max_m: int = 8192,
        *,
        quantize: str | None = None,
        accumulate: str = "exact",
        scale_ub: float | None = None,
        input_scale: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        backward_weight: Tensor | None = None,
        bias: Tensor | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        check: bool | None = None,
        prove: bool | float = False,
        norm: AllReduceNorm | None = None,
    ) -> None:
        super().__init__(group, db, check, prove)
        vars(self)["_norm"] = held(norm)
        if norm and kind == "all_gather":
            raise UsageError("norm is given to an all-gather layer, which sums nothing: give it to a row-parallel layer")
        if scales is None:
            raise UsageError("scales are missing; a weight in e4m3 has scales: give them as scales=")
        if quantize not in (None, *SCALES_OF):
            raise UsageError(f"quantize is {quantize!r}; allowed are None, {', '.join(SCALES_OF)}: give one of these")
        if accumulate not in ACCUMULATE:
            raise UsageError(f"accumulate is {accumulate!r}; allowed are {', '.join(ACCUMULATE)}: give one of these")
        greatest_magnitude(scale_ub, quantize)
        if out_dtype not in RESULTS:
            raise UsageError(f"out_dtype is {out_dtype}; allowed are {', '.join(map(str, RESULTS))}: give one of these")
        if (input_scale is None) == (quantize == "static"):
            needed = "needs" if quantize == "static" else "takes no"
            raise UsageError(f"quantize is {quantize!r}, which {needed} input_scale, float32 [1]: see ScaledLinear")
        columns: tuple[int, ...] = ()
        if not isinstance(weight, Tensor):
            columns = tuple(part.shape[0] for part in weight)
            weight, scales = behind_each_other(tuple(weight), tuple(scales))
            bias = bias if bias is None or isinstance(bias, Tensor) else torch.cat(tuple(bias))
        if weight.dim() != 2 or not isinstance(scales, Tensor):
            described = f"{list(scales.shape)}" if isinstance(scales, Tensor) else type(scales).__name__
            raise UsageError(f"weight is {list(weight.shape)}, scales {described}; give a weight [n, k] and a tensor of scales")
        if not weight.is_contiguous() and weight.t().is_contiguous():
            weight = _like(weight, weight.detach().t())
        n, k = weight.shape
        layout, fitting = layout_of(scales, n, k, quantize), SCALES_OF.get(quantize or "", "")
        if not (weight.is_meta or weight.is_contiguous()):
            require_tensor("weight", weight, (n, k), CODES, weight.device)
        if input_scale is not None and not (
            isinstance(input_scale, Tensor) and input_scale.dtype is torch.float32 and input_scale.numel() == 1
        ):
            raise UsageError(f"input_scale is {_described(input_scale)}; it must be float32 [1]: give such a tensor")
        if backward_weight is not None and backward_weight.shape != weight.shape:
            raise UsageError(
                f"backward_weight is {_described(backward_weight)}; it is the same weight in 16 bits, [{n}, {k}]: give that"
            )
        of_weight = scales
        if layout == "tensor" and fitting == "row":
            scales, layout = scales.detach().reshape(1, 1).expand(1, n), "row"
        if fitting and layout != fitting:
            raise UsageError(
                f"quantize is {quantize!r} for a weight with scales {layout}; they must be {fitting}: give another quantize"
            )
        scales = scales.detach().reshape(scales_shape(layout, n, k, weight=True)).contiguous()
        if not (scales.is_meta or usable(scales)):
            scales = scales.clone()
        self._hold(weight=weight, scales=_like(of_weight, scales), bias=bias)
        self._hold(input_scale=input_scale, backward_weight=backward_weight)
        self._wide_class, self.columns = wide_class, columns
        self.kind, self.layout, self.quantize, self.out_dtype = kind, layout, quantize, out_dtype
        self.accumulate, self.scale_ub = accumulate, scale_ub
        self._max_m, self._request = max_m, Request(conditions, config, sizes)
        if not weight.is_meta:
            self.prepare()

    # Preparing.

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_kernels": {}, "_calls": {}, "_plain": None, "_sides": (0, 0), "_most_of_few": 0}

    def _place(self) -> torch.device:
        return self.weight.device

    def problem(self, rows: int) -> Any:
        """The problem of a call with `rows` rows of x on this rank."""
        n, k = self.weight.shape
        more = "nk", self.layout, RESULTS[self.out_dtype], self.quantize or "none", "e4m3", self.accumulate
        if self.kind == "all_gather":
            return AllGatherGemm(rows * self.world_size, n, k, "e4m3", "m", self.world_size, *more)
        output = "scattered" if self.kind == "reduce_scatter" else "replicated"
        return GemmReduceScatter(rows, n, k, "e4m3", output, self.world_size, *more)

    def _make(self) -> None:
        conditions, config, sizes = self._request
        ranks = self._world.size if self._world else 1
        unit = 1 if self.kind == "all_reduce" else ranks
        per_rank = ranks if self.kind == "all_gather" else 1

        def problems() -> list[Any]:
            most = greatest_rows(self._max_m, unit)
            return [self.problem(m // per_rank) for m in sizes_up_to(most, unit, [most] if config else sizes)]

        prepared_for, deployed = self._agreed(problems, conditions)
        like = self.weight.new_empty(0, self.weight.shape[1], dtype=self.out_dtype)
        how: dict[str, Any] = {"fast": self.accumulate == "fast", "most": greatest_magnitude(self.scale_ub, self.quantize)}
        self._plain = PlainScaled(self._world, self.kind, self.layout, self.quantize, like, self.input_scale, **how)
        n, k = self.weight.shape
        vars(self)["_sides"] = n, k
        self._look_up(prepared_for, deployed, config)

    def _operators(self, requested: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Any]:
        """Also makes kernels of the product, the sum and the norm that were tuned, and compiles kernels for calls that add."""
        kernels = super()._operators([*requested, *self._winners_of_normed(hardware, notes)], hardware, notes)
        return self._with_additions(self._without_normed(kernels))

    def _baselines(self, pairs: list[tuple[Any, Config | None]], hardware: Hardware) -> list[tuple[Any, Config]]:
        """One bulk-synchronous kernel for few rows without a winner: there Triton's products are faster than the library's."""
        few = [problem for problem, config in pairs if not config and problem.m <= FEW_ROWS]
        self._most_of_few = self._rows_of(few[-1]) if few and self.kernels_are_fast(hardware) else 0
        if not self._most_of_few:
            return []
        return [(few[-1], registry.of(few[-1]).fallback(few[-1], hardware))]

    @staticmethod
    def kernels_are_fast(hardware: Hardware) -> bool:
        """Whether kernels are not interpreted."""
        return hardware.on_gpu

    def _store(self, operators: list[Any], notes: list[str]) -> None:  # noqa: ARG002
        for kernel in operators:
            limit_scales(kernel, self._plain.most)
        self._kernels, self._calls = {self._rows_of(kernel.problem): kernel for kernel in operators}, {}

    def _rows_of(self, problem: Any) -> int:
        """Rows of x on each rank."""
        rows: int = problem.shard_rows if self.kind == "all_gather" else problem.m
        return rows

    def _tensors(self, problem: Any) -> tuple[Tensor, ...]:
        """Tensors of a call of this problem, with any values."""
        rows, (n, k) = self._rows_of(problem), self.weight.shape
        x = torch.zeros(rows, k, dtype=self.out_dtype, device=self._device)
        of_a: tuple[Tensor, ...] = ()
        if self.quantize is None:
            x = x.to(CODES)
            scales = torch.ones(scales_shape(self.layout, rows, k, weight=False), dtype=torch.float32, device=self._device)
            of_a = (laid_out(scales, self.layout, weight=False),)
        elif self.quantize == "static":
            assert self.input_scale is not None
            of_a = (self.input_scale.view(1),)
        out = torch.empty(self.shape_of(x.shape, n), dtype=self.out_dtype, device=self._device)
        return x, self.weight, *of_a, self.scales, out

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        rows = self._rows_of(problem)
        if isinstance(problem, NormProblem):
            yield from self._rehearsals_of_normed(problem)
            return
        step = self.world_size if self.kind == "reduce_scatter" else 1
        for some in dict.fromkeys(count for count in (rows, rows - step, step) if count > 0):
            smaller = self.problem(some)
            yield smaller, self._tensors(smaller)

    # Calling.

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        """The shape of the result for a shape of x. Raises UsageError."""
        shape: tuple[int, ...] = self._wide_class.shape_of(self, x, columns)
        return shape

    def sides_of(self, weight: Tensor) -> tuple[int, int]:
        """Elements of a row of x, and columns of the result."""
        n, k = weight.shape
        return k, n

    def forward(
        self,
        x: Tensor,
        scales: Tensor | None = None,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        gathered: bool = False,
    ) -> Any:
        """The result, or a tuple of views of it for several weights."""
        if gathered:
            raise UsageError("gathered is given to a layer with a weight in e4m3, which returns no gathered x: leave it out")
        y = self._forward(x, scales, out, residual)
        return y.split(self.columns, -1) if self.columns else y

    def _forward(self, x: Tensor, scales: Tensor | None, out: Tensor | None, residual: Tensor | None) -> Tensor:
        if torch.is_grad_enabled():
            if recorded(self.weight, self.scales, self.input_scale, scales):
                raise UsageError(NO_GRADIENT_OF_CODES)
            if recorded(x, out, residual, self.bias, self.backward_weight):
                if self.backward_weight is None or self.quantize is None:
                    raise UsageError(NO_GRADIENT)
                if is_compiling():
                    raise UsageError(NO_COMPILED_GRADIENT)
                # Dynamo would trace this frame between graphs. It is slow to import.
                record = _untraced_record() if "torch._dynamo" in sys.modules else ScaledLinear._record
                result: Tensor = record(self, x, out, residual)
                return result
        if is_compiling():
            y: Tensor = torch.ops.autotax.scaled_linear(
                x, scales, self.weight, self.scales, self.handle, self.input_scale, self.bias, residual
            )
            return y if out is None else out.copy_(y)
        return self.run(x, scales, self.weight, self.scales, self.input_scale, out, self.bias, residual)

    def run(
        self, x: Tensor, scales: Tensor | None, weight: Tensor, weight_scales: Tensor, input_scale: Tensor | None = None,
        out: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`forward` with all tensors as arguments, for torch.ops."""
        self._ensure_ready()
        with on_device(self._index):
            tensors = x, scales, weight, weight_scales, input_scale, out, bias, residual
            if self._guards[2]:
                self._compare(lambda: f"x {x.dtype} {list(self._checked(*tensors)[0].shape)}")
            x, of_x, weight, weight_scales, shape, bias, residual = self._checked(*tensors)
            if out is None:
                out = torch.empty(shape, dtype=self.out_dtype, device=self._device)
            else:
                increment_version((out,))
            if x.numel():
                n, k = self._sides
                added = None if residual is None else residual.view(-1, n)
                with self._guards[0]:
                    self._call(x.view(-1, k), weight, of_x, weight_scales, out.view(-1, n), bias, added)
        return out

    def _checked(
        self, x: Tensor, scales: Tensor | None, weight: Tensor, weight_scales: Tensor, input_scale: Tensor | None,
        out: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor, tuple[int, ...], Tensor | None, Tensor | None]:  # fmt: skip
        """The tensors of a call as kernels take them, and the shape of the result. Raises UsageError."""
        device, ordinal, (n, k) = self._device, ordinal_of(self._device), self._sides
        x_dtype = CODES if self.quantize is None else self.out_dtype
        require_no_tangent(x, scales, out, bias, residual)
        x = small("x", x, x_dtype, device)
        rows = math.prod(x.shape[:-1]) if x.dim() > 1 else 0
        require_tensor("x", x, (*x.shape[:-1], k) if x.dim() > 1 else (rows, k), x_dtype, device)
        of_scales = scales_shape(self.layout, n, k, weight=True)
        if not ready(weight, (n, k), CODES, ordinal):
            weight = plain("weight", weight)
            require_tensor("weight", weight, (n, k), CODES, device)
        if not ready(weight_scales, of_scales, torch.float32, ordinal):
            weight_scales = small("scales", weight_scales, torch.float32, device)
            require_tensor("scales", weight_scales, of_scales, torch.float32, device)
        of_x = self._scales_of_x(x, rows, scales, input_scale)
        shape = self.shape_of(x.shape, n)
        if residual is not None and self.kind == "all_gather":
            raise UsageError("residual is given to an all-gather layer, which takes none: add it to the result")
        like = x.new_empty(0, dtype=self.out_dtype) if bias is not None or residual is not None else x
        bias = None if bias is None else aligned(addend("bias", bias, (n,), like))
        residual = None if residual is None else aligned(addend("residual", residual, shape, like))
        if out is not None:
            require_tensor("out", out, shape, self.out_dtype, device)
            others = {"x": x, "weight": weight, "scales": weight_scales, "bias": bias, "residual": residual}
            require_apart("out", out, **others, **{"scales of x": of_x[0] if of_x else None})
        return x, of_x, weight, weight_scales, shape, bias, residual

    def _scales_of_x(self, x: Tensor, rows: int, scales: Tensor | None, input_scale: Tensor | None) -> tuple[Tensor, ...]:
        """The scales of x that a kernel takes. Raises UsageError."""
        if self.quantize is not None:
            if scales is not None:
                raise UsageError(f"scales are given, and quantize is {self.quantize!r}, which makes them: leave scales out")
            if input_scale is None:
                return ()
            if not ready(input_scale, input_scale.shape, torch.float32, ordinal_of(self._device)) or input_scale.numel() != 1:
                input_scale = small("input_scale", input_scale, torch.float32, self._device)
                require_tensor("input_scale", input_scale, (1,), torch.float32, self._device)
            return (input_scale.view(1),)
        shape = scales_shape(self.layout, rows, self._sides[1], weight=False)
        is_float32 = scales is not None and isinstance(scales, Tensor) and scales.dtype is torch.float32
        if not is_float32 or scales.numel() != math.prod(shape) or scales.device != x.device or not (  # type: ignore[union-attr]
            self.layout != "block" or scales.shape[-1:] == shape[-1:]  # type: ignore[union-attr]
        ):
            raise UsageError(f"scales of x are {_described(scales)}; they must be float32 {list(shape)}: give such")
        assert scales is not None
        return (laid_out(plain("scales", scales).reshape(shape), self.layout, weight=False),)

    def _call(
        self, x: Tensor, weight: Tensor, of_x: tuple[Tensor, ...], weight_scales: Tensor, out: Tensor,
        bias: Tensor | None, residual: Tensor | None,
    ) -> None:  # fmt: skip
        call = self.kernel_for(len(x))
        adds = {name: added for name, added in (("bias", bias), ("residual", residual)) if added is not None}
        if adds and getattr(call, "ADDS", False):
            call(x, weight, *of_x, weight_scales, out, **adds)
            return
        call(x, weight, *of_x, weight_scales, out)
        for added in adds.values():
            out.add_(added)

    def kernel_for(self, rows: int) -> Any:
        """The tuned kernel for a number of rows, or the bulk-synchronous call. Raises UsageError for too many rows."""
        return self._calls.get(rows) or remember(self._calls, rows, self._choose(rows))

    def _choose(self, rows: int) -> Any:
        """See `kernel_for`. Host work, done once for a number of rows."""
        size = next((size for size in map(self._rows_of, (choice.problem for choice in self.choices)) if rows <= size), None)
        if size is None:
            most = self._rows_of(self.choices[-1].problem)
            raise UsageError(f"x has {rows} rows; it must have at most {most}: give fewer, or a greater max_m to the layer")
        problem = self.problem(rows)
        sizes = (size, self._most_of_few) if rows <= self._most_of_few else (size,)
        fits = (kernel.fitted(problem) for kernel in map(self._kernels.get, sizes) if kernel)
        return next((fit for fit in fits if fit), self._plain)

    # The backward, with the weight in bf16.

    def _record(self, x: Tensor, out: Tensor | None, residual: Tensor | None) -> Tensor:
        if out is not None:
            raise UsageError(NO_OUT)
        require_recordable(x=x, bias=self.bias, residual=residual)
        require_no_tangent(x, self.bias, residual)
        self.prepare_backward()
        if self.kind == "all_gather":
            if residual is not None:
                raise UsageError("residual is given to an all-gather layer, which takes none: add it to the result")
            product: Tensor = _Recorded.apply(x, self.backward_weight, None, None, self)
            return product if self.bias is None else product + self.bias
        y: Tensor = _Recorded.apply(x, self.backward_weight, self.bias, residual, self)
        return y

    def prepare_backward(self) -> None:
        """Makes the backward ready: a layer of the same kind with the weight in bf16. Collective."""
        self._ensure_ready()
        if self._gradient is None and self.backward_weight is not None:
            options = {"db": self._db, "conditions": self._request.conditions, "sizes": self._request.sizes}
            wide = self._wide_class(self.backward_weight.detach(), self._group, self._max_m, **options)
            wide.prepare_backward()
            vars(self)["_gradient"] = wide  # torch would register an assigned attribute as a submodule

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        how = f"scales={self.layout}, quantize={self.quantize}, accumulate={self.accumulate}"
        how += "" if self.scale_ub is None else f", scale_ub={self.scale_ub}"
        return f"{self.kind}, in_features={k}, out_features={n}, {how}"


@functools.cache
def _untraced_record() -> Any:
    """`ScaledLinear._record` where Dynamo would trace it: between the graphs of a compiled program."""
    return torch.compiler.disable(ScaledLinear._record)


class _Recorded(torch.autograd.Function):
    """A call of a layer whose backward uses the weight in bf16. The bias of an all-gather layer is added outside."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, layer: ScaledLinear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.run(x.detach(), None, layer.weight, layer.scales, layer.input_scale, None, bias, residual)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], False, *ctx.needs_input_grad[2:4]]
        dy = dy.contiguous()
        like = SimpleNamespace(
            saved_tensors=(x.to(weight.dtype), weight), module=ctx.layer._gradient.handle, kept=False, needs_input_grad=needs
        )
        dx, d_weight, _, d_bias, *d_residual = custom_ops.BACKWARD[ctx.layer.kind](like, dy.to(weight.dtype))
        return dx, d_weight, d_bias, next(iter(d_residual), None), None


def made_for(wide_class: Any, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> ScaledLinear | None:
    """The layer for the arguments of `wide_class` if their weight is e4m3, else None. Raises UsageError."""
    options = dict(options)
    weight = arguments[0] if arguments else options.pop("weight", None)
    first = weight[0] if isinstance(weight, list | tuple) and weight else weight
    coded = isinstance(first, Tensor) and first.dtype is CODES
    if "KIND" not in vars(wide_class):  # a class of the user, whose forward a ScaledLinear would not run
        if coded:
            raise UsageError(
                f"{wide_class.__name__} is a class derived from the layer's, and weight is {CODES}, for which the layer is a "
                "ScaledLinear: derive from nn.Module, and keep the layer as an attribute"
            )
        return None
    if not coded:
        if options_of_8_bits := [name for name in ("scales", "quantize", "accumulate", "scale_ub") if name in options]:
            kind_of = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise UsageError(f"{options_of_8_bits[0]} is given for a weight of {kind_of}; only {CODES} takes it: leave it out")
        return None
    for name, default in ONLY_WIDE.items():
        if options.pop(name, default) not in (default, False if default is None else default):
            raise UsageError(f"{name} is given for a weight of {CODES}; only layers with a wider one take it: leave it out")
    return ScaledLinear(wide_class, kind, weight, options.pop("scales", None), *arguments[1:], **options)


def _described(tensor: Any) -> str:
    if tensor is None:
        return "missing"
    return f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"of type {type(tensor).__name__}"


def _like(original: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, as a Parameter if `original` is one."""
    return torch.nn.Parameter(tensor, original.requires_grad) if isinstance(original, torch.nn.Parameter) else tensor


def _run(
    x: Tensor, scales: Tensor | None, weight: Tensor, weight_scales: Tensor, module: int, input_scale: Tensor | None = None,
    *added: Tensor | None,
) -> Tensor:  # fmt: skip
    result: Tensor = module_of(module).run(x, scales, weight, weight_scales, input_scale, None, *added)
    return result


def _fake(x: Tensor, _: Tensor | None, weight: Tensor, __: Tensor, module: int, *___: Any) -> Tensor:
    layer = module_of(module)
    return x.new_empty(layer.shape_of(x.shape, weight.shape[0]), dtype=layer.out_dtype)


custom_ops.register(
    "scaled_linear(Tensor x, Tensor? scales, Tensor weight, Tensor weight_scales, int module, Tensor? input_scale=None, "
    "Tensor? bias=None, Tensor? residual=None) -> Tensor",
    _run,
    _fake,
)
