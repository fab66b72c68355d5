"""Linear layers with a kernel for each of some sizes: what is looked up and prepared, and which of it serves a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware, detect
from autotax.nn import custom_ops, gradients  # noqa: F401 - register torch.ops.autotax.*
from autotax.nn.base import NO_OUT, SizeChoice, sizes_up_to
from autotax.nn.consensus import DTYPES, configs_for
from autotax.nn.linear_base import Call, WeightedModule
from autotax.nn.tensor_checks import ordinal_of, plain, require_no_tangent, require_recordable, require_tensor

LAYOUTS = ("nk", "kn")
"""[n, k], as torch.nn.Linear holds a weight, and [k, n]."""


class SizedLinear(WeightedModule):
    """A linear layer on ranks. The sizes M that it prepares for, and that users give, count the rows of all ranks.

    A subclass says which problem a number of rows of x makes, and what runs where nothing is tuned. Its backward for x is the
    `_gradient`, a layer of the other kind, which shares nothing with this one but the weight that each call brings.
    """

    _made: dict[int, Any]
    """Kernels, by the rows of x that they were prepared for."""
    _most: int
    _plain: Any
    _gradient: Any

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
    ) -> None:
        super().__init__(group, db, check, prove)
        if layout not in LAYOUTS:
            raise UsageError(f"layout is {layout!r}; allowed are nk ([n, k]) and kn ([k, n]): give one of these")
        self._layout = layout
        self._hold("weight", weight)
        self._hold("bias", bias)
        self._asked = (max_m, conditions, config, backward_config, sizes)
        if like:
            self._share(like)
        elif not weight.is_meta:
            self.prepare()

    # What a subclass says.

    def _problem_of(self, m: int, n: int, k: int, dtype: str, ranks: int) -> Any:
        """The problem of M rows over all ranks, with n columns and k elements in a row on each rank."""
        raise NotImplementedError

    def _rows_of(self, problem: Any) -> tuple[int, int]:
        """Rows of x and of the result on each rank."""
        raise NotImplementedError

    def _unit(self, ranks: int) -> int:
        """What M is a multiple of."""
        return ranks

    def _bulk_synchronous(self, rows: int, weight: Tensor) -> Call:
        """What runs where nothing is tuned, for up to `rows` rows of x. Collective."""
        raise NotImplementedError

    def _taken(self, weight: Tensor) -> Tensor:
        """The weight as kernels take it: a view of it."""
        return weight

    def _too_many(self, rows: int) -> str:
        """What is wrong with a call of so many rows."""
        raise NotImplementedError

    def _other(self, weight: Tensor, **more: Any) -> Any:
        """The layer that the backward for x calls, or None where that needs no other rank. Collective."""
        raise NotImplementedError

    # Preparing.

    def _blank(self) -> dict[str, Any]:
        """See Module._blank."""
        return super()._blank() | {"_made": {}, "_most": 0, "_plain": None, "_gradient": None}

    def _make(self) -> None:
        """See Module._make."""
        max_m, conditions, config, _, sizes = self._asked
        world, ranks = self._world, self._world.size if self._world else 1
        problems, deployed = self._agreed(lambda: self._problems(self.weight, ranks, max_m, sizes, once=bool(config)), conditions)
        weight = plain("weight", self.weight.detach())
        self._shape, self._dtype, self._features = tuple(weight.shape), weight.dtype, self.sides_of(weight)
        self._usual = self._dtype, ordinal_of(self._device), self._shape
        self._most, _ = self._rows_of(problems[-1])
        self._plain = self._bulk_synchronous(self._most, weight)
        if world is not None:
            hardware = detect(world.backend)
            self._tune(problems, hardware, *configs_for(world, problems, hardware, deployed, self._db, config, self._prove))

    def sides_of(self, weight: Tensor) -> tuple[int, int]:
        """Elements of a row of x, and columns of the result."""
        n, k = weight.shape if self._layout == "nk" else weight.shape[::-1]
        return k, n

    def _problems(self, weight: Tensor, ranks: int, max_m: int, sizes: Sequence[int] | None, *, once: bool) -> list[Any]:
        """The problems to prepare for, the smallest first; `once`: the greatest alone. Raises UsageError."""
        weight = plain("weight", weight)
        if weight.dim() != 2 or not weight.numel() or weight.dtype not in DTYPES:
            told = f"{weight.dtype} {list(weight.shape)}"
            raise UsageError(f"weight is {told}; it must be [n, K] of {', '.join(DTYPES.values())}: give such a one")
        require_tensor("weight", weight, tuple(weight.shape), weight.dtype, weight.device)
        unit = self._unit(ranks)
        if isinstance(max_m, bool) or not isinstance(max_m, int) or max_m < unit:
            least = f"{unit}, the number of ranks" if unit > 1 else "1"
            raise UsageError(f"max_m is {max_m!r}; it must be a whole number from {least}: give a greater one")
        k, n = self.sides_of(weight)
        most = max_m // unit * unit
        wanted = sizes_up_to(most, unit, [most] if once else sizes)
        return [self._problem_of(m, n, k, DTYPES[weight.dtype], ranks) for m in wanted]

    def _tune(self, problems: list[Any], hardware: Hardware, configs: Sequence[Config | None], notes: list[str]) -> None:
        """Prepares what is tuned for some size; `notes` are what the user should know of that. Collective."""
        wanted: list[tuple[Problem, Config]] = [
            (problem, chosen) for problem, chosen in zip(problems, configs, strict=True) if chosen and chosen.variant != "bsp"
        ]
        made = {self._rows_of(kernel.problem)[0]: kernel for kernel in self._operators(wanted, hardware, notes)}
        self._made = made
        ran = {rows: kernel.config for rows, kernel in made.items()}
        self._choices = tuple(SizeChoice(problem, ran.get(self._rows_of(problem)[0])) for problem in problems)
        self._warn(notes)

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """See Module._rehearsals."""
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

    def _m(self, rows: int) -> int:
        """Rows over all ranks of a call with `rows` rows of x."""
        raise NotImplementedError

    def _sizes(self) -> list[int]:
        """Rows of x that are prepared for."""
        return [self._rows_of(choice.problem)[0] for choice in self.choices]

    def _problem(self, rows: int) -> Any:
        """The problem of a call with `rows` rows of x."""
        k, n = self._features
        return self._problem_of(self._m(rows), n, k, DTYPES[self._dtype], self.world_size)

    # Calling.

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        """The shape of the result for a shape of x. Raises UsageError."""
        raise NotImplementedError

    def _result(self, x: torch.Size) -> tuple[int, ...]:
        """See WeightedModule._result."""
        return self.shape_of(x, self._features[1])

    def _choose(self, rows: int) -> Call:
        """See WeightedModule._choose."""
        call: Call = self._kernel(rows) or self._plain
        return call

    def _kernel(self, rows: int) -> Any:
        """What is tuned for a call of `rows` rows of x, or None. Raises UsageError for too many."""
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
            max_m, conditions, _, config, sizes = self._asked
            weight = plain("weight", self.weight.detach())
            turned = LAYOUTS[1 - LAYOUTS.index(self._layout)]
            asked = {"db": self._db, "conditions": conditions, "config": config, "sizes": sizes, "check": self._check}
            asked["prove"] = self._prove
            self._gradient = self._other(weight, group=self._group, max_m=max_m, layout=turned, **asked) or self
            if self._gradient is not self:  # of its weight only shape and type are asked for from now on
                self._gradient._buffers["weight"] = weight.new_empty(1).expand(weight.shape)

    @property
    def gradient(self) -> Any:
        """The layer that the backward for x calls, itself where that needs no other rank. Raises UsageError until it is ready."""
        if self._gradient is None:
            name = type(self).__name__
            raise UsageError(f"the backward of this {name} is not ready: call prepare_backward() on all ranks before")
        return self._gradient

    def _record(
        self, x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """See Module._record."""
        if out is not None:
            raise UsageError(NO_OUT)
        if not is_compiling():  # what is compiled was prepared before, or its operator refuses
            require_recordable(x=x, weight=weight, bias=bias, residual=residual)
            require_no_tangent(x, weight, bias, residual)
            self.prepare_backward()
        return self._recorded(x, weight, bias, residual)

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """What `run` computes, by operators that have a backward."""
        raise NotImplementedError

    # The end.

    def failure(self) -> str | None:
        """See Module.failure."""
        inner = self._gradient
        return super().failure() or (inner.failure() if inner is not None and inner is not self else None)

    def _release(self) -> None:
        """See Module._release."""
        inner, self._gradient = self._gradient, None
        if inner is not None and inner is not self:
            inner.close()
        super()._release()

    def _forget(self) -> None:
        """See Module._forget."""
        super()._forget()
        self._made.clear()
        self._plain = None

    def extra_repr(self) -> str:
        k, n = self.sides_of(self.weight)
        max_m, *_ = (self._like[0] if self._like else self)._asked
        turned = ", layout=kn" if self._layout == "kn" else ""
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}{turned}, max_m={max_m}, ranks={self.world_size}"
