"""COUNTING calls of torch's operators: what ran, how often, and why the rest was left to torch."""

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
    """What `install` did in this process, and the calls since, most frequent first."""

    operators: dict[str, str]
    """By operator: `autotax`, or why it is torch's own."""
    calls: tuple[CallStatus, ...] = field(default=())

    @property
    def taken(self) -> int:
        """Calls that tuned kernels ran."""
        return sum(each.calls for each in self.calls if each.taken)

    @property
    def left(self) -> int:
        """Calls that were left to torch."""
        return sum(each.calls for each in self.calls if not each.taken)

    def __str__(self) -> str:
        lines = [f"{name}: {state}" for name, state in self.operators.items()]
        for each in self.calls:
            lines.append(f"  {each.calls} x {each.operator}{each.call}: {each.runs}{f' ({each.reason})' * bool(each.reason)}")
        return "\n".join(lines)


_counts: dict[tuple[str, str, str, str], CallCount] = {}
_operators: dict[str, str] = {}


def count_of(operator: str, call: str, runs: str, reason: str = "") -> CallCount:
    """Where to count calls of one kind."""
    return _counts.setdefault((operator, call, runs, reason), CallCount(operator, call, runs, reason))


def note_operators(states: dict[str, str]) -> None:
    """Says by whom operators are run from now on."""
    _operators.clear()
    _operators.update(states)


def forget_counts() -> None:
    _counts.clear()


def status() -> Status:
    """What is installed in this process, which calls tuned kernels ran, and why others were left to torch."""
    return Status(dict(_operators), tuple(_calls()))


def _calls() -> Iterator[CallStatus]:
    for each in sorted(_counts.values(), key=lambda count: (-count.calls, count.operator, count.call)):
        if each.calls:
            yield CallStatus(each.operator, each.call, each.runs, each.reason, each.calls)
