"""Counts of calls of torch's operators: the implementation that ran, and the reason for torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

TORCH = "torch"


@dataclass
class CallCount:
    """Calls of one kind so far. `runs` is a config, or `torch` with the reason."""

    operator: str
    call: str
    runs: str
    reason: str = ""
    calls: int = 0


@dataclass(frozen=True)
class CallStatus:
    """Calls of one kind: `runs` names the config that ran, or is `torch`, and `reason` says why."""

    operator: str
    call: str
    runs: str
    reason: str
    calls: int

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
        """Calls that tuned kernels ran."""
        return sum(call.calls for call in self.calls if call.taken)

    @property
    def left(self) -> int:
        """Calls that were left to torch."""
        return sum(call.calls for call in self.calls if not call.taken)

    def __str__(self) -> str:
        lines = [f"{name}: {state}" for name, state in self.operators.items()]
        for call in self.calls:
            lines.append(f"  {call.calls} x {call.operator}{call.call}: {call.runs}{f' ({call.reason})' * bool(call.reason)}")
        return "\n".join(lines)


_counts: dict[tuple[str, str, str, str], CallCount] = {}
_operators: dict[str, str] = {}


def count_of(operator: str, call: str, runs: str, reason: str = "") -> CallCount:
    """The counter of one kind of call."""
    return _counts.setdefault((operator, call, runs, reason), CallCount(operator, call, runs, reason))


def note_operators(states: dict[str, str]) -> None:
    """Records which implementation runs each operator from now on."""
    _operators.clear()
    _operators.update(states)


def forget_counts() -> None:
    _counts.clear()


def status() -> Status:
    """The installed operators of this process, the calls that tuned kernels ran, and the reasons for the other calls."""
    return Status(dict(_operators), tuple(_calls()))


def _calls() -> Iterator[CallStatus]:
    for counted in sorted(_counts.values(), key=lambda count: (-count.calls, count.operator, count.call)):
        if counted.calls:
            yield CallStatus(counted.operator, counted.call, counted.runs, counted.reason, counted.calls)
