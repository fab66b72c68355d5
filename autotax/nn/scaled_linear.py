"""The parallel linear layers with a weight in e4m3: AllGatherLinear, LinearReduceScatter and LinearAllReduce make them for one.

`layer(x)` with `quantize`, which makes e4m3 of a bf16 or fp16 x on the way; else `layer(x, scales)` for an x in e4m3.
"""

from __future__ import annotations

import math
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
from autotax.nn.base import NO_OUT, Module, greatest_rows, increment_version, module_of, sizes_up_to
from autotax.nn.fallback import all_gather, reduce_scatter
from autotax.nn.groups import on_device
from autotax.nn.tensor_checks import addend, aligned, plain, recorded, require_apart, require_no_tangent, require_tensor, small
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.operators.scaled import GROUP, SCALES_OF, laid_out, library_product, quantised, scales_of, scales_shape

CODES = torch.float8_e4m3fn
RESULTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NO_GRADIENT = (
    "x requires a gradient, and the weight is e4m3: make the layer with backward_weight, the weight in bf16, "
    "or call it under torch.no_grad()"
)


def layout_of(scales: Tensor, n: int, k: int) -> str:
    """`tensor`, `row` or `block`: the layout of a weight's scales, by their shape. Raises UsageError."""
    if scales.dtype is torch.float32:
        if scales.numel() == 1:
            return "tensor"
        if scales.numel() == n:
            return "row"
        if scales.shape == (ceil_div(n, GROUP), ceil_div(k, GROUP)):
            return "block"
    raise UsageError(
        f"scales are {scales.dtype} {list(scales.shape)} for a weight [{n}, {k}]; allowed are float32 [1], [1, {n}] and "
        f"[{ceil_div(n, GROUP)}, {ceil_div(k, GROUP)}]: give one of these"
    )


def behind_each_other(weights: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Several weights [n_i, k] as one, and their scales. Scales of tensors become those of rows. Raises UsageError."""
    if len(weights) != len(scales) or len({weight.shape[1:] for weight in weights}) != 1:
        raise UsageError(f"{len(weights)} weights, {len(scales)} scales; weights must have equal rows: give scales for all")
    layouts = [layout_of(scale, *weight.shape) for weight, scale in zip(weights, scales, strict=True)]
    whole = torch.cat([weight.detach().view(torch.uint8) for weight in weights]).view(CODES)
    if "block" not in layouts:
        rows = [scale.reshape(1, -1).expand(1, len(weight)) for weight, scale in zip(weights, scales, strict=True)]
        return whole, torch.cat(rows, 1)
    if set(layouts) != {"block"} or any(len(weight) % GROUP for weight in weights[:-1]):
        raise UsageError(f"weights have scales {', '.join(layouts)}; blocks of 128 rows must not cross weights: split them")
    return whole, torch.cat(scales)


class ScaledLinear(Module):
    """A parallel linear layer with a weight in e4m3. AllGatherLinear describes what all layers have in common.

    - `wide_class`: the class of layers that does the same with a weight in bf16. `kind`: all_gather, reduce_scatter, all_reduce.
    - `weight`: e4m3 [n, k], or the transposed view of it that torch._scaled_mm takes. No copy is made.
      Several weights [n_i, k] share one gather and one product: they are copied once into one `weight`. Each has its scales.
    - `scales`: of the weight, float32: [1], [1, n], or [ceil(n / 128), ceil(k / 128)] for blocks of 128 x 128.
    - `quantize`: None for an x in e4m3. `row`, `block` or `static` for an x of the type of the result. `row` takes a weight with
      scales of the tensor or of rows, `static` one with a scale of the tensor.
    - `input_scale`: float32 [1], the scale of x with quantize `static`. `out_dtype`: bf16 or fp16.
    - `backward_weight`: the weight in bf16 [n, k], for the backward. Without it a gradient is refused.
    - `bias`: [n], of the type of the result.

    Raises UsageError on all ranks alike for what is not allowed.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    backward_weight: Tensor | None
    input_scale: Tensor | None
    _kernels: dict[int, Any]
    _plain: Any

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
    ) -> None:
        super().__init__(group, db, check, prove)
        if scales is None:
            raise UsageError("scales are missing; a weight in e4m3 has scales: give them as scales=")
        if quantize not in (None, *SCALES_OF):
            raise UsageError(f"quantize is {quantize!r}; allowed are None, {', '.join(SCALES_OF)}: give one of these")
        if out_dtype not in RESULTS:
            raise UsageError(f"out_dtype is {out_dtype}; allowed are {', '.join(map(str, RESULTS))}: give one of these")
        if (input_scale is None) == (quantize == "static"):
            needed = "needs" if quantize == "static" else "takes no"
            raise UsageError(f"quantize is {quantize!r}, which {needed} input_scale, float32 [1]: see ScaledLinear")
        columns: tuple[int, ...] = ()
        if not isinstance(weight, Tensor):
            columns = tuple(part.shape[0] for part in weight)
            weight, scales = behind_each_other(tuple(weight), tuple(scales))
        assert isinstance(scales, Tensor)
        if weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous():
            weight = weight.t()
        n, k = weight.shape
        layout, fitting = layout_of(scales, n, k), SCALES_OF.get(quantize or "", "")
        if layout == "tensor" and fitting == "row":
            scales, layout = scales.reshape(1, 1).expand(1, n), "row"
        if fitting and layout != fitting:
            raise UsageError(
                f"quantize is {quantize!r} for a weight with scales {layout}; they must be {fitting}: give another quantize"
            )
        shape = scales_shape(layout, n, k, weight=True)
        self._hold(weight=weight, scales=scales.reshape(shape).contiguous(), bias=bias)
        self._hold(input_scale=input_scale, backward_weight=backward_weight)
        self._wide_class, self.columns = wide_class, columns
        self.kind, self.layout, self.quantize, self.out_dtype = kind, layout, quantize, out_dtype
        self._asked = max_m, conditions, config, sizes
        if not weight.is_meta:
            self.prepare()

    # Preparing.

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_kernels": {}, "_plain": None}

    def _place(self) -> torch.device:
        return self.weight.device

    def problem(self, rows: int) -> Any:
        """The problem of a call with `rows` rows of x on this rank."""
        n, k = self.weight.shape
        more = "nk", self.layout, RESULTS[self.out_dtype], self.quantize or "none"
        if self.kind == "all_gather":
            return AllGatherGemm(rows * self.world_size, n, k, "e4m3", "m", self.world_size, *more)
        output = "scattered" if self.kind == "reduce_scatter" else "replicated"
        return GemmReduceScatter(rows, n, k, "e4m3", output, self.world_size, *more)

    def _make(self) -> None:
        max_m, conditions, config, sizes = self._asked
        ranks = self._world.size if self._world else 1
        unit = 1 if self.kind == "all_reduce" else ranks
        per_rank = ranks if self.kind == "all_gather" else 1

        def problems() -> list[Any]:
            most = greatest_rows(max_m, unit)
            return [self.problem(m // per_rank) for m in sizes_up_to(most, unit, [most] if config else sizes)]

        prepared_for, deployed = self._agreed(problems, conditions)
        self._plain = PlainScaled(self)
        self._look_up(prepared_for, deployed, config)

    def _operators(self, requested: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Any]:
        """Also compiles kernels for calls that add."""
        return self._with_additions(super()._operators(requested, hardware, notes))

    def _store(self, operators: list[Any], notes: list[str]) -> None:  # noqa: ARG002
        self._kernels = {self._rows_of(kernel.problem): kernel for kernel in operators}

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
            scales = torch.ones(scales_shape(self.layout, rows, k, weight=False), device=self._device)
            of_a = (laid_out(scales, self.layout, weight=False),)
        elif self.quantize == "static":
            assert self.input_scale is not None
            of_a = (self.input_scale.view(1),)
        out = torch.empty(self.shape_of(x.shape, n), dtype=self.out_dtype, device=self._device)
        return x, self.weight, *of_a, self.scales, out

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        rows = self._rows_of(problem)
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

    def forward(self, x: Tensor, scales: Tensor | None = None, out: Tensor | None = None, residual: Tensor | None = None) -> Any:
        """The result, or a tuple of views of it for several weights."""
        y = self._forward(x, scales, out, residual)
        return y.split(self.columns, -1) if self.columns else y

    def _forward(self, x: Tensor, scales: Tensor | None, out: Tensor | None, residual: Tensor | None) -> Tensor:
        if is_compiling():
            if torch.is_grad_enabled() and recorded(x, residual, out):
                raise UsageError(NO_GRADIENT)
            y: Tensor = torch.ops.autotax.scaled_linear(
                x, scales, self.weight, self.scales, self.handle, self.input_scale, self.bias, residual
            )
            return y if out is None else out.copy_(y)
        if torch.is_grad_enabled() and recorded(x, out, residual, self.bias, self.backward_weight):
            return self._record(x, out, residual)
        return self.run(x, scales, self.weight, self.scales, self.input_scale, out, self.bias, residual)

    def run(
        self, x: Tensor, scales: Tensor | None, weight: Tensor, weight_scales: Tensor, input_scale: Tensor | None = None,
        out: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`forward` with all tensors as arguments, for torch.ops."""
        self._ensure_ready()
        with on_device(self._index):
            if self._guards[2]:
                self._compare(lambda: f"x {x.dtype} {list(x.shape)}")
            n, k = self.weight.shape
            x_dtype = CODES if self.quantize is None else self.out_dtype
            x = small("x", x, x_dtype, self._device)
            require_no_tangent(x, out)
            rows = math.prod(x.shape[:-1]) if x.dim() > 1 else 0
            require_tensor("x", x, (*x.shape[:-1], k) if x.dim() > 1 else (rows, k), x_dtype, self._device)
            of_x = self._scales_of_x(rows, scales, input_scale)
            shape = self.shape_of(x.shape, n)
            if out is None:
                out = torch.empty(shape, dtype=self.out_dtype, device=self._device)
            else:
                require_tensor("out", out, shape, self.out_dtype, self._device)
                require_apart("out", out, x=x, residual=residual)
                increment_version((out,))
            if bias is not None:
                bias = aligned(addend("bias", bias, (n,), out))
            if residual is not None:
                if self.kind == "all_gather":
                    raise UsageError("residual is given to an all-gather layer, which takes none: add it to the result")
                residual = aligned(addend("residual", residual, shape, out))
            if rows:
                with self._guards[0]:
                    flat = None if residual is None else residual.view(-1, n)
                    self._call(x.view(-1, k), weight, of_x, weight_scales, out.view(-1, n), bias, flat)
        return out

    def _scales_of_x(self, rows: int, scales: Tensor | None, input_scale: Tensor | None) -> tuple[Tensor, ...]:
        """The scales of x that a kernel takes. Raises UsageError."""
        if self.quantize is not None:
            if scales is not None:
                raise UsageError(f"scales are given, and quantize is {self.quantize!r}, which makes them: leave scales out")
            return () if input_scale is None else (input_scale.view(1),)
        shape = scales_shape(self.layout, rows, self.weight.shape[1], weight=False)
        if scales is None or scales.dtype is not torch.float32 or scales.numel() != math.prod(shape):
            described = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
            raise UsageError(f"scales of x are {described}; they must be float32 {list(shape)}: give such")
        return (laid_out(plain("scales", scales).reshape(shape), self.layout, weight=False),)

    def _call(
        self, x: Tensor, weight: Tensor, of_x: tuple[Tensor, ...], weight_scales: Tensor, out: Tensor,
        bias: Tensor | None, residual: Tensor | None,
    ) -> None:  # fmt: skip
        rows = len(x)
        size = next((size for size in map(self._rows_of, (choice.problem for choice in self.choices)) if rows <= size), None)
        if size is None:
            most = self._rows_of(self.choices[-1].problem)
            raise UsageError(f"x has {rows} rows; it must have at most {most}: give fewer, or a greater max_m to the layer")
        kernel = self._kernels.get(size)
        call = (kernel and kernel.fitted(self.problem(rows))) or self._plain
        adds = {name: added for name, added in (("bias", bias), ("residual", residual)) if added is not None}
        if adds and getattr(call, "ADDS", False):
            call(x, weight, *of_x, weight_scales, out, **adds)
            return
        call(x, weight, *of_x, weight_scales, out)
        for added in adds.values():
            out.add_(added)

    # The backward, with the weight in bf16.

    def _record(self, x: Tensor, out: Tensor | None, residual: Tensor | None) -> Tensor:
        if self.backward_weight is None or self.quantize is None:
            raise UsageError(NO_GRADIENT)
        if out is not None:
            raise UsageError(NO_OUT)
        self.prepare_backward()
        y: Tensor = _Recorded.apply(x, self.backward_weight, self)
        for added in (self.bias, residual):
            y = y if added is None else y + added
        return y

    def prepare_backward(self) -> None:
        """Makes the backward ready: a layer of the same kind with the weight in bf16. Collective."""
        self._ensure_ready()
        if self._gradient is None and self.backward_weight is not None:
            max_m, conditions, _, sizes = self._asked
            options = {"db": self._db, "conditions": conditions, "sizes": sizes}
            self._gradient = self._wide_class(self.backward_weight.detach(), self._group, max_m, **options)
            self._gradient.prepare_backward()

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        return f"{self.kind}, in_features={k}, out_features={n}, scales={self.layout}, quantize={self.quantize}"


class _Recorded(torch.autograd.Function):
    """A call of a layer whose backward uses the weight in bf16. Bias and residual are added outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ScaledLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.run(x.detach(), None, layer.weight, layer.scales, layer.input_scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], False, False, False]
        dy = dy.contiguous()
        like = SimpleNamespace(
            saved_tensors=(x.to(weight.dtype), weight), module=ctx.layer._gradient.handle, kept=False, needs_input_grad=needs
        )
        with torch.no_grad():
            dx, d_weight, *_ = custom_ops.BACKWARD[ctx.layer.kind](like, dy.to(weight.dtype))
        return dx, d_weight, None


class PlainScaled:
    """The bulk-synchronous call of a layer in plain torch, for any size; torch's operators allocate memory at each call."""

    def __init__(self, layer: ScaledLinear) -> None:
        self.world, self.kind, self.layout, self.quantize = layer._world, layer.kind, layer.layout, layer.quantize

    def __call__(self, x: Tensor, weight: Tensor, *rest: Tensor) -> None:
        """See `ScaledLinear._call`."""
        *of_x, weight_scales, out = rest
        scales = of_x[0] if of_x else scales_of(x, self.quantize or "")
        if self.quantize is not None:
            x = quantised(x, scales, self.quantize)
        if self.kind == "all_gather":
            x, scales = self._gathered(x, scales)
        if self.kind != "reduce_scatter" or self.world is None:
            library_product(x, scales, weight, weight_scales, self.layout, out)
            if self.kind == "all_reduce" and self.world is not None:
                dist.all_reduce(out, group=self.world.data)
            return
        partial = out.new_empty(len(x), out.shape[1])
        library_product(x, scales, weight, weight_scales, self.layout, partial)
        reduce_scatter(out, partial, self.world.data)

    def _gathered(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        if self.world is None:
            return x, scales
        whole = x.new_empty(self.world.size * len(x), x.shape[1])
        all_gather(whole, x, self.world.data)
        if self.layout == "tensor":
            return whole, scales
        received = scales.new_empty(self.world.size, scales.shape[1], len(x))
        all_gather(received, scales.t(), self.world.data)
        return whole, received.transpose(0, 1).reshape(scales.shape[1], -1).t()


def made_for(wide_class: Any, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> ScaledLinear | None:
    """The layer for the arguments of `wide_class` if their weight is e4m3, else None. Raises UsageError."""
    options = dict(options)
    weight = arguments[0] if arguments else options.pop("weight", None)
    first = weight[0] if isinstance(weight, list | tuple) and weight else weight
    if not isinstance(first, Tensor) or first.dtype is not CODES:
        if "scales" in options or "quantize" in options:
            kind_of = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise UsageError(f"scales or quantize are given for a weight of {kind_of}; only {CODES} takes them: leave them out")
        return None
    return ScaledLinear(wide_class, kind, weight, options.pop("scales", None), *arguments[1:], **options)


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
