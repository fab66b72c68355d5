"""`normed` of layers with a weight in e4m3: the sum and then the norm, or one kernel of the product, the sum and the norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.nn import custom_ops
from autotax.nn.base import Group, Module, Unknown, module_of
from autotax.nn.groups import on_device
from autotax.nn.norm import AllReduceNorm, call_behind, least_microseconds, norm_behind, winners_behind
from autotax.nn.tensor_checks import require_no_tangent
from autotax.operators.all_reduce_norm import MOST
from autotax.operators.all_reduce_norm import AllReduceNorm as NormProblem


class ScaledNormed(Module):
    """The part of ScaledLinear that norms."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    backward_weight: Tensor | None
    input_scale: Tensor | None
    kind: str
    layout: str
    quantize: str | None
    scale_ub: float | None
    out_dtype: torch.dtype
    _plain: Any
    _sides: tuple[int, int]
    _norm: tuple[AllReduceNorm, ...] = ()
    """The module of `normed`, if any."""
    _whole: dict[int, Any]
    """Kernels of the product, the sum and the norm, by the prepared numbers of rows for which `normed` runs them."""
    _normed_sizes: tuple[int, ...]
    """All numbers of rows for which such kernels were looked up, the smallest first."""

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_whole": {}, "_normed_sizes": ()}

    # Defined by ScaledLinear.

    def problem(self, rows: int) -> Any:
        """The problem of a call with `rows` rows of x on this rank."""
        raise NotImplementedError

    def kernel_for(self, rows: int) -> Any:
        """The tuned kernel for a number of rows, or the bulk-synchronous call."""
        raise NotImplementedError

    def _tensors(self, problem: Any) -> tuple[Tensor, ...]:
        """Tensors of a call of this problem, with any values."""
        raise NotImplementedError

    def _checked(self, *tensors: Any) -> Any:
        """The tensors of a call as kernels take them."""
        raise NotImplementedError

    def _forward(self, x: Tensor, scales: Tensor | None, out: Tensor | None, residual: Tensor | None) -> Tensor:
        """The layer, with the residual added."""
        raise NotImplementedError

    # Preparing.

    def prepare(self, group: Group = Unknown.KEPT) -> None:
        """See Module.prepare. A layer with a norm also measures `normed` with and without each kernel that does all of it."""
        super().prepare(group)
        made, self._whole = self._whole, {}
        faster = {}
        for rows, kernel in made.items():
            us = []
            for choice in ({}, {rows: kernel}):
                self._whole = choice
                us.append(self._microseconds(rows))
            assert self._world is not None
            slowest = [max(times) for times in zip(*self._world.gather(us, list[float]), strict=True)]
            if slowest[1] < slowest[0]:
                faster[rows] = kernel
        self._whole = faster

    def _microseconds(self, rows: int) -> float:
        """Microseconds of `normed` with so many rows on this rank. Collective."""
        assert self._world is not None
        norm, (x, _, *of_x, _, out) = self._norm[0], self._tensors(self.problem(rows))
        scales = of_x[0] if self.quantize is None else None
        read, _ = norm.forms(out.shape)
        ones = {name: torch.ones(size, dtype=dtype, device=self._device) for name, (size, dtype) in read.items() if name != "x"}
        with torch.no_grad():
            return least_microseconds(
                self._world, self._device,
                lambda: self.normed(x, ones["weight"], ones.get("residual"), ones.get("scale"), scales=scales),
            )  # fmt: skip

    def _winners_of_normed(self, hardware: Hardware, notes: list[str]) -> list[tuple[Problem, Config]]:
        """The tuned configs of kernels of the product, the sum and the norm. Collective."""
        n, k = self.weight.shape
        if self.kind != "all_reduce" or self.bias is not None or not self._norm or not self._norm[0].fits(n, self.out_dtype):
            return []
        if self.scale_ub is not None:  # `scaled_fused` may quantise without a bound
            return []
        prepared_for: list[Any] = [choice.problem for choice in self.choices]
        sizes = [problem.m for problem in prepared_for if problem.m <= MOST]
        self._normed_sizes = tuple(sizes)
        problems = [self._norm[0].behind(k, rows, scales=self.layout, quantize=self.quantize or "none") for rows in sizes]
        return winners_behind(self, problems, hardware, notes)

    def _without_normed(self, kernels: list[Any]) -> list[Any]:
        """Keeps the kernels of the product, the sum and the norm for `normed`, and returns the others."""
        self._whole = {kernel.problem.m: kernel for kernel in kernels if kernel.problem.op == NormProblem.op}
        return [kernel for kernel in kernels if kernel.problem.op != NormProblem.op]

    def _rehearsals_of_normed(self, problem: NormProblem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        norm = self._norm[0]
        for rows in dict.fromkeys(count for count in (problem.m, problem.m - 1, 1) if count):
            *operands, _ = self._tensors(self.problem(rows))
            _, (_, *others) = next(norm._rehearsals(norm.behind(0, rows)))
            yield replace(problem, m=rows), (*operands, *others)

    # Calling.

    def normed(
        self, x: Tensor, norm_weight: Tensor, residual: Tensor | None = None, scale: Tensor | None = None, *,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The layer with the residual, then the norm of its result, quantised as the module `norm` says.

        LinearAllReduce runs one kernel for all of it where such a kernel is tuned and was faster when the layer was prepared.
        Without a tuned config for this number of rows it leaves the sum to the norm module.

        Args:
            x: As in a call of the layer.
            norm_weight: [n].
            residual: Shaped like the result of the layer.
            scale: A float32 tensor [1], where the norm has quant "tensor".
            scales: Of an x in e4m3.

        Returns:
            y, the new residual, and the scales if any: see AllReduceNorm.

        Raises:
            UsageError: The layer has no norm, or a tensor is not allowed, or requires a gradient.
        """
        norm = norm_behind(self, residual, x, self.bias, norm_weight, self.backward_weight)
        if self.kind == "all_reduce" and not is_compiling():
            self._ensure_ready()
        if self._size_of_normed(math.prod(x.shape[:-1])) in self._whole:
            tensors = x, scales, self.weight, self.scales, norm_weight, self.handle, self.input_scale, residual, scale
            run = torch.ops.autotax.scaled_linear_normed if is_compiling() else _run_normed
            return tuple(run(*tensors))
        if self.kind == "all_reduce" and not is_compiling():
            call = self.kernel_for(math.prod(x.shape[:-1]))
            if self._world and (call is self._plain or call.config.variant == "bsp"):
                return norm(self._addend(call, x, scales), norm_weight, residual, scale)
        return norm.of_sums(self._forward(x, scales, None, residual), norm_weight, scale)

    def _size_of_normed(self, rows: int) -> int:
        """The prepared number of rows whose way serves `normed` with so many rows; 0: none does."""
        return next((size for size in self._normed_sizes if 0 < rows <= size), 0)

    def in_one(
        self, x: Tensor, scales: Tensor | None, weight: Tensor, weight_scales: Tensor, norm_weight: Tensor,
        input_scale: Tensor | None = None, residual: Tensor | None = None, scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`normed` by one kernel, for a number of rows for which that is fastest."""
        self._ensure_ready()

        def usable() -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, Tensor | None]]:
            require_no_tangent(norm_weight, residual)
            tensors = x, scales, weight, weight_scales, input_scale, None, None, None
            a, of_a, b, of_b, shape, *_ = self._checked(*tensors)
            read = {"weight": norm_weight, "residual": residual, "scale": scale}
            return (a, b, *of_a, of_b), shape, self._norm[0].usable(torch.Size(shape), read)

        with on_device(self._index):
            if self._guards[2]:
                self._compare(lambda: f"x {x.dtype} {list(usable()[0][0].shape)}, normed")
            operands, shape, read = usable()
            kernel = self._whole[self._size_of_normed(math.prod(shape[:-1]))]
            return call_behind(self, kernel, operands, shape, read)

    def _addend(self, call: Any, x: Tensor, scales: Tensor | None) -> Tensor:
        """This rank's addend of the sum of a bulk-synchronous call. The first rank adds the bias."""
        tensors = x, scales, self.weight, self.scales, self.input_scale, None, self.bias, None
        with on_device(self._index):
            x, of_x, weight, weight_scales, shape, bias, _ = self._checked(*tensors)
            out = torch.empty(shape, dtype=self.out_dtype, device=self._device)
            n, k = self._sides
            if x.numel():
                call.product(x.view(-1, k), weight, *of_x, weight_scales, out.view(-1, n))
            if bias is not None and self._world and self._world.rank == 0:
                out += bias
        return out


def _run_normed(
    x: Tensor, scales: Tensor | None, weight: Tensor, weight_scales: Tensor, norm_weight: Tensor, module: int,
    *more: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    return list(module_of(module).in_one(x, scales, weight, weight_scales, norm_weight, *more))


custom_ops.register(
    "scaled_linear_normed(Tensor x, Tensor? scales, Tensor weight, Tensor weight_scales, Tensor norm_weight, int module, "
    "Tensor? input_scale=None, Tensor? residual=None, Tensor? scale=None) -> Tensor[]",
    _run_normed,
    lambda x, _, __, ___, norm_weight, *more: custom_ops.fake_normed(x, norm_weight, norm_weight, *more),
)
