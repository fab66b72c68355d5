"""The boundary behind a row-parallel product: all-reduce, residual, RMSNorm, and a quantisation to e4m3 if calls ask for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.heap.world import World, together
from autotax.nn import (
    custom_ops,  # noqa: F401 - registers torch.ops.autotax.*
    groups,
)
from autotax.nn.base import NO_BACKWARD, Request, increment_version
from autotax.nn.consensus import configs_for, deployed_as
from autotax.nn.fallback import PlainNorm
from autotax.nn.groups import on_device
from autotax.nn.sized import SizedModule, nothing, remember
from autotax.nn.tensor_checks import (
    active_modes,
    ordinal_of,
    ready,
    recorded,
    require_apart,
    require_no_tangent,
    require_tensor,
    resolved,
    small,
)
from autotax.operators.all_reduce_norm import EPS, GROUP
from autotax.operators.all_reduce_norm import AllReduceNorm as NormProblem
from autotax.operators.inputs import EIGHT_BITS

REPEATED = 8
"""Calls of a sample, and samples, with which a layer chooses between two ways."""
Call = Callable[..., Any]
Form = tuple[torch.Size, torch.dtype]
"""The shape and the dtype of a tensor."""
Known = tuple[Call, dict[str, Form], dict[str, Form]]
"""The call for a shape of x, the forms of the tensors that it reads, and those of the tensors that it writes."""


class AllReduceNorm(SizedModule):
    """S = the sum over the ranks of x, + the residual; y = S / sqrt(mean(S^2) + eps) * (weight + offset), on all ranks alike.

    One module serves all layers of the same sizes. Construction is collective over `group` (None: all ranks, or this process
    alone).

    - `hidden`: columns of x, a multiple of 8 up to 16384; of 128 with `quant="block"`.
    - `max_m`: the most rows of a call, up to 8192. Workspaces are allocated for it once.
    - `dtype`: of x, the weight, the residual and y: bf16, fp16 or fp32.
    - `eps`: is added to the mean square. `offset`: 1 where the weight is stored as its difference from 1 (Gemma), else 0.
    - `residual`: whether calls bring a residual.
    - `quant`: "none", or how y is quantised to e4m3. "tensor" takes one `scale` from calls. "row" and "block" take the largest
      magnitude of a row or of 128 columns.
    - `sizes`: numbers of rows to prepare for; default: powers of two. A call uses the config of the next greater number.
    - `device`, `db`, `conditions`, `config`, `check`, `prove`: see FlashDecode and AllGatherLinear.

    Raises UsageError on all ranks alike. Falls back to the collective library and warns as AllGatherLinear does.
    """

    SIZE = "m"
    _most: NormProblem
    _known: dict[torch.Size, Known]
    _ordinal: int
    _alone: Call

    def __init__(
        self,
        hidden: int,
        max_m: int = 8192,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        eps: float = EPS,
        offset: int = 0,
        residual: bool = True,
        quant: str = "none",
        device: torch.device | str | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        check: bool | None = None,
        prove: bool | float = False,
    ) -> None:
        super().__init__(group, db, check, prove, device)
        self._dtype, self._eps = dtype, eps
        added = "added" if residual else "none"
        self._limits = {"m": max_m, "hidden": hidden, "residual": added, "quant": quant, "offset": offset}
        self._request = Request(conditions, config, sizes)
        self.prepare()

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_alone": None, "_ordinal": -1}

    def _besides(self) -> str:
        return f"eps={self._eps!r}"

    def _greatest(self, dtype: str) -> NormProblem:
        if not (isinstance(self._eps, int | float) and 0 < self._eps < math.inf):
            raise UsageError(f"eps is {self._eps}; it must be a number above 0: give such a one")
        return NormProblem(dtype=dtype, world_size=self.world_size, **self._limits)

    def _make_plain(self) -> PlainNorm:
        plain_norm = PlainNorm(self._world, self._most, self._device)
        self._ordinal, self._alone = ordinal_of(self._device), plain_norm.alone
        return plain_norm

    def _store(self, operators: list[Any], notes: list[str]) -> None:
        super()._store(operators, notes)
        self._prepare_alone()

    def _prepare_alone(self) -> None:
        """Compiles the norm of rows that are sums already. Collective."""
        for kernel in self._of_greatest()[:1]:
            assert self._world is not None
            _, (_, weight, residual_out, *rest) = next(iter(self._rehearsals(self._most)))
            rest = rest[1:] if self._most.residual == "added" else rest
            with together(self._world, "compile the norm of sums"), kernel.context.rehearsal():
                kernel.alone(residual_out, weight, *rest, eps=self._eps)
            self._alone = kernel.alone

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """Other numbers of rows need no further compilation."""
        assert isinstance(problem, NormProblem)
        read, written = self.forms(torch.Size((problem.m, problem.hidden)))
        made = {name: torch.empty(*form[:1], dtype=form[1], device=self._device) for name, form in (read | written).items()}
        yield problem, in_order(**made)

    def forms(self, shape: torch.Size) -> tuple[dict[str, Form], dict[str, Form]]:
        """The forms of the tensors that a call with x of this shape reads, and of those that it writes, by name."""
        most, dtype = self._most, self._dtype
        read: dict[str, Form] = {"x": (shape, dtype), "weight": (torch.Size((most.hidden,)), dtype)}
        written: dict[str, Form] = {"out": (shape, EIGHT_BITS.get(most.out_dtype, dtype)), "residual_out": (shape, dtype)}
        if most.residual == "added":
            read["residual"] = shape, dtype
        if most.quant == "tensor":
            read["scale"] = torch.Size((1,)), torch.float32
        elif most.quant != "none":
            groups_of_row = () if most.quant == "row" else (most.hidden // GROUP,)
            written["scales_out"] = torch.Size((*shape[:-1], *groups_of_row)), torch.float32
        return read, written

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
        scales_out: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Sums, adds, norms, and quantises if the module was made so. Enqueues on the current stream of the module's device.

        Every rank must make the same calls in the same order, one at a time. No tensor that is written may share memory with
        another one.

        Args:
            x: This rank's partial sums, [..., hidden].
            weight: [hidden].
            residual: Shaped like x, the same on all ranks; for a module with `residual=True`.
            scale: A float32 tensor [1], for `quant="tensor"`.
            out: Where to store y. Default: a new tensor.
            residual_out: Where to store S. Default: a new tensor.
            scales_out: Where to store the scales. Default: a new tensor.

        Returns:
            y and the new residual S, shaped like x. With quant "row" and "block" also the scales, float32 [...] and
            [..., hidden / 128].

        Raises:
            UsageError: A tensor is not allowed; nothing is enqueued. There is no backward.
        """
        if not is_compiling():
            return self.run(x, weight, residual, scale, out, residual_out, scales_out)
        if is_grad_enabled() and recorded(x, weight, residual, out, residual_out):
            self._record()
        results = (out, residual_out, scales_out)
        if all(result is None for result in results):
            return tuple(torch.ops.autotax.all_reduce_norm(x, weight, self.handle, residual, scale))
        forms = self.forms(x.shape)[1].values()
        made = [
            x.new_empty(shape, dtype=dtype) if result is None else result
            for (shape, dtype), result in zip(forms, results, strict=False)
        ]
        torch.ops.autotax.all_reduce_norm_out(x, weight, *made, *[None] * (3 - len(made)), self.handle, residual, scale)
        return tuple(made)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor | None = None,
        scale: Tensor | None = None,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
        scales_out: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, ...]:
        """The body of `forward`; for the operators of torch.ops.

        `in_place`: y may be stored in x and the new residual in the residual. The caller has asked `works_in_place`.
        """
        if is_grad_enabled() and recorded(x, weight, residual, out, residual_out):
            self._record()
        if forward_ad._current_level >= 0:
            require_no_tangent(x, weight, residual, out, residual_out)
        _, index, check = self._guards
        if index is not None and groups.current_device() != index:
            with on_device(index):
                return self.run(x, weight, residual, scale, out, residual_out, scales_out, in_place=in_place)
        read = {"x": x, "weight": weight, "residual": residual, "scale": scale}
        results = {"out": out, "residual_out": residual_out, "scales_out": scales_out}
        if check:
            self._compare(partial(self._described, read, results))
        try:
            entry = self._known.get(x.shape)
            if active_modes() or not (
                entry and all(_fits(tensor, entry[1].get(name), self._ordinal) for name, tensor in read.items())
            ):
                read, entry = self._checked(read, results)
            call, _, written = entry
            brought = [(name, result) for name, result in results.items() if result is not None]
            _require_known(brought, written)
            for name, result in brought:
                if not _fits(result, written[name], self._ordinal):
                    require_tensor(name, result, *written[name], self._device)
            if brought and not in_place:
                _require_apart(read, brought)
            filled = {
                name: x.new_empty(form[0], dtype=form[1]) if results[name] is None else results[name]
                for name, form in written.items()
            }
        except (RuntimeError, AttributeError) as error:
            return self.run(*resolved(error, **read, **results), in_place=in_place)
        if brought:
            increment_version(tuple(result for _, result in brought))
        with self._guards[0]:
            call(*in_order(**read, **filled))
        return tuple(filled.values())  # type: ignore[arg-type]

    def of_sums(self, total: Tensor, weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """y, `total` itself and the scales of `forward` for rows that are sums already, with their residual. No rank waits.

        Args:
            total: [..., hidden], of the module's dtype.
            weight: [hidden].
            scale: A float32 tensor [1], for `quant="tensor"`.

        Raises:
            UsageError: A tensor is not allowed, or requires a gradient.
        """
        if is_compiling():
            y, *scales = torch.ops.autotax.norm_of_sums(total, weight, self.handle, scale)
            return y, total, *scales
        if is_grad_enabled() and recorded(total, weight):
            self._record()
        require_no_tangent(total, weight)
        self._ensure_ready()
        with on_device(self._index):
            forms, written = self.forms(total.shape)
            total, weight = small("total", total, self._dtype, self._device), small("weight", weight, self._dtype, self._device)
            require_tensor("total", total, tuple(forms["x"][0]), self._dtype, self._device)
            require_tensor("weight", weight, tuple(forms["weight"][0]), self._dtype, self._device)
            if (scale is not None) != ("scale" in forms):
                raise UsageError("scale belongs to quant tensor, and it alone: give it there")
            if scale is not None:
                require_tensor("scale", scale, (1,), torch.float32, self._device)
            filled = {name: total.new_empty(form[0], dtype=form[1]) for name, form in written.items() if name != "residual_out"}
            if total.numel():
                x, weight, _, *more = in_order(x=total, weight=weight, residual_out=total, scale=scale, **filled)
                self._alone(x, weight, *more, eps=self._eps)
        y, *scales = filled.values()
        return y, total, *scales

    @property
    def eps(self) -> float:
        """The epsilon of calls."""
        return self._eps

    def behind(self, k: int, rows: int, scales: str = "none", quantize: str = "none") -> NormProblem:
        """The problem of a call with `rows` rows behind a product with inner dimension k on each rank."""
        return replace(self._most, m=rows, k=k, scales=scales, quantize=quantize)

    def fits(self, columns: int, dtype: torch.dtype) -> bool:
        """Whether rows of so many columns and this dtype can be normed."""
        return (self._most.hidden, self._dtype) == (columns, dtype)

    @property
    def adds_residual(self) -> bool:
        """Whether calls bring a residual."""
        return bool(self._limits["residual"] == "added")

    def works_in_place(self, rows: int) -> bool:
        """Whether the call for this number of rows reads each element of x and the residual before anything overwrites it."""
        call = self._calls.get(rows) or self._choose(rows)
        return bool(call.func.in_place)  # type: ignore[attr-defined]

    def _described(self, read: dict[str, Tensor | None], results: dict[str, Tensor | None]) -> str:
        """A description of the call, which must be the same on all ranks. Raises UsageError for what this rank refuses."""
        read, (_, _, written) = self._checked(read, results)
        x, brought = read["x"], [(name, result) for name, result in results.items() if result is not None]
        _require_known(brought, written)
        _require_apart(read, brought)
        assert x is not None
        return f"x {x.dtype} {list(x.shape)}"

    def _checked(
        self, read: dict[str, Tensor | None], results: dict[str, Tensor | None]
    ) -> tuple[dict[str, Tensor | None], Known]:
        """Converts the inputs for kernels, and remembers the call for all later x of this shape. Raises UsageError."""
        self._ensure_ready()
        device, hidden = self._device, self._most.hidden
        x = small("x", read["x"], self._dtype, device)  # type: ignore[arg-type]
        require_tensor("x", x, (*x.shape[:-1], hidden), self._dtype, device)
        usable = self.usable(x.shape, read)
        forms, written = self.forms(x.shape)
        for name, tensor in results.items():
            if tensor is not None and name in written:
                require_tensor(name, tensor, tuple(written[name][0]), written[name][1], device)
        rows = math.prod(x.shape[:-1])
        call = (self._calls.get(rows) or self._choose(rows)) if rows else nothing
        return usable, remember(self._known, x.shape, (call, forms, written))

    def usable(self, shape: torch.Size, read: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Tensors that a call with x of this shape reads, converted for kernels. Raises UsageError."""
        forms, _ = self.forms(shape)
        usable: dict[str, Tensor | None] = dict.fromkeys(read)
        for name, tensor in read.items():
            if (tensor is not None) != (name in forms):
                what, allowed = ("not given", "needs it: give it") if tensor is None else ("given", "takes none: leave it out")
                raise UsageError(f"{name} is {what}; this module {allowed}, or make it for such calls")
            if tensor is not None:
                form, dtype = forms[name]
                usable[name] = tensor = small(name, tensor, dtype, self._device)
                require_tensor(name, tensor, tuple(form), dtype, self._device)
        return usable

    def _choose(self, rows: int) -> Call:
        """The call for this number of rows, chosen once for each number."""
        most = self._most
        if rows > most.m:
            raise UsageError(f"x has {rows} rows; it must have at most {most.m}: give fewer, or a greater max_m")
        call: Call = partial(self._fitting(rows), eps=self._eps)
        return remember(self._calls, rows, call)

    def extra_repr(self) -> str:
        max_m, hidden, residual, quant, offset = self._limits.values()
        sizes = f"hidden={hidden}, max_m={max_m}, dtype={self._dtype}, eps={self._eps}"
        return f"{sizes}, residual={residual}, quant={quant}, offset={offset}, ranks={self.world_size}"


def held(norm: AllReduceNorm | None) -> tuple[AllReduceNorm, ...]:
    """The norm of a layer in a tuple: torch would register a plain attribute as a submodule. Raises UsageError."""
    if norm is not None and not isinstance(norm, AllReduceNorm):
        raise UsageError(f"norm is of type {type(norm).__name__}; it must be an autotax.nn.AllReduceNorm: give one, or none")
    return () if norm is None else (norm,)


def winners_behind(
    layer: Any, problems: Sequence[NormProblem], hardware: Hardware, notes: list[str]
) -> list[tuple[Problem, Config]]:
    """The tuned configs of norms behind the product of a layer that has a norm. Collective."""
    layer._norm[0].use_from_this_thread()
    deployed = deployed_as(layer._request.conditions, hardware.on_gpu)
    configs, stale = configs_for(layer._world, problems, hardware, deployed, layer._db, None, layer._prove, counted=False)
    notes += stale
    return [(problem, config) for problem, config in zip(problems, configs, strict=True) if config]


def call_behind(
    layer: Any, kernel: Any, operands: tuple[Tensor, ...], shape: tuple[int, ...], read: dict[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """The results of a kernel of the product, the sum and the norm. `operands` and `read` are converted for kernels."""
    x, *more = operands
    norm: AllReduceNorm = layer._norm[0]
    filled = {name: x.new_empty(size, dtype=dtype) for name, (size, dtype) in norm.forms(torch.Size(shape))[1].items()}
    a, *others = in_order(x=x, **read, **filled)
    with layer._guards[0]:
        kernel.fitted(replace(kernel.problem, m=len(a)))(a, *more, *others, eps=norm.eps)
    return tuple(filled.values())


@torch.no_grad()
def least_microseconds(world: World, device: torch.device, call: Callable[[], object]) -> float:
    """Microseconds of a call on this rank. Collective.

    On GPUs the minimum over REPEATED replays of a graph with REPEATED calls; on CPUs a single sample of a single call. On GPUs
    each call follows a sum that replaces what the L2 holds, because in a model other products pass between two calls. The result
    includes the time of that sum.
    """
    least, on_gpu = math.inf, device.type == "cuda"
    repeated = REPEATED if on_gpu else 1
    flush = torch.ones(torch.cuda.get_device_properties(device).L2_cache_size // 2 if on_gpu else 1, device=device)

    def sample() -> None:
        for _ in range(repeated):
            flush.sum()
            call()

    run: Callable[[], object] = sample
    sample()
    if on_gpu:
        world.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample()
        run = graph.replay
    for _ in range(repeated):
        world.synchronize()
        world.barrier()
        started = time.perf_counter()
        run()
        world.synchronize()
        least = min(least, time.perf_counter() - started)
    return least / repeated * 1e6


def norm_behind(layer: Any, residual: Tensor | None, *read: Tensor | None) -> AllReduceNorm:
    """The norm of a call of `normed` that reads these tensors. Raises UsageError."""
    if not layer._norm:
        raise UsageError(f"this {type(layer).__name__} was made without a norm: make it with norm=")
    if is_grad_enabled() and recorded(*read, residual):
        raise UsageError(NO_BACKWARD)
    norm: AllReduceNorm = layer._norm[0]
    if (residual is not None) is not norm.adds_residual:  # whichever way is the fastest
        what, allowed = ("not given", "needs it: give it") if residual is None else ("given", "takes none: leave it out")
        raise UsageError(f"residual is {what}; the layer's norm {allowed}, or make the norm for such calls")
    return norm


def _fits(tensor: Tensor | None, form: Form | None, ordinal: int) -> bool:
    """Whether a tensor has a form and can be used as it is; no tensor has no form."""
    return form is None if tensor is None else form is not None and ready(tensor, *form, ordinal)


def _require_known(brought: list[tuple[str, Tensor]], written: dict[str, Form]) -> None:
    for name, _ in brought:
        if name not in written:
            raise UsageError(f"{name} is given; this module has no such result: leave it out")


def _require_apart(read: dict[str, Tensor | None], written: list[tuple[str, Tensor]]) -> None:
    """Raises UsageError if a result shares memory with another tensor of the call. All are contiguous."""
    inputs = [(name, tensor) for name, tensor in read.items() if tensor is not None]
    spans = [(name, start := tensor.data_ptr(), start + tensor.nbytes) for name, tensor in (*written, *inputs)]
    for number, (name, first, end) in enumerate(spans[: len(written)]):
        for other, start, last in spans[number + 1 :]:
            if start < end and first < last:
                require_apart(name, dict(written)[name], **{other: dict([*written, *inputs])[other]})


def in_order(
    x: Any, weight: Any, out: Any, residual_out: Any, residual: Any = None, scale: Any = None, scales_out: Any = None
) -> tuple[Tensor, ...]:
    """The tensors of a call in the order of kernels, in rows."""

    def in_rows(tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])

    more = [tensor for tensor in (residual if residual is None else in_rows(residual), scale, scales_out) if tensor is not None]
    return in_rows(x), weight, in_rows(residual_out), *more, in_rows(out)
