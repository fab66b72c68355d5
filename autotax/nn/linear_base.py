"""The base of the column- and row-parallel linear layers: weights, kernels by size, the check of a call, and the backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import get_ident
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
from autotax.heap.world import World
from autotax.nn import custom_ops, groups  # noqa: F401 - custom_ops registers torch.ops.autotax.*
from autotax.nn.base import NO_OUT, Group, Module, Request, SizeChoice, Unknown, increment_version
from autotax.nn.consensus import DTYPES, invariant_config, wants_invariance, warn_of_sizes
from autotax.nn.groups import on_device
from autotax.nn.scaled_linear import made_for
from autotax.nn.sized import greatest_rows, nothing, remember, sizes_up_to
from autotax.nn.tensor_checks import (
    FREED,
    PLAIN,
    VECTOR_BYTES,
    Accepted,
    active_modes,
    addend,
    aligned,
    plain,
    recorded,
    require_apart,
    require_no_tangent,
    require_recordable,
    require_tensor,
    resolved,
    small,
)

Call = Callable[..., Any]
"""A function of x, weight and out, and also of bias and residual in a layer whose kernels add them."""
ELSEWHERE: Any = object()
Spans = tuple[int, int, int, int]
"""The bytes of x, the weight, the result and a row of the result."""
Kinds = tuple[Accepted, Accepted, Accepted, Accepted]
"""Tensors that calls accept as they are: x with the weight, `out`, the bias, the residual."""
Known = tuple[Call, tuple[int, ...], tuple[Spans, Kinds]]
"""The call for a shape of x, the shape of its result, and for the checks of a call its spans and kinds."""
NOWHERE = -(1 << 62)
"""An address far from every tensor."""
LAYOUTS = ("nk", "kn")
"""[n, k], as in torch.nn.Linear, and [k, n]."""


class ParallelLinear(Module):
    """A linear layer: y = f(x, weight) + bias, where f communicates.

    Each call reads weight and bias anew, wherever torch or one of its tools has put them. Everything else depends only on the
    sizes of the weight, and layers made `like` one another share it.
    """

    weight: Tensor
    bias: Tensor | None
    KIND: str
    """`all_gather`, `reduce_scatter` or `all_reduce`."""
    OPERATORS: tuple[Any, Any]
    """The operators of torch.ops: one returns a new result, the other writes into `out`."""
    _like: tuple[Any, ...] = ()
    """The other layer, in a tuple: torch would register a plain attribute as a submodule."""
    _max_m: int
    _request: Request
    _backward_config: Config | None
    _dtype: torch.dtype
    _shape: tuple[int, ...]
    _features: tuple[int, int]
    """Elements of a row of x, and columns of the result."""
    _known: dict[torch.Size, Known]
    _made: dict[int, Any]
    """Kernels by the rows of x for which they were prepared."""
    _most: int
    _plain: Any

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """A ScaledLinear for a weight in e4m3."""
        scaled = made_for(cls, cls.KIND, arguments, options)
        if scaled and options.get("batch_invariant") is None:
            warn_of_sizes(f"{cls.__name__} with a weight in e4m3")
        return scaled or super().__new__(cls)

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup | None,
        max_m: int,
        bias: Tensor | None,
        layout: str,
        db: str | Path | None,
        conditions: Conditions | None,
        config: Config | None,
        backward_config: Config | None,
        sizes: Sequence[int] | None,
        like: Any,
        check: bool | None,
        prove: bool | float,
        batch_invariant: bool | None,
    ) -> None:
        super().__init__(group, db, check, prove)
        self._invariant, self._by_engine = wants_invariance(batch_invariant), batch_invariant is None
        if layout not in LAYOUTS:
            raise UsageError(f"layout is {layout!r}; allowed are nk ([n, k]) and kn ([k, n]): give one of these")
        self._layout = layout
        self._hold(weight=weight, bias=bias)
        self._max_m, self._request, self._backward_config = max_m, Request(conditions, config, sizes), backward_config
        if like:
            self._share(like, batch_invariant)
        elif not weight.is_meta:
            self.prepare()

    def _share(self, like: ParallelLinear, requested: bool | None) -> None:
        if not isinstance(like, ParallelLinear):
            raise UsageError(f"like is of type {type(like).__name__}; it must be another parallel linear layer: give one")
        theirs = like.weight
        if self.weight.is_meta or theirs.is_meta:
            if self.weight.shape != theirs.shape or self.weight.dtype is not theirs.dtype:
                raise UsageError(f"weight is {list(self.weight.shape)}; `like` has {list(theirs.shape)}: give such")
        else:
            require_tensor("weight", plain("weight", self.weight), tuple(theirs.shape), theirs.dtype, theirs.device)
        self._like = like._like or (like,)
        if requested and not self._like[0]._invariant:
            raise UsageError("batch_invariant is set, and `like` is a layer without it: make that one with it too")
        self._invariant = self._like[0]._invariant
        self.handle = self._like[0].handle

    @property
    def _owner(self) -> Any:
        """The layer that has what layers made `like` one another share."""
        return self._like[0] if self._like else self

    @property
    def choices(self) -> tuple[SizeChoice, ...]:
        return tuple(self._owner._choices)

    @property
    def world_size(self) -> int:
        return self._like[0].world_size if self._like else super().world_size

    def prepare(self, group: Group = Unknown.KEPT) -> None:
        """For a layer made `like` another, prepares that one."""
        if self._like:
            self._like[0].prepare(group)
        else:
            super().prepare(group)

    def use_from_this_thread(self) -> None:
        if self._like:
            self._like[0].use_from_this_thread()
        else:
            super().use_from_this_thread()

    # Defined by subclasses.

    def _problem_of(self, m: int, n: int, k: int, dtype: str, ranks: int) -> Any:
        """The problem of M rows over all ranks, with n columns and k elements in a row on each rank."""
        raise NotImplementedError

    def _rows_of(self, problem: Any) -> tuple[int, int]:
        """Rows of x and of the result on each rank."""
        raise NotImplementedError

    def _unit(self, ranks: int) -> int:
        """The number that must divide M."""
        return ranks

    def _bulk_synchronous(self, rows: int, weight: Tensor) -> Call:
        """The call without a tuned kernel, for up to `rows` rows of x. Collective."""
        raise NotImplementedError

    def _taken(self, weight: Tensor) -> Tensor:
        """A view of the weight in the layout of the kernels."""
        return weight

    def _too_many(self, rows: int) -> str:
        """The error message for a call with more rows than allowed."""
        raise NotImplementedError

    def _other(self, weight: Tensor, **more: Any) -> Any:
        """The layer that the backward for x calls, or None if that needs no other rank. Collective."""
        raise NotImplementedError

    def _m(self, rows: int) -> int:
        """Rows over all ranks of a call with `rows` rows of x."""
        raise NotImplementedError

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        """The shape of the result for a shape of x. Raises UsageError."""
        raise NotImplementedError

    # Preparing.

    def _make(self) -> None:
        conditions, config, sizes = self._request
        world, ranks = self._world, self._world.size if self._world else 1
        if self._invariant and world is None:
            if not self._by_engine:
                raise UsageError("batch_invariant is set, and there is one rank: it is for several, give none")
            self._invariant = False  # the engine makes products of one rank invariant itself
        once = bool(config) or self._invariant
        problems, deployed = self._agreed(lambda: self._problems(self.weight, ranks, self._max_m, sizes, once=once), conditions)
        weight = plain("weight", self.weight.detach())
        self._shape, self._dtype, self._features = tuple(weight.shape), weight.dtype, self.sides_of(weight)
        self._most, _ = self._rows_of(problems[-1])
        self._plain = self._bulk_synchronous(self._most, weight)
        self._look_up(problems, deployed, config)

    def _configs(
        self, world: World, problems: Sequence[Problem], hardware: Hardware, conditions: Conditions, config: Config | None
    ) -> tuple[list[Config | None], list[str]]:
        if self._invariant:
            config = invariant_config(world, problems[-1], hardware, conditions, self._db, config)
        configs, notes = super()._configs(world, problems, hardware, conditions, config)
        return [chosen if chosen and chosen.variant != "bsp" else None for chosen in configs], notes

    def sides_of(self, weight: Tensor) -> tuple[int, int]:
        """Elements of a row of x, and columns of the result."""
        n, k = weight.shape if self._layout == "nk" else weight.shape[::-1]
        return k, n

    def _problems(self, weight: Tensor, ranks: int, max_m: int, sizes: Sequence[int] | None, *, once: bool) -> list[Any]:
        """The problems to prepare for, the smallest first; `once`: only the greatest. Raises UsageError."""
        weight = plain("weight", weight)
        if weight.dim() != 2 or not weight.numel() or weight.dtype not in DTYPES:
            described = f"{weight.dtype} {list(weight.shape)}"
            raise UsageError(f"weight is {described}; it must be [n, K] of {', '.join(DTYPES.values())}: give such a one")
        require_tensor("weight", weight, tuple(weight.shape), weight.dtype, weight.device)
        unit = self._unit(ranks)
        most = greatest_rows(max_m, unit)
        k, n = self.sides_of(weight)
        if self.bias is not None and tuple(self.bias.shape) != (n,):
            raise UsageError(f"bias is {list(self.bias.shape)}; it must be [{n}], the columns of the weight: give such a one")
        requested = sizes_up_to(most, unit, [most] if once else sizes)
        return [self._problem_of(m, n, k, DTYPES[weight.dtype], ranks) for m in requested]

    def _store(self, operators: list[Any], notes: list[str]) -> None:
        self._made = {self._rows_of(kernel.problem)[0]: kernel for kernel in operators}
        if self._invariant and not operators:
            raise UsageError(f"batch_invariant is set, and bulk-synchronous is not: {'; '.join(notes)}")

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        from autotax.nn.prepare import one_of_each_kind, special

        rows, out_rows = self._rows_of(problem)
        step = self._unit(self.world_size) // self._m(1)
        below = max((size for size in self._sizes() if size < rows), default=0)
        near = iter([*range(rows, max(below, rows - 32 * step), -step), below + step])
        k, n = self._features
        weight = plain("weight", self.weight.detach())
        x, out, weight = weight.new_empty(rows, k), weight.new_empty(out_rows, n), self._taken(weight)

        def kind(count: int) -> object:
            fit = self._problem(count)
            return special(fit.m), special(fit.shard_rows), special(fit.shard_rows * n)

        for some in one_of_each_kind(near, kind):
            smaller = self._problem(some)
            yield smaller, (x[:some], weight, out[: self._rows_of(smaller)[1]])

    def _sizes(self) -> list[int]:
        """The numbers of rows of x to prepare for."""
        return [self._rows_of(choice.problem)[0] for choice in self.choices]

    def _problem(self, rows: int) -> Any:
        """The problem of a call with `rows` rows of x."""
        k, n = self._features
        return self._problem_of(self._m(rows), n, k, DTYPES[self._dtype], self.world_size)

    def _place(self) -> torch.device:
        return self.weight.device

    def _changed(self) -> bool:
        made, weight = (self._dtype, self._shape, self._device), self.weight
        return not self._known and made != (weight.dtype, weight.shape, weight.device)

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {
            "_shape": (0, 0),
            "_features": (0, 0),
            "_dtype": torch.float32,
            "_known": {},
            "_made": {},
            "_most": 0,
            "_plain": None,
        }

    # Calling.

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if is_compiling():
            return self._traced(x, out)
        # Reads `__dict__` directly: Module.__getattr__ costs about 0.5 us. Parametrizations, replicas and others keep weight and
        # bias elsewhere; these are found by attribute.
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
        """The call for torch.compile and torch.export."""
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
        """`forward` with weight and bias as arguments, for torch.ops. Row-parallel layers take a residual."""
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
            # Not a lambda: closure variables would slow every call down.
            self._compare(partial(self._described, x, weight, out, bias, residual))
        try:
            # One expression accepts almost every call. For the others `_checked` finds the fault, or adds a kind of tensors.
            entry = state["_known"].get(x.shape)
            if (
                entry
                and not active_modes()
                and x.__class__ is Tensor
                and weight.__class__ in PLAIN
                and (start := x.data_ptr()) > FREED < (weight_start := weight.data_ptr())
                and not (start | weight_start) % VECTOR_BYTES
                and not weight.is_nested
                and ((inputs := entry[2][1][0]).first(x, weight) or inputs.second(x, weight))
            ):
                call, shape, (spans, accepted) = entry
            else:
                x, weight, (call, shape, (spans, accepted)) = self._checked(x, weight, out)
                calls = state["_guards"][0]  # the call may have prepared the module, which sets `_guards`
                start, weight_start = x.data_ptr(), weight.data_ptr()
            size, weight_size, out_size, row_size = spans
            if out is None:
                out, out_start = x.new_empty(*shape), NOWHERE
            else:
                kinds = accepted[1]
                if not (
                    out.__class__ is Tensor
                    and (out_start := out.data_ptr()) > FREED
                    and not out_start % VECTOR_BYTES
                    and not out.is_nested
                    and (kinds.first(out) or kinds.second(out))
                    and not -out_size < out_start - start < size
                    and not -out_size < out_start - weight_start < weight_size
                ):
                    require_tensor("out", out, shape, x.dtype, x.device)
                    require_apart("out", out, x=x, weight=weight)
                    kinds.add(out)
                    out_start = out.data_ptr()
                increment_version((out,))
            if bias is not None and not (
                bias.__class__ in PLAIN
                and (bias_start := bias.data_ptr()) > FREED
                and not bias.is_nested
                and (accepted[2].first(bias) or accepted[2].second(bias))
                and not -out_size < out_start - bias_start < row_size
            ):
                original, bias = bias, addend("bias", bias, shape[-1:], x)
                require_apart("out", out, bias=bias)
                if bias is original:
                    accepted[2].add(bias)
            if residual is not None and not (
                residual.__class__ in PLAIN
                and (residual_start := residual.data_ptr()) > FREED
                and not residual_start % VECTOR_BYTES
                and not residual.is_nested
                and (accepted[3].first(residual) or accepted[3].second(residual))
                and not -out_size < out_start - residual_start < out_size
            ):
                original, residual = residual, addend("residual", residual, shape, x)
                require_apart("out", out, residual=residual)
                residual = aligned(residual)
                if residual is original:
                    accepted[3].add(residual)
        except (RuntimeError, AttributeError) as error:
            tensors = resolved(error, x=x, weight=weight, out=out, bias=bias, residual=residual)
            return self.run(*tensors)
        here = get_ident()
        if calls.thread and calls.thread != here:
            raise calls.overlap()
        calls.thread = here
        try:
            if bias is None and residual is None:
                call(x, weight, out)
            else:
                self._call_and_add(call, x, weight, out, bias, residual)
        finally:
            calls.thread = 0
        return out

    def _call_and_add(
        self, call: Call, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None  # noqa: ARG002
    ) -> None:
        """A call with a bias, or with a residual in layers that accept one."""
        call(x, weight, out)
        out.add_(bias)  # type: ignore[arg-type]

    def _described(
        self, x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
    ) -> str:
        """A description of the call, which must be the same on all ranks. Raises UsageError for what this rank refuses."""
        x, _, (_, shape, _) = self._checked(x, weight, out)
        for name, added, form in (("bias", bias, shape[-1:]), ("residual", residual, shape)):
            if added is not None:
                usable = addend(name, added, form, x)
                if out is not None:
                    require_apart("out", out, **{name: usable})
        return f"x {x.dtype} {list(x.shape)}{' and a bias' * (bias is not None)}"

    def _checked(self, x: Tensor, weight: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Known]:
        """Converts x and the weight for kernels, and remembers the call for all later x of that shape. Raises UsageError.

        A refused call leaves no state. The state that calls keep must be the same on all ranks (`decomposed` counts calls), and
        perhaps only one rank refused the call.
        """
        self._ensure_ready()
        dtype, device = self._dtype, self._device
        original_x, original_weight = x, weight
        x, weight = small("x", x, dtype, device), plain("weight", weight)
        rows = math.prod(x.shape[:-1]) if x.dim() else 0
        k = self._features[0]
        require_tensor("x", x, (*x.shape[:-1], k) if x.dim() > 1 else (rows, k), dtype, device)
        require_tensor("weight", weight, self._shape, dtype, device)
        shape = self.shape_of(x.shape, self._features[1])
        if out is not None:
            require_tensor("out", out, shape, dtype, device)
            require_apart("out", out, x=x, weight=weight)
        entry = self._known.get(x.shape)
        if not entry:
            call = self._choose(rows) if rows else nothing
            sizes = x.nbytes, weight.nbytes, math.prod(shape) * dtype.itemsize, shape[-1] * dtype.itemsize
            kinds = Accepted(), Accepted(), Accepted(), Accepted()
            entry = remember(self._known, x.shape, (call if x.dim() == 2 else in_rows(call), shape, (sizes, kinds)))
        if x is original_x and weight is original_weight:
            entry[2][1][0].add(x, weight)
        return x, weight, entry

    def _choose(self, rows: int) -> Call:
        """The call for `rows` rows of x on this rank, chosen once for each shape of x. Raises UsageError for too many rows."""
        kernel = self._kernel(rows)
        if kernel is None and self._invariant:
            raise UsageError(f"batch_invariant is set, and no kernel takes {rows} rows of x: make the layer with another config")
        return kernel or self._plain

    def _kernel(self, rows: int) -> Any:
        """The tuned kernel for a call of `rows` rows of x, or None. Raises UsageError for too many."""
        if rows > self._most:
            raise UsageError(self._too_many(rows))
        kernel = self._made.get(next(size for size in self._sizes() if rows <= size))
        return kernel and kernel.fitted(self._problem(rows))

    # The backward.

    def prepare_backward(self) -> None:
        """Makes the backward ready: looks up, allocates and compiles. Collective over the group.

        The first call that torch records does this by itself. torch.compile and captured graphs need it before.
        """
        if self._like:
            self._like[0].prepare_backward()
            return
        self._ensure_ready()
        if self._gradient is None:
            weight = plain("weight", self.weight.detach())
            turned = LAYOUTS[1 - LAYOUTS.index(self._layout)]
            options = self._request._replace(config=self._backward_config)._asdict()
            options |= {"db": self._db, "check": self._check, "prove": self._prove}
            inner = self._other(weight, group=self._group, max_m=self._max_m, layout=turned, **options) or self
            if inner is not self:  # from now on only the shape and type of its weight are read
                inner._buffers["weight"] = weight.new_empty(1).expand(weight.shape)
            # Not by an attribute's assignment: torch would register it as a submodule, and state_dict() would hold it.
            vars(self)["_gradient"] = inner

    @property
    def gradient(self) -> Any:
        """The layer for the backward of x, or this layer if that needs no other rank; None before `prepare_backward`."""
        return self._gradient

    def ready_gradient(self) -> Any:
        """`gradient`. Raises UsageError if it is not ready."""
        if self._gradient is None:
            name = type(self).__name__
            raise UsageError(f"the backward of this {name} is not ready: call prepare_backward() on all ranks before")
        return self._gradient

    def _record(
        self, x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        if out is not None:
            raise UsageError(NO_OUT)
        if not is_compiling():  # a compiled call was prepared before, or its operator refuses it
            require_recordable(x=x, weight=weight, bias=bias, residual=residual)
            require_no_tangent(x, weight, bias, residual)
            self.prepare_backward()
        return self._recorded(x, weight, bias, residual)

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """The result of `run`, by operators that have a backward."""
        raise NotImplementedError

    # Copies and closing.

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._like:
            self.handle = self._like[0].handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """If the layer behind `like` is not copied too, the copy shares the same one."""
        shared = tuple(memo.get(id(other), other) for other in self._like)
        other = super().__deepcopy__(memo)
        if shared:
            other._like, other.handle = shared, shared[0].handle
        return other

    def failure(self) -> str | None:
        if self._like:
            failure: str | None = self._like[0].failure()
            return failure
        other = self._gradient if self._gradient is not self else None
        return super().failure() or (other.failure() if other is not None else None)

    def close(self) -> None:
        """Does nothing for a layer made `like` another, which owns no workspaces."""
        if not self._like:
            super().close()

    def extra_repr(self) -> str:
        k, n = self.sides_of(self.weight)
        max_m = self._owner._max_m
        turned = ", layout=kn" if self._layout == "kn" else ""
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}{turned}, max_m={max_m}, ranks={self.world_size}"


def in_rows(call: Call) -> Call:
    """Extends a call to tensors with several leading dimensions."""

    def flat(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])

    return lambda x, weight, out, *added: call(x.view(-1, x.shape[-1]), weight, out.view(-1, out.shape[-1]), *map(flat, added))
