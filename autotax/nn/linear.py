"""The column-parallel linear layer with sequence parallelism: gathers the rows of its input while it multiplies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
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
from autotax.hardware import Hardware
from autotax.heap.collectives import all_gather
from autotax.nn.base import NO_OUT, Group, Unknown, increment_version
from autotax.nn.fallback import PlainLinear, PlainRowLinear
from autotax.nn.groups import on_device
from autotax.nn.linear_base import ELSEWHERE, Call, ParallelLinear
from autotax.nn.norm import AllReduceNorm, call_behind, held, least_microseconds, norm_behind, winners_behind
from autotax.nn.tensor_checks import addend, aligned, plain, recorded, require_apart, require_no_tangent, require_recordable
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.operators.all_reduce_norm import MOST as MOST_NORMED
from autotax.operators.all_reduce_norm import AllReduceNorm as NormProblem
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

Several = Sequence[Tensor]


class AllGatherLinear(ParallelLinear):
    """y = gather(x) @ weight.T + bias: x [m, ..., K] on each rank, the same m on all, to [world size * m, ..., n].

    `layer(x)`, or `layer(x, out)` to have the result in `out`, or `layer(x, gathered=True)` for the result and the gathered x
    [world size * m, ..., K], a new tensor. A call enqueues on the current stream of the weight's device;
    every rank must make the same calls in the same order, one at a time. For invalid input it raises UsageError
    and enqueues nothing. Construction is collective over `group` (None: all ranks, or this process alone).

    - `weight` [n, K], bf16, fp16 or fp32: this rank's output features (rows of the weight), laid out as in torch.nn.Linear.
      It is used without a copy. A Parameter stays a Parameter; another tensor becomes a buffer. The same n on all ranks.
      Several weights [n_i, K] share one gather and one product: they are copied once into one contiguous `weight`, of which
      `weights` are views. The result is then a tuple of views [world size * m, ..., n_i] of one tensor.
      With a weight in e4m3, `scales=` its scales and `quantize=` the layer is a ScaledLinear (autotax/nn/scaled_linear.py).
    - `bias` [n]: a separate kernel adds it to the result; stored like the weight. Default: none. One for each of several weights.
    - `max_m`: the most rows that a call gathers. Workspaces are allocated for it once.
    - `layout`: "nk", or "kn" for weights [K, n]. Only the vendor's library reads these, so fewer variants can be tuned.
    - `keep_gathered`: a call that torch records keeps the gathered x for the weight's gradient, world size times x in memory.
      False: the backward gathers x again.
    - `sizes`: gathered sizes M to prepare for, each a multiple of the world size; default: powers of two times the world
      size. A call uses the config of the next greater size.
    - `db`: the database, a path or a URL; default: yours.
    - `conditions`: the conditions of calls (autotax.core.conditions.Conditions), the same on all ranks. Look-ups use
      them. Default: the conditions of `autotax tune` without --mode, --l2 and --skew.
    - `config`: this config for every size that it supports, without a look-up. `backward_config`: likewise for the backward
      for x, which is GEMM + Reduce-Scatter.
    - `like`: another layer whose group, sizes, configs and workspaces this one shares; only `weight` and `bias` are used
      then, and construction is not collective. For layers of equal shapes whose calls follow each other on one stream.
    - `prove`: before look-ups, prove winners again that are stale only in software, by separate processes on the same GPUs. The
      outcome is stored, so it happens once. Give the limit in seconds, or True: $AUTOTAX_PROVE_S seconds (10) for each size, and
      30 to start.
    - `batch_invariant`: one config for all sizes, whose rows have the same bits whatever their number; calls are never
      bulk-synchronous. Needs several ranks. Default: whether VLLM_BATCH_INVARIANT or SGLANG_ENABLE_DETERMINISTIC_INFERENCE is on.
    - `check`: compare each call with those of the other ranks, which then wait for one another; default: AUTOTAX_CHECK=1 in
      the environment.

    With a weight on the meta device, and in a copy, the first call prepares the layer. The weight must have values by then.
    Raises UsageError on all ranks alike. The layer is bulk-synchronous if no tuned config is valid, if the ranks have different
    ones, or if kernels cannot be prepared. If the user may not expect that, every rank issues a RuntimeWarning.
    """

    KIND = "all_gather"
    OPERATORS = (torch.ops.autotax.all_gather_linear, torch.ops.autotax.all_gather_linear_out)
    columns: tuple[int, ...] = ()
    """Columns of each of several weights."""

    def __init__(
        self,
        weight: Tensor | Several,
        group: dist.ProcessGroup | None = None,
        max_m: int = 8192,
        *,
        bias: Tensor | Several | None = None,
        layout: str = "nk",
        keep_gathered: bool = True,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        backward_config: Config | None = None,
        sizes: Sequence[int] | None = None,
        like: AllGatherLinear | None = None,
        check: bool | None = None,
        prove: bool | float = False,
        batch_invariant: bool | None = None,
    ) -> None:
        columns: tuple[int, ...] = ()
        if not isinstance(weight, Tensor):
            side = 1 if layout == "kn" else 0
            parts = _several("weight", weight)
            weight = _behind_each_other("weight", parts, side)
            columns = tuple(part.shape[side] for part in parts)
        if bias is not None and not isinstance(bias, Tensor):
            bias = _behind_each_other("bias", _several("bias", bias), 0)
        vars(self).update(columns=columns, _keep=bool(keep_gathered))
        super().__init__(
            weight, group, max_m, bias, layout, db, conditions, config, backward_config, sizes, like, check, prove,
            batch_invariant,
        )  # fmt: skip

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Views of the weight, one for each weight that was given."""
        return self.weight.split(self.columns, 1 if self._layout == "kn" else 0) if self.columns else (self.weight,)

    def _problem_of(self, m: int, n: int, k: int, dtype: str, ranks: int) -> AllGatherGemm:
        return AllGatherGemm(m, n, k, dtype, "m", ranks, self._layout)

    def _rows_of(self, problem: AllGatherGemm) -> tuple[int, int]:
        return problem.shard_rows, problem.m

    def _m(self, rows: int) -> int:
        return rows * self.world_size

    def _bulk_synchronous(self, rows: int, weight: Tensor) -> PlainLinear:
        return PlainLinear(self._world, rows, self._taken(weight))

    def _taken(self, weight: Tensor) -> Tensor:
        return weight.t() if self._layout == "kn" else weight

    def _too_many(self, rows: int) -> str:
        most = self._most * self.world_size
        return (
            f"x has {rows} rows on each of {self.world_size} ranks; it must have at most {self._most} "
            f"(M at most {most}): give fewer, or make the layer with a greater max_m"
        )

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        return x[0] * self.world_size, *x[1:-1], columns

    def _choose(self, rows: int) -> Call:
        call = super()._choose(rows)
        return call if self._layout == "nk" else lambda x, weight, out: call(x, weight.t(), out)

    # Calling.

    def forward(self, x: Tensor, out: Tensor | None = None, gathered: bool = False) -> Any:
        """The product of the rows of all ranks and this rank's weight. Enqueues on the current stream of x's device.

        Args:
            x: [m / ranks, ..., k], this rank's rows.
            out: Where to store y. Default: a new tensor.
            gathered: Whether to return the gathered x too.

        Returns:
            y [m, ..., n], or a tuple of one for each weight; with `gathered` also x of all ranks, [m, ..., k].

        Raises:
            UsageError: A tensor is not allowed; nothing is enqueued.
        """
        state = self.__dict__
        if gathered or state["columns"] or is_compiling():
            return self._unusual(x, out, gathered)
        # Repeats ParallelLinear.forward: calling it would cost some tenths of a microsecond.
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

    def _unusual(self, x: Tensor, out: Tensor | None, gathered: bool) -> Any:
        """A call under torch.compile, with several weights, or that also returns the gathered x."""
        if not gathered:
            y = super().forward(x, out)
            return y.split(self.columns, -1) if self.columns else y
        first = self._owner
        if is_compiling() and not (torch.is_grad_enabled() and recorded(x, self.weight, out, self.bias)):
            if out is not None:
                raise UsageError("out is given with gathered=True; compiled calls have no such operator: give one of them")
            y, whole = torch.ops.autotax.all_gather_linear_gathered(x, self.weight, first.handle)
            y = y if self.bias is None else y + self.bias
        else:
            y, whole = first.run_gathered(x, self.weight, out, self.bias)
        return (y.split(self.columns, -1) if self.columns else y), whole

    def run_gathered(
        self, x: Tensor, weight: Tensor, out: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The result and the gathered x."""
        if torch.is_grad_enabled() and recorded(x, weight, out, bias):
            if out is not None:
                raise UsageError(NO_OUT)
            require_recordable(x=x, weight=weight, bias=bias)
            require_no_tangent(x, weight, bias)
            self.prepare_backward()
            y, whole = torch.ops.autotax.all_gather_linear_recorded(x, weight, self.handle, True)
            return (y if bias is None else y + bias), whole
        require_no_tangent(x, weight, out, bias)
        _, index, check = self._guards
        with on_device(index):
            if check:
                self._compare(lambda: self._described(x, weight, out, bias) + ", gathered")
            x, weight, (_, shape, _) = self._checked(x, weight, out)
            if bias is not None:
                bias = addend("bias", bias, shape[-1:], x)
                if out is not None:
                    require_apart("out", out, bias=bias)
            out = x.new_empty(*shape) if out is None else out
            increment_version((out,))
            whole = x.new_empty(x.shape[0] * self.world_size, *x.shape[1:])
            if x.numel():
                flat = (tensor.view(-1, tensor.shape[-1]) for tensor in (x, out, whole))
                with self._guards[0]:
                    self._gather_too(self._taken(weight), *flat)
            return (out if bias is None else out.add_(bias)), whole

    def _gather_too(self, weight: Tensor, x: Tensor, out: Tensor, whole: Tensor) -> None:
        """Runs the tuned kernel if it can return the gathered rows; else bulk-synchronous, which gathers into `whole`."""
        kernel = self._kernel(len(x))
        if kernel is not None:
            from autotax.kernels.all_gather_gemm.gathered import hand_out, hands_out

            if hands_out(kernel):
                kernel(x, weight, out)
                hand_out(kernel, x, whole)
                return
            if self._invariant and self._world is not None:
                kernel(x, weight, out)
                all_gather(whole, x, self._world.data)
                return
        self._plain(x, weight, out, whole)
        if self._world is None:
            whole.copy_(x)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenates x of all ranks, by the collective library. A backward needs this if the forward kept no gathered x."""
        whole = x.new_empty(x.shape[0] * self.world_size, *x.shape[1:])
        if self._world is None or not x.numel():
            return whole.copy_(x)
        with on_device(self._index), self._guards[0]:
            all_gather(whole, x, self._world.data)
        return whole

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:  # noqa: ARG002
        keep = self._keep and weight.requires_grad
        y, _ = torch.ops.autotax.all_gather_linear_recorded(x, weight, self.handle, keep)
        return y if bias is None else y + bias

    def _other(self, weight: Tensor, **more: Any) -> Any:
        return LinearReduceScatter(weight, **more)


def _several(name: str, tensors: object) -> tuple[Tensor, ...]:
    """Raises UsageError for anything but several tensors."""
    several = tuple(tensors) if isinstance(tensors, Iterable) else (tensors,)
    if not all(isinstance(tensor, Tensor) for tensor in several):
        raise UsageError(f"{name} is of type {type(tensors).__name__}; it must be a torch.Tensor or a list of them: give one")
    return several


def _behind_each_other(name: str, parts: tuple[Tensor, ...], side: int) -> Tensor:
    """Concatenates several tensors. The result is a Parameter if they are Parameters. Raises UsageError."""
    kinds = {(isinstance(part, torch.nn.Parameter), part.requires_grad, part.dtype, part.device) for part in parts}
    shapes = {part.shape[:side] + part.shape[side + 1 :] for part in parts}
    if len(kinds) != 1 or len(shapes) != 1 or min(part.dim() for part in parts) <= side:
        described = ", ".join(f"{part.dtype} {list(part.shape)}{' frozen' * (not part.requires_grad)}" for part in parts)
        raise UsageError(f"{name} is {described or 'an empty list'}; several must be alike but for their columns: give such ones")
    whole = torch.cat([plain(name, part.detach()) for part in parts], side)
    kept, wants, *_ = kinds.pop()
    return torch.nn.Parameter(whole, requires_grad=wants) if kept else whole


# The row-parallel linear layers: kernels add up the products of all ranks while they compute.

class RowParallelLinear(ParallelLinear):
    """The base of both row-parallel layers."""

    OUTPUT: str
    _norm: tuple[AllReduceNorm, ...] = ()
    """The module of `normed`, if any."""
    _apart: dict[int, bool]
    """For each prepared number of rows, whether `normed` runs the product and then the norm module, which sums."""
    _whole: dict[int, Any]
    """Kernels of the product, the sum and the norm, by the prepared numbers of rows for which `normed` runs them."""

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        max_m: int = 8192,
        *,
        bias: Tensor | None = None,
        layout: str = "nk",
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        backward_config: Config | None = None,
        sizes: Sequence[int] | None = None,
        like: Any = None,
        check: bool | None = None,
        prove: bool | float = False,
        norm: AllReduceNorm | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        norm = norm or next(iter(getattr(like, "_norm", ())), None)
        vars(self).update(_norm=held(norm), _apart={})
        super().__init__(
            weight, group, max_m, bias, layout, db, conditions, config, backward_config, sizes, like, check, prove,
            batch_invariant,
        )  # fmt: skip

    def forward(self, x: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """The sum over the ranks of their products. Enqueues on the current stream of x's device.

        Args:
            x: [m, ..., k], this rank's columns of x.
            out: Where to store y. Default: a new tensor.
            residual: Shaped like y; it is added to the sum.

        Returns:
            y [m, ..., n], or this rank's rows of it where the layer scatters them.

        Raises:
            UsageError: A tensor is not allowed; nothing is enqueued.
        """
        if residual is None:
            return super().forward(x, out)
        if is_compiling():
            return self._traced(x, out, residual)
        first = self._owner
        return first.run(x, self.weight, out, self.bias, residual)

    def normed(
        self, x: Tensor, norm_weight: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The layer, and the norm of its result and the residual, quantised as the module `norm` says.

        Runs the layer with the residual and then the norm, or the product and then the norm module with its sum, or one kernel.
        Takes the way that was fastest for this number of rows when the layer was prepared; with `batch_invariant` the first.

        Args:
            x: As in a call of the layer.
            norm_weight: [n].
            residual: Shaped like the result of the layer.
            scale: A float32 tensor [1], where the norm has quant "tensor".

        Returns:
            y, the new residual, and the scales if any: see AllReduceNorm.

        Raises:
            UsageError: The layer has no norm, or a tensor is not allowed, or requires a gradient.
        """
        first, norm = self._owner, norm_behind(self, residual, x, self.weight, self.bias, norm_weight)
        rows = math.prod(x.shape[:-1])
        # One kernel adds no bias, and its norm is that of the layer that was prepared.
        in_one = self.bias is None and norm is next(iter(first._norm), None)
        if rows and in_one and any(rows <= most for most in first._whole):
            if is_compiling():
                every = torch.ops.autotax.linear_all_reduce_normed(x, self.weight, norm_weight, first.handle, residual, scale)
                return tuple(every)
            return first.in_one(x, self.weight, norm_weight, residual, scale)
        if next((apart for most, apart in first._apart.items() if rows <= most), False):
            return norm(self._product(x), norm_weight, residual, scale)
        return norm.of_sums(self(x, None, residual), norm_weight, scale)

    def _product(self, x: Tensor) -> Tensor:
        """This rank's addend. The first rank adds the bias."""
        first = self._owner
        weight = self.weight if self._layout == "nk" else self.weight.t()
        return torch.nn.functional.linear(x, weight, None if first._world and first._world.rank else self.bias)

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_whole": {}}

    def prepare(self, group: Group = Unknown.KEPT) -> None:
        """See Module.prepare. A layer with a norm also measures both ways of `normed` where both have a tuned config."""
        super().prepare(group)
        if self._norm and not self._like:
            self._apart = self._measured(self._norm[0])

    def in_one(
        self, x: Tensor, weight: Tensor, norm_weight: Tensor, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """`normed` by one kernel, for a number of rows for which that is fastest."""
        norm = self._norm[0]
        _, index, check = self._guards

        def usable(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...], dict[str, Tensor | None]]:
            require_no_tangent(x, weight, norm_weight, residual)
            x, weight, (_, shape, _) = self._checked(x, weight, None)
            read = {"weight": norm_weight, "residual": residual, "scale": scale}
            return x, weight, shape, norm.usable(torch.Size(shape), read)

        with on_device(index):
            if check:
                self._compare(lambda: self._described(x, weight, None, None) + ", normed" * bool(usable(x, weight)))
            x, weight, shape, tensors = usable(x, weight)
            kernel = next(kernel for most, kernel in self._whole.items() if math.prod(shape[:-1]) <= most)
            return call_behind(self, kernel, (x, weight), shape, tensors)

    def _measured(self, norm: AllReduceNorm) -> dict[int, bool]:  # noqa: ARG002
        """Whether the product and then the norm module is the faster way, for each prepared number of rows. Collective."""
        return {}

    def _traced(self, x: Tensor, out: Tensor | None, residual: Tensor | None = None) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_grad_enabled() and recorded(x, weight, out, bias, residual):
            return self._record(x, weight, out, bias, residual)
        make, write = self.OPERATORS
        if out is None:
            y: Tensor = make(x, weight, self.handle, bias, residual)
            return y
        write(x, weight, out, self.handle, bias, residual)
        return out

    def _call_and_add(
        self, call: Call, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> None:
        """The kernel adds bias and residual where it stores the sum."""
        call(x, weight, out, aligned(bias), residual)

    def _choose(self, rows: int) -> Call:
        """If a plugin's kernel does not add bias and residual, a separate kernel does."""
        call = super()._choose(rows)
        return call if call is self._plain or getattr(call, "ADDS", False) else adding_behind(call)

    def _operators(self, requested: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Any]:
        """Also compiles kernels for calls that add."""
        return self._with_additions(super()._operators(requested, hardware, notes))

    def _problem_of(self, m: int, n: int, k: int, dtype: str, ranks: int) -> GemmReduceScatter:
        return GemmReduceScatter(m, n, k, dtype, self.OUTPUT, ranks, self._layout)

    def _rows_of(self, problem: GemmReduceScatter) -> tuple[int, int]:
        return problem.m, problem.out_rows

    def _m(self, rows: int) -> int:
        return rows

    def _bulk_synchronous(self, rows: int, weight: Tensor) -> PlainRowLinear:
        return PlainRowLinear(self._world, rows, weight, turned=self._layout == "kn", replicated=self.OUTPUT == "replicated")

    def _too_many(self, rows: int) -> str:
        return f"x has {rows} rows; it must have at most {self._most}: give fewer, or make the layer with a greater max_m"


class LinearReduceScatter(RowParallelLinear):
    """y = this rank's rows of the sum over the ranks of x @ weight.T, + bias: x [M, ..., k] on each rank, to [M / ranks, ..., n].

    `layer(x)`; `layer(x, out)` has the result in `out`; `residual`, shaped like the result, is added to it. Rank r gets the r-th
    part of the first dimension, which the ranks must divide. Everything else, also arguments that are not listed here, is as
    in AllGatherLinear.

    - `weight` [n, k], or [k, n] with `layout="kn"`, which every variant reads without a copy: this rank's input features.
    - `bias` [n]: the whole bias, the same on all ranks. Each rank adds it to its rows; its gradient is summed over the ranks.
    - `max_m`: the most rows of x. `sizes`: numbers of rows of x to prepare for, each a multiple of the world size.
    - `config`, `backward_config`: of GEMM + Reduce-Scatter, and of the backward for x, which is All-Gather + GEMM.

    - `norm`: an AllReduceNorm of n columns, for `normed`: this rank's rows are normed, and quantised if the norm says so, where
      they were added up.

    Kernels add bias and residual in float32 where they store the sum. Bulk-synchronous calls add them to the rounded sum, by
    separate kernels.
    """

    OUTPUT = "scattered"
    KIND = "reduce_scatter"
    OPERATORS = (torch.ops.autotax.linear_reduce_scatter, torch.ops.autotax.linear_reduce_scatter_out)

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        if x[0] % self.world_size:
            raise UsageError(
                f"x is {list(x)}; {self.world_size} ranks share the first dimension: "
                "give a multiple, padded with zeros if need be"
            )
        return x[0] // self.world_size, *x[1:-1], columns

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.autotax.linear_reduce_scatter_recorded(x, weight, self.handle, bias, residual)
        return y

    def _other(self, weight: Tensor, **more: Any) -> Any:
        return AllGatherLinear(weight, **more)


class LinearAllReduce(RowParallelLinear):
    """y = the sum over the ranks of x @ weight.T, + bias: x [m, ..., k] on each rank, to [m, ..., n] on all, for decoding.

    Like LinearReduceScatter, but for any number of rows. The gradient of the result must be the same on all ranks, as it is if
    all compute the same loss from it. Then no gradient needs another rank. The residual's gradient is the result's, and
    the bias's is its sum over the rows.
    """

    OUTPUT = "replicated"
    KIND = "all_reduce"
    OPERATORS = (torch.ops.autotax.linear_all_reduce, torch.ops.autotax.linear_all_reduce_out)

    def _unit(self, ranks: int) -> int:  # noqa: ARG002
        return 1

    def _measured(self, norm: AllReduceNorm) -> dict[int, bool]:
        if self._world is None or self._invariant:  # the other ways do not keep the bits of a row
            return {}
        ways = {}
        timed = partial(least_microseconds, self._world, self._device)
        made, self._whole = self._whole, {}
        weight = self.weight.detach().new_ones(self._features[1])
        faster: dict[int, Any] = {}
        scaled = "scale" in norm.forms(torch.Size((1, len(weight))))[0]
        scale = torch.ones(1, dtype=torch.float32, device=self._device) if scaled else None
        for rows in (size for size in self._sizes() if norm.tuned_for(size) or size in made):
            x = self.weight.detach().new_zeros(rows, self._features[0])
            residual = x.new_zeros(rows, len(weight)) if norm.adds_residual else None
            us = []
            for apart in (True, False):
                self._apart = {rows: apart}
                us.append(timed(lambda: self.normed(x, weight, residual, scale)))  # noqa: B023
            if rows in made:
                self._whole = {rows: made[rows]}
                us.append(timed(lambda: self.normed(x, weight, residual, scale)))  # noqa: B023
                self._whole = {}
            slowest = [max(times) for times in zip(*self._world.gather(us, list[float]), strict=True)]
            ways[rows] = slowest[0] <= slowest[1]
            if slowest.index(min(slowest)) == 2:
                faster[rows] = made[rows]
        self._whole = faster
        return ways

    def _operators(self, requested: list[tuple[Problem, Config]], hardware: Hardware, notes: list[str]) -> list[Any]:
        """Also makes the kernels of product, sum and norm that were tuned. Collective."""
        whole: list[tuple[Problem, Config]] = []
        norm = next(iter(self._norm), None)
        if norm and self.bias is None and self._layout == "nk" and self._world is not None and not self._invariant:
            k, _ = self._features
            problems = [norm.behind(k, rows) for rows in self._sizes() if rows <= MOST_NORMED]
            whole = winners_behind(self, problems, hardware, notes)
        kernels = super()._operators([*requested, *whole], hardware, notes)
        self._whole = {kernel.problem.m: kernel for kernel in kernels if kernel.problem.op == NormProblem.op}
        return [kernel for kernel in kernels if kernel.problem.op != NormProblem.op]

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        if not isinstance(problem, NormProblem):
            yield from super()._rehearsals(problem)
            return
        weight = plain("weight", self.weight.detach())
        for _, (_, *others) in self._norm[0]._rehearsals(replace(problem, k=0)):
            yield problem, (weight.new_empty(problem.m, problem.k), weight, *others)

    def shape_of(self, x: torch.Size, columns: int) -> tuple[int, ...]:
        return *x[:-1], columns

    def _recorded(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.autotax.linear_all_reduce_recorded(x, weight, self.handle, bias, residual)
        return y

    def _other(self, weight: Tensor, **more: Any) -> None:
        """Returns None: the gradient of x needs no other rank."""


def adding_behind(call: Call) -> Call:
    """Extends a call: separate kernels add bias and residual to the stored result."""

    def run(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
        call(x, weight, out)
        for added in (bias, residual):
            if added is not None:
                out.add_(added)

    return run
