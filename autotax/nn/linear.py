"""The column-parallel linear layer with sequence parallelism: gathers the rows of its input while it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.errors import UsageError
from autotax.hardware import Hardware, detect
from autotax.nn import ops  # noqa: F401 - registers torch.ops.autotax.*
from autotax.nn.agree import DTYPES, configs_for
from autotax.nn.module import (
    VECTOR_BYTES,
    Choice,
    Module,
    first_size,
    require_no_grad,
    require_tensor,
    sizes_up_to,
    world_of,
)
from autotax.nn.plain import PlainLinear
from autotax.problem import AllGatherGemm, Problem

Call = Callable[[Tensor, Tensor, Tensor], Any]
Known = tuple[Call, tuple[int, int]]
"""What runs for a shape of x, and the shape of its result."""


class AllGatherLinear(Module):
    """y = gather(x) @ weight.T. Construction is collective over `group` (None: all ranks, or this process alone).

    - `weight` [n, K], bf16, fp16 or fp32: the own columns of the whole weight, laid out as torch.nn.Linear lays them out;
      used as it is, without a copy, and kept as the Parameter that it is, or else as a buffer. The same n on all ranks.
    - `max_m`: the most rows that a call gathers. Workspaces are allocated for it once.
    - `sizes`: gathered sizes M to prepare for, each a multiple of the world size; default: powers of two times the world
      size. A call uses what is tuned for the next greater of them.
    - `db`: the database, a path or a URL; default: yours.
    - `conditions`: as what calls are deployed (autotax.conditions.Conditions), the same on all ranks; what was tuned for these
      is looked up. Default: the usual ones, of `autotax tune` without --mode, --l2 and --skew.
    - `config`: this config for every size that it can take, without any look-up.
    - `like`: another layer whose group, sizes, configs and workspaces this one shares; nothing else but `weight` is taken then,
      and nothing is collective. For layers of equal shapes whose calls follow each other on one stream.

    Raises UsageError on all ranks alike. Where no tuned config holds, or the ranks have different ones, or kernels cannot
    be prepared, the layer is bulk-synchronous; where that comes as a surprise, RuntimeWarning says so on every rank.
    """

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        max_m: int = 8192,
        *,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        like: AllGatherLinear | None = None,
    ) -> None:
        super().__init__(like._world if like else world_of(group, weight.device), weight.device)
        if isinstance(weight, torch.nn.Parameter):
            self.weight = weight
            self._holder: dict[str, Any] = self._parameters
        else:
            self.register_buffer("weight", weight)
            self._holder = self._buffers
        self._dtype = weight.dtype
        self._known: dict[torch.Size, Known] = {}
        self._made: dict[int, Any] = {}
        self._columns, self._inner = self._shape = tuple(weight.shape) if weight.dim() == 2 else (0, 0)
        # In a tuple, for torch would take it for a part of this module.
        self._like: tuple[AllGatherLinear, ...] = ()
        self._most = 0
        if like:
            require_tensor("weight", weight, (like._columns, like._inner), like._dtype, like._device)
            self._like = like._like or (like,)
            self.handle, self._most, self.choices = like.handle, like._most, like.choices
            return
        world, ranks = self._world, self.world_size
        problems, deployed = self._agreed(
            lambda: _problems(weight, ranks, max_m, [max_m // ranks * ranks] if config else sizes), conditions
        )
        self._most = problems[-1].shard_rows
        self._plain = PlainLinear(world, self._most, weight.detach())
        if world is not None:
            hardware = detect(world.backend)
            self._tune(problems, hardware, *configs_for(world, problems, hardware, deployed, db, config))

    def _tune(
        self, problems: list[AllGatherGemm], hardware: Hardware, configs: Sequence[Config | None], notes: list[str]
    ) -> None:
        """Prepares what is tuned for some size; `notes` are what the user should know of that. Collective."""
        wanted: list[tuple[Problem, Config]] = [
            (problem, chosen) for problem, chosen in zip(problems, configs, strict=True) if chosen and chosen.variant != "bsp"
        ]
        self._made = {operator.problem.shard_rows: operator for operator in self._ready(wanted, hardware, notes)}
        made = {rows: operator.config for rows, operator in self._made.items()}
        self.choices = tuple(Choice(problem, made.get(problem.shard_rows)) for problem in problems)
        self._warn(notes)

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """See Module._rehearsals."""
        from autotax.nn.prepare import one_of_each_kind, special

        assert isinstance(problem, AllGatherGemm)
        below = max((rows for rows in self._sizes() if rows < problem.shard_rows), default=0)
        rows = problem.shard_rows
        near = iter([*range(rows, max(below, rows - 32), -1), below + 1])
        x = self.weight.new_empty(rows, self._inner)
        out = self.weight.new_empty(problem.m, self._columns)
        for some in one_of_each_kind(near, lambda count: (special(count), special(count * self.world_size))):
            smaller = self._problem(some)
            yield smaller, (x[:some], self.weight.detach(), out[: smaller.m])

    def _sizes(self) -> list[int]:
        return [choice.problem.shard_rows for choice in self.choices if isinstance(choice.problem, AllGatherGemm)]

    def _problem(self, rows: int) -> AllGatherGemm:
        return AllGatherGemm(rows * self.world_size, self._columns, self._inner, DTYPES[self._dtype], "m", self.world_size)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [m, K], the own rows, the same m on all ranks -> [world size * m, n], in `out` if that is given.

        Enqueues on the current stream; every rank must make the same calls in the same order. Raises UsageError for what
        is not allowed, before anything is enqueued.
        """
        if is_compiling():
            return self._traced(x, out)
        # self.weight, without looking elsewhere first, which takes torch half a microsecond; a parametrization moves it there.
        weight = self._holder.get("weight")
        if weight is None:
            weight = self.weight
        require_no_grad(x, weight)
        return (self._like[0] if self._like else self).run(x, weight, out)

    def _traced(self, x: Tensor, out: Tensor | None) -> Tensor:
        """A call as torch.compile sees it."""
        weight = self.weight
        require_no_grad(x, weight)
        if out is None:
            return torch.ops.autotax.all_gather_linear(x, weight, self.handle)
        torch.ops.autotax.all_gather_linear_out(x, weight, out, self.handle)
        return out

    def run(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """What `forward` does, with the weight given; for the operators of torch.ops."""
        dtype, device = self._dtype, self._device
        # All that can be wrong, in one question whose parts cost least; `_checked` finds out what it is, and knows new shapes.
        known = self._known.get(x.shape)
        if not (
            known
            and weight.shape == self._shape
            and x.dtype is weight.dtype is dtype
            and x.device == weight.device == device
            and x.is_contiguous()
            and weight.is_contiguous()
            and not (x.data_ptr() | weight.data_ptr()) % VECTOR_BYTES
        ):
            known = self._checked(x, weight, out)
        call, shape = known
        if out is None:
            out = x.new_empty(*shape)
        else:
            require_tensor("out", out, shape, dtype, device)
        call(x, weight, out)
        return out

    def _checked(self, x: Tensor, weight: Tensor, out: Tensor | None) -> Known:
        """What runs for these tensors, and from now on for all of their shapes. Raises UsageError.

        Nothing is remembered of a call that is refused: what a call takes with it of those before must be the same on all
        ranks (`decomposed` counts them), and only one of them may have been refused.
        """
        self._require_open()
        rows = first_size(x)
        require_tensor("x", x, (rows, self._inner), self._dtype, self._device)
        require_tensor("weight", weight, self._shape, self._dtype, self._device)
        shape = rows * self.world_size, self._columns
        if out is not None:
            require_tensor("out", out, shape, self._dtype, self._device)
        self._known[x.shape] = known = self._choose(rows), shape
        return known

    def _choose(self, rows: int) -> Call:
        """What runs for `rows` rows a rank. Work of the host alone, done once for each number of rows."""
        if not 1 <= rows <= self._most:
            most = self._most * self.world_size
            raise UsageError(
                f"x has {rows} rows on each of {self.world_size} ranks; it must have 1 to {self._most} "
                f"(M at most {most}): give fewer, or make the layer with a greater max_m"
            )
        call: Call = self._plain
        operator = self._made.get(next(size for size in self._sizes() if rows <= size))
        if operator:
            from autotax.nn.fit import fitted

            call = fitted(operator, self._problem(rows)) or self._plain
        return call

    def close(self) -> None:
        """See Module.close. A layer made `like` another has nothing to give back."""
        if not self._like:
            super().close()

    def _forget(self) -> None:
        self._known.clear()
        self._made.clear()
        del self._plain

    def extra_repr(self) -> str:
        max_m = self._most * self.world_size
        return f"in_features={self._inner}, out_features={self._columns}, max_m={max_m}, ranks={self.world_size}"


def _problems(weight: Tensor, ranks: int, max_m: int, sizes: Sequence[int] | None) -> list[AllGatherGemm]:
    """The problems to prepare for, the smallest first. Raises UsageError."""
    if weight.dim() != 2 or not weight.numel() or weight.dtype not in DTYPES:
        raise UsageError(
            f"weight is {weight.dtype} {list(weight.shape)}; it must be [n, K] of {', '.join(DTYPES.values())}: give such a one"
        )
    require_tensor("weight", weight, tuple(weight.shape), weight.dtype, weight.device)
    if weight.is_cuda and weight.device.index != torch.cuda.current_device():
        raise UsageError(
            f"weight is on {weight.device} and the current device is cuda:{torch.cuda.current_device()}; they must be the same: "
            "call torch.cuda.set_device first"
        )
    if isinstance(max_m, bool) or not isinstance(max_m, int) or max_m < ranks:
        raise UsageError(f"max_m is {max_m!r}; it must be a whole number from {ranks}, the number of ranks: give a greater one")
    n, k = weight.shape
    most = max_m // ranks * ranks
    return [AllGatherGemm(m, n, k, DTYPES[weight.dtype], "m", ranks) for m in sizes_up_to(most, ranks, sizes)]
