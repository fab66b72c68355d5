"""What a run looks like while it goes on, on stderr: a small display in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotax import terminal
from autotax.hardware import Hardware
from autotax.problem import Problem
from autotax.report.wording import counts, duration, microseconds, parameters, place, style_of, times, title
from autotax.runner.measurement import Measurement
from autotax.tuner.progress import Listener, Progress

EVERY = 10
"""Trials between two lines where there is no terminal."""


@contextmanager
def watch(problem: Problem, hardware: Hardware, console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows a run on `console` (default: stderr) as long as the context lasts."""
    console = console or terminal.console(stderr=True)
    if not console.is_terminal:
        yield Lines(console, problem, hardware)
        return
    display = Display(problem, hardware, console)
    with Live(display, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield display


@dataclass
class Pace:
    """Trials per minute of this run: those of earlier runs, which count as done, took it no time."""

    first: Progress | None = None
    last: Progress | None = None

    def note(self, progress: Progress) -> None:
        self.first = self.first or progress
        self.last = progress

    @property
    def per_minute(self) -> float | None:
        if self.first is None or self.last is None or self.last.seconds <= 0.0:
            return None
        return (self.last.done - self.first.done + 1) / self.last.seconds * 60.0

    @property
    def seconds_left(self) -> float | None:
        """Until the trials or the time are used up, whichever comes first."""
        if self.last is None:
            return None
        ends = [self.last.seconds_left] if self.last.seconds_left is not None else []
        if rate := self.per_minute:
            ends.append(max(0, self.last.wanted - self.last.done) / rate * 60.0)
        return min(ends, default=None)


@dataclass
class Display:
    """Redraws itself a few times a second, so that a trial that takes long is seen to take long."""

    problem: Problem
    hardware: Hardware
    console: Console = field(default_factory=partial(terminal.console, stderr=True))
    pace: Pace = field(default_factory=Pace)
    heard: float = field(default_factory=time.monotonic)

    def progress(self, progress: Progress) -> None:
        self.pace.note(progress)
        self.heard = time.monotonic()

    def notice(self, text: str) -> None:
        """Above the display, where it stays."""
        _note(self.console, text)

    def __rich__(self) -> Group:
        heading = Text(title(self.problem), "bold")
        where = Text(place(self.hardware), "dim")
        if self.pace.last is None:
            return Group(heading, where, Text(f"the ranks start and try their first config, {self._silence()}"))
        return Group(heading, where, self._bar(self.pace.last), self._facts(self.pace.last))

    def _bar(self, progress: Progress) -> Table:
        row = Table.grid(padding=(0, 2))
        rate, left = self.pace.per_minute, self._left()
        row.add_row(
            ProgressBar(total=progress.wanted, completed=min(progress.done, progress.wanted), width=30),
            f"{progress.done}/{progress.wanted} trials",
            f"{rate:.1f} a minute" if rate else "",
            f"{duration(left)} left" if left is not None and progress.phase == "searching" else "",
            Text("finalists meet" if progress.phase == "finalists" else progress.phase, "cyan"),
        )
        return row

    def _facts(self, progress: Progress) -> Table:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim")
        facts.add_column(no_wrap=True, overflow="ellipsis")
        facts.add_row("best", _best(progress))
        facts.add_row("so far", _statuses(progress))
        if progress.last is not None:
            facts.add_row("last", _trial(progress.last).append(f"  {self._silence()} ago", "dim"))
        return facts

    def _left(self) -> float | None:
        left = self.pace.seconds_left
        return None if left is None else max(0.0, left - (time.monotonic() - self.heard))

    def _silence(self) -> str:
        return duration(time.monotonic() - self.heard)


@dataclass
class Lines:
    """One line at the first trial, at every tenth, at each new phase: for logs."""

    console: Console
    problem: Problem
    hardware: Hardware
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self._say(f"{title(self.problem)}: {place(self.hardware)}")

    def progress(self, progress: Progress) -> None:
        before = self.pace.last
        self.pace.note(progress)
        if before is None or before.phase != progress.phase or progress.done % EVERY == 0:
            self._say(self._line(progress))

    def notice(self, text: str) -> None:
        _note(self.console, text)

    def _line(self, progress: Progress) -> str:
        rate, left = self.pace.per_minute, self.pace.seconds_left
        parts = [
            f"{progress.phase}: {progress.done}/{progress.wanted} trials ({counts(progress.statuses)})",
            f"best {_best(progress).plain}",
            f"{rate:.1f} a minute" if rate else "",
            f"{duration(left)} left" if left is not None and progress.phase == "searching" else "",
        ]
        return "; ".join(part for part in parts if part)

    def _say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


def _note(console: Console, text: str) -> None:
    console.print(Text(f"notice: {' '.join(text.split())}", "yellow"), soft_wrap=True)


def _best(progress: Progress) -> Text:
    best, baseline = progress.best, progress.baseline_us
    if best is None or best.latency_us is None:
        return Text("nothing verified yet")
    text = Text.assemble((best.config.variant, "bold green"), f" {microseconds(best.latency_us)} us")
    if baseline is not None:
        text.append(f", {times(baseline / best.latency_us)} of BSP ({microseconds(baseline)} us)")
    return text.append(f" {parameters(best.config)}", "dim") if best.config.params else text


def _statuses(progress: Progress) -> Text:
    return Text(", ").join(Text(f"{count} {name}", style_of(name)) for name, count in progress.statuses.items())


def _trial(measurement: Measurement) -> Text:
    text = Text.assemble(measurement.config.variant, " ", (measurement.status, style_of(measurement.status)))
    if measurement.latency_us is not None:
        text.append(f" {microseconds(measurement.latency_us)} us")
    if measurement.error:
        text.append(f" {' '.join(measurement.error.split())[:80]}", "dim")
    return text
