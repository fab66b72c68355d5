"""The screen for a fleet, on stderr: a live table in a terminal, else a line for each event. With `--json` each event is a line
on stdout instead. The tables at the end are here too.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotax.fleet.driver import FleetOutcome, Screen
from autotax.fleet.messages import ClaimStatus, Event, FleetPace, HostStatus, Snapshot
from autotax.report.formatting import columns, config_text, duration, grid, interval, microseconds, number, place, times

MOST_ROWS = 32
"""Most hosts shown one by one. Further hosts are only counted."""
STATES = {"working": "green", "idle": "cyan", "left": "dim", "lost": "red", "retired": "red", "refused": "red", "failed": "red"}


@contextmanager
def open_screen(as_json: bool, answers: TextIO | None = None) -> Iterator[Screen]:
    """The screen of a fleet. JSON lines go to `answers`, by default stdout."""
    if as_json:
        yield EventLines(lambda line: print(line, flush=True, file=answers))
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield FleetLines(console)
        return
    display = FleetDisplay(console)
    with Live(display, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield display


class Lines:
    """Writes a line for each event, and regularly the state of the fleet."""

    every_s: float

    def __init__(self) -> None:
        self._pace = FleetPace()
        self._reported_s = 0.0

    def show(self, snapshot: Snapshot, happened: Sequence[Event]) -> None:
        self._pace.note(snapshot)
        for event in happened:
            self.say(snapshot, event)
        if snapshot.seconds - self._reported_s >= self.every_s:
            self._reported_s = snapshot.seconds
            self.say(snapshot, None)

    def say(self, snapshot: Snapshot, event: Event | None) -> None:
        """Writes an event; None: the state of the fleet."""
        raise NotImplementedError


class EventLines(Lines):
    """JSON objects."""

    every_s = 10.0

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def say(self, snapshot: Snapshot, event: Event | None) -> None:
        event = event or {"event": "progress", **standing(snapshot, self._pace)}
        self._write(json.dumps({"seconds": round(snapshot.seconds, 1), **event}))


class FleetLines(Lines):
    """Lines for logs."""

    every_s = 60.0

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def say(self, snapshot: Snapshot, event: Event | None) -> None:
        line = line_of(event) if event else summary(snapshot, self._pace)
        self._console.print(Text(f"autotax: {line}"), soft_wrap=True)


class FleetDisplay:
    """A table that redraws itself. Events that need attention are printed above it, where they stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = FleetPace()
        self._snapshot = Snapshot()

    def show(self, snapshot: Snapshot, happened: Sequence[Event]) -> None:
        self._pace.note(snapshot)
        self._snapshot = snapshot
        for event in happened:
            if any(word in event["event"] for word in ("lost", "failed", "refused", "retired", "waiting", "nothing")):
                self._console.print(Text(line_of(event), "yellow"), soft_wrap=True)

    def __rich__(self) -> Group:
        now = self._snapshot
        bar = Table.grid(padding=(0, 2))
        resolved = len(now.claims) - len(now.left)
        bar.add_row(ProgressBar(total=max(1, len(now.claims)), completed=resolved, width=30), summary(now, self._pace))
        return Group(Text("fleet", "bold"), bar, self._hosts(now))

    @staticmethod
    def _hosts(now: Snapshot) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        columns(table, "host", "kind", "state", "problem", "trials>")
        problems = {claim.id: claim.problem for claim in now.claims}
        shown = sorted((host for host in now.hosts if host.present), key=lambda host: (host.kind, host.slot))
        for host in shown[:MOST_ROWS]:
            trials = f"{host.done}/{host.total}" if host.claim else ""
            state = Text(host.state, STATES.get(host.state, ""))
            table.add_row(host.name, host.hardware, state, problems.get(host.claim or 0, ""), trials)
        if (rest := len(shown) - MOST_ROWS) > 0:
            table.add_row(f"and {rest} more", "", "", "", "")
        return table


def standing(snapshot: Snapshot, pace: FleetPace) -> Event:
    """The state of a fleet, as plain values."""
    present = [host for host in snapshot.hosts if host.present]
    rate, left = pace.per_minute, snapshot.seconds_left
    return {
        "hosts": len(present),
        "working": sum(host.state == "working" for host in present),
        "waiting_for_hosts": snapshot.waiting,
        "kinds": dict(Counter(host.kind for host in present)),
        "tuned": snapshot.count("tuned"),
        "failed": snapshot.count("failed"),
        "left": len(snapshot.left),
        "trials": sum(host.trials for host in snapshot.hosts),
        "trials_per_minute": round(rate, 1) if rate is not None else None,
        "seconds_left": round(left) if left is not None else None,
    }


def summary(snapshot: Snapshot, pace: FleetPace) -> str:
    state = standing(snapshot, pace)
    awaited = f", {snapshot.waiting} awaited" if snapshot.waiting else ""
    hosts = f"{number(state['hosts'], 'host')} of {number(len(state['kinds']), 'kind')}{awaited}"
    rate = f"{state['trials_per_minute']:.0f} trials a minute" if state["trials_per_minute"] is not None else ""
    left = f"{duration(state['seconds_left'])} left" if state["seconds_left"] is not None else ""
    failed = f"{state['failed']} failed" if state["failed"] else ""
    parts = (hosts, f"{state['tuned']} tuned", failed, f"{state['left']} left to tune", rate, left)
    return "; ".join(part for part in parts if part)


def line_of(event: Event) -> str:
    """`problem tuned: all-gather-gemm/m=... on host-3 (push 1.310)`"""
    subject = event.get("problem") or event.get("kind") or ""
    where = f" on {event['host']}" if event.get("host") else ""
    detail = event.get("message") or event.get("note") or ""
    if "due" in event:
        detail = f"{event['due']} due, {event['tuned_already']} tuned already; {event['hardware']}"
    return f"{event['event']}: {subject}{where}" + (f" ({' '.join(str(detail).split())[:300]})" if detail else "")


# The end


def tables(outcome: FleetOutcome) -> Group:
    """Tables of the winners over BSP, one for each kind; below them the failed problems and the slow hosts."""
    parts = []
    for kind in dict.fromkeys(won.winner.hardware.digest for won in outcome.winners):
        own = [won for won in outcome.winners if won.winner.hardware.digest == kind]
        table = grid(f"winners on {own[0].winner.hardware}", *_caption(outcome, kind), place(own[0].winner.hardware))
        columns(table, "problem", "config", "median us>", "BSP us>", "over BSP [95 %]>", "proved on")
        for won in own:
            winner = won.winner
            ends = interval((winner.interval_low, winner.interval_high))
            over = f"{times(winner.speedup)} {'tie' if winner.tie else ends}"
            us, bsp = microseconds(winner.latency_us), microseconds(winner.baseline_us)
            table.add_row(winner.problem.key, config_text(winner.config), us, bsp, over, won.host or "-")
        parts.append(table)
    return Group(*parts, *(Text(line) for line in remarks(outcome)))


def _caption(outcome: FleetOutcome, kind: str) -> list[str]:
    hosts = {host.name for host in outcome.snapshot.hosts if host.kind == kind}
    trials = sum(host.trials for host in outcome.snapshot.hosts if host.kind == kind)
    return [f"{number(trials, 'trial')} on {number(len(hosts), 'host')} in {duration(outcome.snapshot.seconds)}"]


def remarks(outcome: FleetOutcome) -> list[str]:
    """Remarks on the outcome, one line each."""
    now = outcome.snapshot
    failed = [f"failed: {claim.problem} on {claim.failed_on or claim.host}: {claim.message}" for claim in _failed(now)]
    bad = [host for host in now.hosts if host.state in ("lost", "retired", "refused", "failed")]
    hosts = [f"host {host.name} {host.state}: {' '.join(host.note.split())[:300]}" for host in bad]
    slow = [f"slow host: {gap}" for gap in outcome.gaps]
    left = [f"{len(now.left)} problems are left: run the same command again to go on"] if now.left else []
    return [*failed, *hosts, *slow, *left, *([outcome.trouble] if outcome.trouble else [])]


def document(outcome: FleetOutcome) -> Event:
    """The last event, with the outcome of the fleet."""
    now = outcome.snapshot
    return {
        "seconds": round(now.seconds, 1),
        "event": "interrupted" if outcome.interrupted else "done" if outcome.done else "ended",
        "tuned": now.count("tuned"),
        "failed": [{"problem": claim.problem, "kind": claim.kind, "message": claim.message} for claim in _failed(now)],
        "left": len(now.left),
        "hosts": [_host(host) for host in now.hosts],
        "winners": [
            {
                "problem": won.winner.problem.to_dict(),
                "kind": won.winner.hardware.digest,
                "conditions": won.winner.conditions.to_dict(),
                "variant": won.winner.config.variant,
                "config": dict(won.winner.config.params),
                "latency_us": won.winner.latency_us,
                "baseline_us": won.winner.baseline_us,
                "speedup": won.winner.speedup,
                "interval": [won.winner.interval_low, won.winner.interval_high],
                "tie": won.winner.tie,
                "host": won.host,
            }
            for won in outcome.winners
        ],
        "slow_hosts": [
            {"kind": gap.kind, "slow": gap.slow, "fast": gap.fast, "problem": gap.problem, "ratio": round(gap.ratio, 3)}
            for gap in outcome.gaps
        ],
        "trouble": outcome.trouble or None,
    }


def _failed(snapshot: Snapshot) -> list[ClaimStatus]:
    return [claim for claim in snapshot.claims if claim.outcome == "failed"]


def _host(host: HostStatus) -> Event:
    busy = min(1.0, host.busy_s / host.age_s) if host.age_s else 0.0
    state = {"host": host.name, "kind": host.kind, "state": host.state, "trials": host.trials}
    return state | {"busy_s": round(host.busy_s, 1), "busy_share": round(busy, 3), "note": host.note}


def show(outcome: FleetOutcome, as_json: bool, answers: TextIO | None = None) -> None:
    """Prints the outcome: tables on stdout, or one line of JSON to `answers`, by default stdout."""
    if as_json:
        print(json.dumps(document(outcome), allow_nan=False), flush=True, file=answers)
    else:
        Console(width=None if sys.stdout.isatty() else 150).print(tables(outcome))
