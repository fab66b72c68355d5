"""What modules with a weight share: where weight and bias are looked up, `like`, and a call's way to its operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from autotax.core.errors import UsageError
from autotax.nn import groups
from autotax.nn.base import Group, Module, SizeChoice, Unknown, increment_version, nothing, remember
from autotax.nn.groups import on_device
from autotax.nn.tensor_checks import (
    FREED,
    PLAIN,
    VECTOR_BYTES,
    addend,
    aligned,
    plain,
    recorded,
    require_apart,
    require_no_tangent,
    require_tensor,
    resolved,
    small,
)

W = TypeVar("W", bound="WeightedModule")
Call = Callable[..., Any]
"""Of x, weight and out; in a layer that adds them itself, of bias and residual too."""
ELSEWHERE: Any = object()
Known = tuple[Call, tuple[int, ...], tuple[int, int, int, int]]
"""What runs for a shape of x, the shape of its result, and the bytes of x, the weight, the result and a row of the result."""
NOWHERE = -(1 << 62)
"""An address that no tensor begins near."""


class WeightedModule(Module):
    """A linear layer: y = f(x, weight) + bias, where f communicates.

    Weight and bias are looked up at each call, wherever torch or a tool of it has put them. Everything else belongs to the
    sizes of the weight, and layers made `like` one another share it.
    """

    weight: Tensor
    bias: Tensor | None
    OPERATORS: tuple[Any, Any]
    """The operators of torch.ops: with a result made, and into `out`."""
    _like: tuple[Any, ...] = ()
    """In a tuple, for torch would take it for a part of this module."""
    _asked: tuple[Any, ...]
    """What was asked for at construction, the greatest number of rows first."""
    _dtype: torch.dtype
    _shape: tuple[int, ...]
    _features: tuple[int, int]
    """Elements of a row of x, and columns of the result."""
    _known: dict[torch.Size, Known]
    _usual: tuple[Any, int, tuple[int, ...]]
    """What a call asks for, in one attribute: type and `ordinal_of` the device of all tensors, and the shape of the weight."""

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None or isinstance(tensor, torch.nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)

    def _share(self: W, like: W) -> None:
        """Makes this one a layer `like` another, whose weight has the same shape and type."""
        theirs = like.weight
        if self.weight.is_meta or theirs.is_meta:
            alike = self.weight.shape == theirs.shape and self.weight.dtype is theirs.dtype
            if not alike:
                raise UsageError(f"weight is {list(self.weight.shape)}; `like` has {list(theirs.shape)}: give such")
        else:
            require_tensor("weight", plain("weight", self.weight), tuple(theirs.shape), theirs.dtype, theirs.device)
        self._like = like._like or (like,)
        self.handle = self._like[0].handle

    def _blank(self) -> dict[str, Any]:
        """See Module._blank."""
        sizes = {"_shape": (0, 0), "_features": (0, 0), "_dtype": torch.float32, "_usual": (None, -1, ())}
        return super()._blank() | sizes | {"_known": {}}

    def _place(self) -> torch.device:
        """See Module._place."""
        return self.weight.device

    def _changed(self) -> bool:
        """See Module._changed."""
        made, weight = (self._dtype, self._shape, self._device), self.weight
        return not self._known and made != (weight.dtype, weight.shape, weight.device)

    @property
    def choices(self) -> tuple[SizeChoice, ...]:
        return self._like[0].choices if self._like else self._choices

    @property
    def world_size(self) -> int:
        return self._like[0].world_size if self._like else super().world_size

    def prepare(self, group: Group = Unknown.KEPT) -> None:
        """See Module.prepare. For a layer made `like` another, prepares that one."""
        if self._like:
            self._like[0].prepare(group)
        else:
            super().prepare(group)

    def failure(self) -> str | None:
        """See Module.failure."""
        return self._like[0].failure() if self._like else super().failure()

    def use_from_this_thread(self) -> None:
        """See Module.use_from_this_thread."""
        if self._like:
            self._like[0].use_from_this_thread()
        else:
            super().use_from_this_thread()

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if is_compiling():
            return self._traced(x, out)
        # Where they usually are: each attribute of a torch.nn.Module costs more than what is asked of it, and those that torch
        # looks for elsewhere first half a microsecond. Parametrizations, replicas and others put them elsewhere.
        state = self.__dict__
        parameters = state["_parameters"]
        weight: Tensor | None = parameters.get("weight")
        if weight is None:
            weight = state["_buffers"].get("weight")
            if weight is None:
                weight = self.weight
        bias = parameters.get("bias", ELSEWHERE)
        if bias is ELSEWHERE:
            bias = self.bias
        like = state.get("_like")
        return (like[0] if like else self).run(x, weight, out, bias)

    def _traced(self, x: Tensor, out: Tensor | None) -> Tensor:
        """A call as torch.compile and torch.export see it."""
        weight, bias = self.weight, self.bias
        if torch.is_grad_enabled() and recorded(x, weight, out, bias):
            return self._record(x, weight, out, bias)
        make, write = self.OPERATORS
        if out is None:
            out = make(x, weight, self.handle)
            return out if bias is None else out + bias
        write(x, weight, out, self.handle)
        return out if bias is None else out.add_(bias)

    def run(
        self, x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """What `forward` does, with weight and bias given; for the operators of torch.ops. A residual: see RowLinear."""
        if is_grad_enabled() and recorded(x, weight, out, bias, residual):
            return self._record(x, weight, out, bias, residual)
        if forward_ad._current_level >= 0:
            require_no_tangent(x, weight, out, bias, residual)
        state = self.__dict__
        calls, index, check = state["_guards"]
        if index is not None and groups.current_device() != index:
            with on_device(index):
                return self.run(x, weight, out, bias, residual)
        if check:
            self._compare(lambda: self._described(x, weight, out, bias))
        try:
            # All that can be wrong, in one question whose parts cost least; `_checked` finds out what, and knows new shapes.
            known = state["_known"].get(x.shape)
            dtype, ordinal, weight_shape = state["_usual"]
            if (
                known
                and x.__class__ is Tensor
                and weight.__class__ in PLAIN
                and weight.shape == weight_shape
                and x.dtype is weight.dtype is dtype
                and x.get_device() == weight.get_device() == ordinal
                and x.is_contiguous()
                and weight.is_contiguous()
                and (start := x.data_ptr()) > FREED < (weight_start := weight.data_ptr())
                and not (start | weight_start) % VECTOR_BYTES
                and not x.is_neg()
                and not weight.is_neg()
            ):
                call, shape, spans = known
            else:
                x, weight, (call, shape, spans) = self._checked(x, weight, out)
                dtype, ordinal, _ = state["_usual"]  # which it may have prepared for
                calls = state["_guards"][0]
                start, weight_start = x.data_ptr(), weight.data_ptr()
            size, weight_size, out_size, row_size = spans
            if out is None:
                out, out_start = x.new_empty(*shape), NOWHERE
            else:
                if not (
                    out.__class__ is Tensor
                    and out.shape == shape
                    and out.dtype is dtype
                    and out.get_device() == ordinal
                    and out.is_contiguous()
                    and (out_start := out.data_ptr()) > FREED
                    and not out_start % VECTOR_BYTES
                    and not out.is_neg()
                    and not -out_size < out_start - start < size
                    and not -out_size < out_start - weight_start < weight_size
                ):
                    require_tensor("out", out, shape, dtype, x.device)
                    require_apart("out", out, x=x, weight=weight)
                increment_version((out,))
            if bias is not None and not (
                bias.__class__ in PLAIN
                and bias.shape == shape[-1:]
                and bias.dtype is dtype
                and bias.get_device() == ordinal
                and bias.is_contiguous()
                and (bias_start := bias.data_ptr()) > FREED
                and not bias.is_neg()
                and not -out_size < out_start - bias_start < row_size
            ):
                bias = addend("bias", bias, shape[-1:], x)
                require_apart("out", out, bias=bias)
            if residual is not None and not (
                residual.__class__ in PLAIN
                and residual.shape == shape
                and residual.dtype is dtype
                and residual.get_device() == ordinal
                and residual.is_contiguous()
                and (residual_start := residual.data_ptr()) > FREED
                and not residual_start % VECTOR_BYTES
                and not residual.is_neg()
                and not -out_size < out_start - residual_start < out_size
            ):
                residual = addend("residual", residual, shape, x)
                require_apart("out", out, residual=residual)
                residual = aligned(residual)
        except RuntimeError as error:
            given = resolved(error, x=x, weight=weight, out=out, bias=bias, residual=residual)
            return self.run(*given)
        if calls.inside.setdefault(0, here := get_ident()) != here:
            raise calls.overlap()
        try:
            if bias is None and residual is None:
                call(x, weight, out)
            else:
                self._call_and_add(call, x, weight, out, bias, residual)
        finally:
            calls.inside.clear()
        return out

    def _call_and_add(
        self, call: Call, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None  # noqa: ARG002
    ) -> None:
        """A call with a bias, or with the residual of layers that take one."""
        call(x, weight, out)
        out.add_(bias)  # type: ignore[arg-type]

    def _described(self, x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None) -> str:
        """What must be the same on all ranks. Raises UsageError for what this rank refuses."""
        x, *_ = self._checked(x, weight, out)
        return f"x {x.dtype} {list(x.shape)}{' and a bias' * (bias is not None)}"

    def _checked(self, x: Tensor, weight: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Known]:
        """x and the weight as kernels can take them and what runs then, from now on for all x of that shape. Raises UsageError.

        Nothing is remembered of a call that is refused: what a call takes with it of those before must be the same on all
        ranks (`decomposed` counts them), and only one of them may have been refused.
        """
        self._ensure_ready()
        dtype, device = self._dtype, self._device
        x, weight = small("x", x, dtype, device), plain("weight", weight)
        rows = math.prod(x.shape[:-1]) if x.dim() else 0
        k = self._features[0]
        require_tensor("x", x, (*x.shape[:-1], k) if x.dim() > 1 else (rows, k), dtype, device)
        require_tensor("weight", weight, self._shape, dtype, device)
        shape = self._result(x.shape)
        if out is not None:
            require_tensor("out", out, shape, dtype, device)
            require_apart("out", out, x=x, weight=weight)
        call = self._choose(rows) if rows else nothing
        sizes = x.nbytes, weight.nbytes, math.prod(shape) * dtype.itemsize, shape[-1] * dtype.itemsize
        return x, weight, remember(self._known, x.shape, (call if x.dim() == 2 else in_rows(call), shape, sizes))

    def _result(self, x: torch.Size) -> tuple[int, ...]:
        """The shape of the result for a shape of x."""
        raise NotImplementedError

    def _choose(self, rows: int) -> Call:
        """What runs for `rows` rows a rank. Work of the host alone, done once for each shape of x. Raises UsageError."""
        raise NotImplementedError

    def _forget(self) -> None:
        """See Module._forget."""
        self._known.clear()

    def close(self) -> None:
        """See Module.close. A layer made `like` another has nothing to give back."""
        if not self._like:
            super().close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._like:
            self.handle = self._like[0].handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See Module.__deepcopy__. Where what the layer is like is not copied too, the copy is like the same one."""
        shared = tuple(memo.get(id(other), other) for other in self._like)
        other = super().__deepcopy__(memo)
        if shared:
            other._like, other.handle = shared, shared[0].handle
        return other


def in_rows(call: Call) -> Call:
    """A call for rows that have several dimensions."""

    def flat(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])

    return lambda x, weight, out, *added: call(x.view(-1, x.shape[-1]), weight, out.view(-1, out.shape[-1]), *map(flat, added))
