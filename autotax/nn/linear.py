"""The column-parallel linear layer with sequence parallelism: gathers the rows of its input while it multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.errors import UsageError
from autotax.hardware import Hardware, detect
from autotax.nn import ops  # noqa: F401 - registers torch.ops.autotax.*
from autotax.nn.agree import DTYPES, configs_for
from autotax.nn.module import SizeChoice, require_tensor, sizes_up_to
from autotax.nn.plain import PlainLinear
from autotax.nn.weighted import Call, WeightedModule
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.problem import Problem


class AllGatherLinear(WeightedModule):
    """y = gather(x) @ weight.T + bias: x [m, ..., K] on each rank, the same m on all, to [world size * m, ..., n].

    `layer(x)`, or `layer(x, out)` to have the result in `out`. A call enqueues on the current stream of the weight's device;
    every rank must make the same calls in the same order, from one thread. It raises UsageError for what is not allowed, before
    anything is enqueued. Construction is collective over `group` (None: all ranks, or this process alone).

    - `weight` [n, K], bf16, fp16 or fp32: the own columns of the whole weight, laid out as torch.nn.Linear lays them out;
      used as it is, without a copy, and kept as the Parameter that it is, or else as a buffer. The same n on all ranks.
    - `bias` [n]: added to the result; kept as the weight is. By default there is none.
    - `max_m`: the most rows that a call gathers. Workspaces are allocated for it once.
    - `sizes`: gathered sizes M to prepare for, each a multiple of the world size; default: powers of two times the world
      size. A call uses what is tuned for the next greater of them.
    - `db`: the database, a path or a URL; default: yours.
    - `conditions`: as what calls are deployed (autotax.conditions.Conditions), the same on all ranks; what was tuned for these
      is looked up. Default: the usual ones, of `autotax tune` without --mode, --l2 and --skew.
    - `config`: this config for every size that it can take, without any look-up.
    - `like`: another layer whose group, sizes, configs and workspaces this one shares; only `weight` and `bias` are taken
      then, and nothing is collective. For layers of equal shapes whose calls follow each other on one stream.
    - `prove`: have winners proven again that are stale only in software, by ranks of their own on the same GPUs, before this
      module looks them up; True or the most seconds that this may take (True: 60). What is proven is stored.
    - `check`: compare each call with those of the other ranks, which then wait for one another; default: AUTOTAX_CHECK=1 in
      the environment.

    A weight on the meta device is prepared for by the first call, when it has values; so is a copy of a layer.
    Raises UsageError on all ranks alike. Where no tuned config holds, or the ranks have different ones, or kernels cannot
    be prepared, the layer is bulk-synchronous; where that comes as a surprise, RuntimeWarning says so on every rank.
    """

    _made: dict[int, Any]
    _most: int
    _plain: Any
    OPERATORS = (torch.ops.autotax.all_gather_linear, torch.ops.autotax.all_gather_linear_out)

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        max_m: int = 8192,
        *,
        bias: Tensor | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        sizes: Sequence[int] | None = None,
        like: AllGatherLinear | None = None,
        check: bool | None = None,
        prove: bool | float = False,
    ) -> None:
        super().__init__(group, db, check, prove)
        self._hold("weight", weight)
        self._hold("bias", bias)
        self._asked = (max_m, conditions, config, sizes)
        if like:
            self._share(like)
        elif not weight.is_meta:
            self.prepare()

    def _blank(self) -> dict[str, Any]:
        """See Module._blank."""
        return super()._blank() | {"_made": {}, "_most": 0, "_plain": None}

    def _make(self) -> None:
        """See Module._make."""
        max_m, conditions, config, sizes = self._asked
        world, ranks, weight = self._world, self._world.size if self._world else 1, self.weight.detach()
        problems, deployed = self._agreed(
            lambda: _problems(weight, ranks, max_m, [max_m // ranks * ranks] if config else sizes), conditions
        )
        self._shape, self._dtype = tuple(weight.shape), weight.dtype
        self._most = problems[-1].shard_rows
        self._plain = PlainLinear(world, self._most, weight)
        if world is not None:
            hardware = detect(world.backend)
            self._tune(problems, hardware, *configs_for(world, problems, hardware, deployed, self._db, config, self._prove))

    def _tune(
        self, problems: list[AllGatherGemm], hardware: Hardware, configs: Sequence[Config | None], notes: list[str]
    ) -> None:
        """Prepares what is tuned for some size; `notes` are what the user should know of that. Collective."""
        wanted: list[tuple[Problem, Config]] = [
            (problem, chosen) for problem, chosen in zip(problems, configs, strict=True) if chosen and chosen.variant != "bsp"
        ]
        self._made = {operator.problem.shard_rows: operator for operator in self._operators(wanted, hardware, notes)}
        made = {rows: operator.config for rows, operator in self._made.items()}
        self._choices = tuple(SizeChoice(problem, made.get(problem.shard_rows)) for problem in problems)
        self._warn(notes)

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """See Module._rehearsals."""
        from autotax.nn.prepare import one_of_each_kind, special

        assert isinstance(problem, AllGatherGemm)
        below = max((rows for rows in self._sizes() if rows < problem.shard_rows), default=0)
        rows = problem.shard_rows
        near = iter([*range(rows, max(below, rows - 32), -1), below + 1])
        x = self.weight.new_empty(rows, self._shape[1])
        out = self.weight.new_empty(problem.m, self._shape[0])
        for some in one_of_each_kind(near, lambda count: (special(count), special(count * self.world_size))):
            smaller = self._problem(some)
            yield smaller, (x[:some], self.weight.detach(), out[: smaller.m])

    def _sizes(self) -> list[int]:
        return [choice.problem.shard_rows for choice in self.choices if isinstance(choice.problem, AllGatherGemm)]

    def _problem(self, rows: int) -> AllGatherGemm:
        return AllGatherGemm(rows * self.world_size, self._shape[0], self._shape[1], DTYPES[self._dtype], "m", self.world_size)

    def _result(self, x: torch.Size) -> tuple[int, ...]:
        """See WeightedModule._result."""
        return x[0] * self.world_size, *x[1:-1], self._shape[0]

    def _choose(self, rows: int) -> Call:
        """See WeightedModule._choose."""
        if rows > self._most:
            most = self._most * self.world_size
            raise UsageError(
                f"x has {rows} rows on each of {self.world_size} ranks; it must have at most {self._most} "
                f"(M at most {most}): give fewer, or make the layer with a greater max_m"
            )
        call: Call = self._plain
        operator = self._made.get(next(size for size in self._sizes() if rows <= size))
        if operator:
            call = operator.fitted(self._problem(rows)) or self._plain
        return call

    def _forget(self) -> None:
        """See Module._forget."""
        super()._forget()
        self._made.clear()
        self._plain = None

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        max_m, *_ = (self._like[0] if self._like else self)._asked
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}, max_m={max_m}, ranks={self.world_size}"


def _problems(weight: Tensor, ranks: int, max_m: int, sizes: Sequence[int] | None) -> list[AllGatherGemm]:
    """The problems to prepare for, the smallest first. Raises UsageError."""
    if weight.dim() != 2 or not weight.numel() or weight.dtype not in DTYPES:
        raise UsageError(
            f"weight is {weight.dtype} {list(weight.shape)}; it must be [n, K] of {', '.join(DTYPES.values())}: give such a one"
        )
    require_tensor("weight", weight, tuple(weight.shape), weight.dtype, weight.device)
    if isinstance(max_m, bool) or not isinstance(max_m, int) or max_m < ranks:
        raise UsageError(f"max_m is {max_m!r}; it must be a whole number from {ranks}, the number of ranks: give a greater one")
    n, k = weight.shape
    most = max_m // ranks * ranks
    return [AllGatherGemm(m, n, k, DTYPES[weight.dtype], "m", ranks) for m in sizes_up_to(most, ranks, sizes)]
