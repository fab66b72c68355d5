"""The implementation of each kind of call of torch's operators, and counts of calls.

One kernel serves all sizes of a bucket. It is prepared for the greatest size and fitted to the others.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db.index import bucket, representative
from autotax.db.lookup import lookup, peek
from autotax.hardware import Hardware, detect
from autotax.heap.world import World, by_rank
from autotax.nn.consensus import configs_for, invariant_config
from autotax.nn.groups import GroupCalls, capturing, on_device
from autotax.nn.tuned import Tuned
from autotax.operators.verification import make_inputs

TORCH = "torch"


class NotTaken(Exception):
    """Raised for a call that stays torch's. The message is the reason, in a few words."""


class Kernels(Protocol):
    """The kernels of a bucket, of which a plan takes one."""

    @classmethod
    def of(cls, problem: Any, group: dist.ProcessGroup, **settings: Any) -> Self:
        """Makes the kernels for problems up to this one. Collective. Raises UsageError, on all ranks alike."""

    def kernel_for(self, problem: Any) -> Any:
        """The kernel for a problem, or None if none can be fitted to it. Runs on the host only."""

    def failure(self) -> str | None:
        """See autotax.nn.Module.failure."""


class BucketKernels(Tuned):
    """One config for all row counts of a bucket, up to the `m` of one problem. Construction is collective.

    Raises UsageError, on all ranks alike, if the config cannot be prepared.
    """

    @classmethod
    def of(cls, problem: Problem, group: dist.ProcessGroup, **settings: Any) -> Self:
        return cls(problem, group, **settings)

    def _baselines(self, pairs: list[tuple[Any, Config | None]], hardware: Hardware) -> list[tuple[Any, Config]]:  # noqa: ARG002
        """None: the caller runs the calls that this kernel cannot serve."""
        return []

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """See Module._rehearsals. Yields one size of each kind for which Triton compiles a separate kernel."""
        from autotax.nn.prepare import one_of_each_kind, special

        world = problem.world_size
        for rows in one_of_each_kind(self._rows_served(problem), lambda rows: (special(-(-rows // world)), special(rows))):
            smaller = with_rows(problem, rows)
            call = make_inputs(smaller, 0, 0, torch.device("meta"))
            yield smaller, tuple(torch.empty_like(tensor, device=self._device) for tensor in (*call.tensors, call.out))

    def _rows_served(self, problem: Problem) -> Iterator[int]:
        """Numbers of rows for which a call may need a kernel, the greatest first."""
        world, most = problem.world_size, _rows(problem)
        return iter([most, *range(most // world * world, bucket(most)[0] - 1, -world)])

    def kernel_for(self, problem: Problem) -> Any:
        ((_, (kernel,)),) = self._kernels.items()
        return self._fitted(kernel, problem)


class InvariantKernels(BucketKernels):
    """One config for all numbers of rows up to INVARIANT_ROWS; a row of the result has the same bits in all of them."""

    def _rows_served(self, problem: Problem) -> Iterator[int]:
        return iter(range(_rows(problem), 0, -1))


def _rows(problem: Problem) -> int:
    rows: int = problem.to_dict()["m"]
    return rows


def _keeps_bits(call: Any) -> bool:
    return getattr(call, "batch_invariant", False)


def with_rows(problem: Problem, rows: int) -> Problem:
    return replace(problem, m=rows)  # type: ignore[call-arg]


class Call:
    """One kind of call. `of` makes it from the arguments, or raises NotTaken; `run` runs a kernel and returns the results."""

    KERNELS: ClassVar[type[Kernels]] = BucketKernels
    problem: Any

    def sizes(self) -> Iterable[Problem]:
        """The problems whose kernels may serve the call, the most general first: the greatest of its bucket, and its own."""
        fields = self.problem.to_dict()
        last = representative(self.problem).to_dict()["m"]
        divided = "shard" in fields or fields.get("output") == "scattered"
        shared = self.problem.world_size if divided else 1
        return dict.fromkeys((with_rows(self.problem, last // shared * shared), self.problem))

    def require(self, kernel: Any) -> None:
        """Raises NotTaken if `kernel` cannot serve this call."""


# Plans: the implementation of each kind of call. All ranks of a group make the same decision, once.

CAPTURED = "its first call came while a graph was being captured, when ranks cannot prepare: call it once before"
ALONE = "the group has one rank"
GRADIENT = "a tensor requires a gradient, which these operators do not record"
INVARIANT_ROWS = 8192
"""The greatest number of rows for which a batch-invariant kernel is prepared. More rows take several calls of it."""
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Deployment:
    """The database and the conditions of look-ups, and whether stale winners are proven first (see AllGatherLinear)."""

    db: str | Path | None = None
    conditions: Conditions | None = None
    prove: bool | float = False


@dataclass(slots=True)
class Plan:
    """The implementation of one kind of call: a kernel, or torch where `kernel` is None."""

    count: CallStatus
    operator: Any = None
    kernel: Any = None
    missed: Callable[[], object] | None = None
    """Records a miss when a call finds no winner."""
    calls: GroupCalls = field(default_factory=GroupCalls)

    def run(self, device: torch.device, *operands: Any) -> Any:
        with on_device(device.index), self.calls:
            return self.operator.run(self.kernel, *operands)

    def counted(self) -> bool:
        """Counts a call; returns whether a kernel runs it."""
        self.count.calls += 1
        if self.missed is not None:
            self.missed()
        return self.kernel is not None


class GroupPlans:
    """The plans of one group on one device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, settings: Deployment) -> None:
        self.group, self.device, self.settings = group, device, settings
        self.ranks, self.calls = group.size(), GroupCalls.of(group)
        self.invariant_rows = INVARIANT_ROWS
        self.by_key: dict[Key, Plan] = {}
        self._prepared: dict[tuple[Problem, bool], Kernels | str] = {}
        """By the greatest problem that they serve, and whether they are batch-invariant; or why there are none."""
        self._parted = ""
        """Set when the ranks have made different calls: the reason why all later calls stay torch's."""
        self._warned: set[str] = set()

    def plan(self, key: Key, read: Callable[[int], Any]) -> Plan:
        """The plan for a kind of call. Collective for a new kind, except during graph capture."""
        operator, shapes = key[0], _shown(key[1:])
        if capturing(self.device):
            if plan := self._plan_of_invariant(operator, shapes, read):
                return plan
            self._warn(f"{operator}{shapes} is left to torch: {CAPTURED}")
            return self.left(operator, shapes, CAPTURED)  # not stored: the next call tries again
        plan = self.by_key[key] = self._decide(operator, shapes, read)
        return plan

    def _plan_of_invariant(self, operator: str, shapes: str, read: Callable[[int], Any]) -> Plan | None:
        """The plan of a batch-invariant call whose kernel is prepared already; the ranks need not agree on it again."""
        try:
            call = read(self.ranks)
        except NotTaken:
            return None
        if not _keeps_bits(call):
            return None
        prepared = self._prepared.get((with_rows(call.problem, self.invariant_rows), True))
        if not isinstance(prepared, InvariantKernels):
            return None
        kernel = prepared.kernel_for(call.problem)
        return kernel and Plan(count_of(operator, shapes, str(kernel.config)), call, kernel, calls=self.calls)

    def left(self, operator: str, shapes: str, reason: str, missed: Callable[[], object] | None = None) -> Plan:
        return Plan(count_of(operator, shapes, TORCH, reason), missed=missed)

    def _decide(self, operator: str, shapes: str, read: Callable[[int], Any]) -> Plan:
        if self.ranks == 1:
            return self.left(operator, shapes, ALONE)
        if self._parted:
            return self.left(operator, shapes, self._parted)
        world = World.of(self.group, self.device)
        with self.calls:  # ranks also decide in the order of their calls
            calls = world.gather(f"{operator}{shapes}", str)
        if len(set(calls)) > 1:
            calls_by_rank = by_rank(calls)
            self._parted = f"the ranks did not make the same calls ({calls_by_rank}), so no call of their group is taken any more"
            self._warn(self._parted)
            return self.left(operator, shapes, self._parted)
        try:
            call = read(self.ranks)
        except NotTaken as reason:
            return self.left(operator, shapes, str(reason))
        try:
            kernel = self._kernel(world, call)
            call.require(kernel)
        except NotTaken as reason:
            return self.left(operator, shapes, str(reason), self._miss(call.problem))
        return Plan(count_of(operator, shapes, str(kernel.config)), call, kernel, calls=self.calls)

    def _kernel(self, world: World, call: Any) -> Any:
        """The prepared kernel for a call. Collective. Raises NotTaken, on all ranks alike."""
        problem = call.problem
        for largest in [with_rows(problem, self.invariant_rows)] if _keeps_bits(call) else call.sizes():
            key = largest, _keeps_bits(call)
            if key not in self._prepared:
                self._prepared[key] = self._prepare(world, *key, call.KERNELS)
            prepared = self._prepared[key]
            if isinstance(prepared, str):
                raise NotTaken(prepared)
            if kernel := prepared.kernel_for(problem):
                return kernel
        if _keeps_bits(call):  # torch's operator would give this number of rows other bits
            raise UsageError(f"batch_invariant is set, and no kernel takes {problem.key}: give another database")
        raise NotTaken("the winner cannot be fitted to this number of rows")

    def _prepare(self, world: World, problem: Problem, batch_invariant: bool, kernels: type[Kernels]) -> Kernels | str:
        """The kernels for a bucket, or for all numbers of rows, or why there are none. Collective."""
        db, conditions = self.settings.db, self.settings.conditions
        hardware = detect(world.backend)
        deployed = conditions or Conditions.usual(hardware.on_gpu)
        try:
            if batch_invariant:
                return self._made(InvariantKernels, problem, invariant_config(world, problem, hardware, deployed, db, None))
            (config,), notes = configs_for(world, [problem], hardware, deployed, db, None, self.settings.prove, counted=False)
            for note in notes:
                self._warn(f"torch's own is taken there: {note}")
            if config is None:
                return notes[0] if notes else peek(problem, hardware=hardware, db=db, conditions=deployed).reason
            return self._made(kernels, problem, config)
        except Exception as error:  # torch's operator is right, whatever has failed
            reason = " ".join((str(error) or type(error).__name__).split())
            self._warn(f"torch's own is taken for {problem.key}: {reason}")
            return reason

    def _made(self, kind: type[Kernels], problem: Problem, config: Config) -> Kernels:
        db, conditions = self.settings.db, self.settings.conditions
        return kind.of(problem, self.group, device=self.device, db=db, conditions=conditions, config=config)

    def _miss(self, problem: Problem) -> Callable[[], object]:
        """Returns a function that counts a miss for this problem: see autotax.save_misses."""
        hardware = detect(World.of(self.group, self.device).backend)
        deployed = self.settings.conditions or Conditions.usual(hardware.on_gpu)
        return partial(lookup, problem, hardware=hardware, db=self.settings.db, conditions=deployed)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"autotax: {message}", RuntimeWarning, stacklevel=2)

    def failure(self) -> str | None:
        """Why results cannot be trusted, or None: see autotax.nn.Module.failure. Waits for the device."""
        kernels = [kernel for kernel in self._prepared.values() if not isinstance(kernel, str)]
        return next((note for kernel in kernels if (note := kernel.failure())), None)


_lock = threading.Lock()
_groups: dict[tuple[dist.ProcessGroup, torch.device], GroupPlans] = {}
os.register_at_fork(after_in_child=_groups.clear)  # a forked child shares the memory of these kernels with its parent
_settings = Deployment()


def plans_of(group_name: str, device: torch.device) -> GroupPlans:
    """The plans of the group that has this name now."""
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    plans = _groups.get((group, device))
    if plans is None:
        with _lock:
            plans = _groups.setdefault((group, device), GroupPlans(group, device, _settings))
    return plans


def plan_of(key: Key, group_name: str, device: torch.device, read: Callable[[int], Any]) -> Plan:
    """The plan of a kind of call. `key` begins with the operator; `read` makes the call for a number of ranks."""
    plans = plans_of(group_name, device)
    plan = plans.by_key.get(key)
    return plans.plan(key, read) if plan is None else plan


def use(settings: Deployment) -> None:
    """Sets how winners are looked up from now on, and drops all plans. Every rank must call it between the same calls."""
    global _settings
    with _lock:
        _settings = settings
        _groups.clear()


def failures() -> list[str]:
    """Why results of this process cannot be trusted, one line a group; empty as long as they can. Waits for the devices."""
    return [note for plans in list(_groups.values()) if (note := plans.failure())]


def _shown(key: Key) -> str:
    """`([64, 32], bfloat16, ...)`, the same on all ranks for the same call."""
    return "(" + ", ".join(map(_part, key)) + ")"


def _part(value: object) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return " ".join(map(_part, value))
    return str(value)


# Counts of calls: the implementation that ran, and the reason for torch's own.

@dataclass
class CallStatus:
    """Calls of one kind so far: `runs` names the config that ran, or is `torch`, and `reason` says why."""

    operator: str
    call: str
    runs: str
    reason: str = ""
    calls: int = 0

    @property
    def taken(self) -> bool:
        return self.runs != TORCH


@dataclass(frozen=True)
class Status:
    """The operators that `install` replaced in this process, and the calls since, most frequent first."""

    operators: dict[str, str]
    """By operator: `autotax`, or why it is torch's own."""
    calls: tuple[CallStatus, ...] = field(default=())

    @property
    def taken(self) -> int:
        return sum(call.calls for call in self.calls if call.taken)

    @property
    def left(self) -> int:
        return sum(call.calls for call in self.calls if not call.taken)

    def __str__(self) -> str:
        lines = [f"{name}: {state}" for name, state in self.operators.items()]
        for call in self.calls:
            lines.append(f"  {call.calls} x {call.operator}{call.call}: {call.runs}{f' ({call.reason})' * bool(call.reason)}")
        return "\n".join(lines)


_counts: dict[tuple[str, str, str, str], CallStatus] = {}
_operators: dict[str, str] = {}


def count_of(operator: str, call: str, runs: str, reason: str = "") -> CallStatus:
    return _counts.setdefault((operator, call, runs, reason), CallStatus(operator, call, runs, reason))


def note_operators(states: dict[str, str]) -> None:
    """Records which implementation runs each operator from now on."""
    _operators.clear()
    _operators.update(states)


def forget_counts() -> None:
    _counts.clear()


def status() -> Status:
    """The installed operators of this process, the calls that tuned kernels ran, and the reasons for the other calls."""
    ordered = sorted(_counts.values(), key=lambda count: (-count.calls, count.operator, count.call))
    return Status(dict(_operators), tuple(replace(count) for count in ordered if count.calls))
