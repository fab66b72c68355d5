"""A run in progress, on stderr: a small display in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
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

from autotax.core import terminal
from autotax.core.errors import summary
from autotax.core.problem import Problem
from autotax.core.settings import CPU_SOAK, GPU_SOAK
from autotax.hardware import Hardware
from autotax.report.formatting import counts, duration, faster, labelled, microseconds, parameters, place, style_of, title
from autotax.runner.measurement import Measurement
from autotax.tuner.finalists import BASELINES, CHALLENGERS, Paces
from autotax.tuner.progress import Listener, Progress

EVERY = 10
"""Trials between two lines if there is no terminal."""
FINALISTS = CHALLENGERS + BASELINES
"""Finalists of a run, BSP included."""


class TuningScreen:
    """Shows the runs of several problems, one after the other: `with watch(problem, hardware) as listener`.

    `problems` is how many there will be, `soak` the replays of each finalist (None: as usual on the hardware).
    """

    def __init__(
        self, problems: int, *, soak: int | None = None, finalists_only: bool = False, console: Console | None = None
    ) -> None:
        self._problems, self._soak, self._finalists_only = problems, soak, finalists_only
        self._console = console or terminal.console(stderr=True)
        self._began = 0
        self._lasted: list[float] = []
        """Seconds of each problem that is done."""
        self._finals: list[float] = []
        """Seconds of each finalist round that is done."""

    @contextmanager
    def __call__(self, problem: Problem, hardware: Hardware) -> Iterator[Listener]:
        """A listener that shows one run as long as the context lasts."""
        self._began += 1
        soak = GPU_SOAK if hardware.on_gpu else CPU_SOAK
        pace = Pace(
            soak=soak if self._soak is None else self._soak, number=self._began, of=self._problems, earlier=tuple(self._lasted),
            finals=tuple(self._finals), on_gpu=hardware.on_gpu, finalists_only=self._finalists_only,
        )  # fmt: skip
        if self._console.is_terminal:
            display = Display(problem, hardware, self._console, pace)
            with Live(display, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False):
                yield display
        else:
            yield Lines(problem, hardware, self._console, pace)
        self._lasted.append(time.monotonic() - pace.began)
        if pace.finals_began is not None:
            self._finals.append(time.monotonic() - pace.finals_began)


@dataclass
class Pace:
    """How fast a run is, and how long it and the problems after it may still take. Trials of earlier runs count as taking no
    time.
    """

    first: Progress | None = None
    last: Progress | None = None
    soak: int = 0
    number: int = 1
    of: int = 1
    earlier: tuple[float, ...] = ()
    """Seconds of each problem before this one."""
    finals: tuple[float, ...] = ()
    """Seconds of the finalist round of each problem before this one."""
    on_gpu: bool = True
    finalists_only: bool = False
    began: float = field(default_factory=time.monotonic)
    finals_began: float | None = None

    def note(self, progress: Progress) -> None:
        self.first = self.first or progress
        if progress.phase == "finalists" and self.finals_began is None:
            self.finals_began = time.monotonic()
        self.last = progress

    @property
    def per_minute(self) -> float | None:
        if self.first is None or self.last is None or self.last.seconds <= 0.0:
            return None
        return (self.last.done - self.first.done + 1) / self.last.seconds * 60.0

    @property
    def search_left(self) -> float | None:
        """Seconds until the trials or the time are used up, whichever comes first."""
        if self.last is None:
            return None
        if self.last.phase == "finalists":
            return 0.0
        ends = [self.last.seconds_left] if self.last.seconds_left is not None else []
        if rate := self.per_minute:
            ends.append(max(0, self.last.total - self.last.done) / rate * 60.0)
        return min(ends, default=None)

    @property
    def finals_s(self) -> float:
        """Seconds of a finalist round: as of earlier problems, else from the pace of the trials, the soak and the samples."""
        if self.finals:
            return statistics.fmean(self.finals)
        rate, best = self.per_minute, self.last.best if self.last else None
        trial_s = 60.0 / rate if rate else 0.0
        call_s = (best.latency_us or 0.0) / 1e6 if best else 0.0
        return Paces(trial_s, call_s, self.on_gpu).expected_s(FINALISTS, self.soak)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until this problem is decided: the remaining trials, the finalists and their soak."""
        search = self.search_left
        if search is None or self.last is None:
            return None
        spent = time.monotonic() - self.finals_began if self.finals_began is not None else 0.0
        whole = search + max(0.0, self.finals_s - spent)
        return whole if self.last.limit_s is None else min(whole, self.last.limit_s)

    @property
    def all_left(self) -> float | None:
        """Seconds until the last problem is decided, if the remaining problems take as long as the previous ones."""
        own = self.seconds_left
        if own is None or self.of == 1:
            return own
        mine = time.monotonic() - self.began + own
        return own + (self.of - self.number) * statistics.fmean((*self.earlier, mine))

    @property
    def place(self) -> str:
        """`problem 2 of 7`, or nothing for a single one."""
        return f"problem {self.number} of {self.of}" if self.of > 1 else ""


@dataclass
class _Listener:
    problem: Problem
    hardware: Hardware
    console: Console = field(default_factory=partial(terminal.console, stderr=True))
    pace: Pace = field(default_factory=Pace)

    def notice(self, text: str) -> None:
        """Prints the notice; above a display, where it stays."""
        self.console.print(Text(f"notice: {' '.join(text.split())}", "yellow"), soft_wrap=not self.console.is_terminal)


@dataclass
class Display(_Listener):
    """Redraws itself a few times a second, so that the elapsed time of a long trial is visible."""

    heard: float = field(default_factory=time.monotonic)

    def progress(self, progress: Progress) -> None:
        self.pace.note(progress)
        self.heard = time.monotonic()

    def __rich__(self) -> Group:
        heading = Text(f"{self.pace.place}: " if self.pace.place else "", "cyan").append(title(self.problem), "bold")
        where = Text(place(self.hardware), "dim")
        if self.pace.last is None:
            doing = "the former winners meet BSP" if self.pace.finalists_only else "the ranks start and measure the first config"
            return Group(heading, where, Text(f"{doing}, {self._silence()}"))
        return Group(heading, where, self._bar(self.pace.last), self._facts(self.pace.last))

    def _bar(self, progress: Progress) -> Table:
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        rate = self.pace.per_minute
        left = _left(self.pace, time.monotonic() - self.heard if self.pace.finals_began is None else 0.0)
        done = f"{progress.done}/{progress.total} trials"
        row.add_row(
            ProgressBar(total=progress.total, completed=min(progress.done, progress.total)),
            Text(f"{done}, {rate:.1f} a minute" if rate else done, no_wrap=True),
            Text(left, no_wrap=True),
            Text("finalists and soak" if progress.phase == "finalists" else progress.phase, "cyan", no_wrap=True),
        )
        return row

    def _facts(self, progress: Progress) -> Table:
        facts = labelled(min_width=len("so far"), no_wrap=True, overflow="ellipsis")
        facts.add_row("search", _best(progress))
        facts.add_row("so far", _statuses(progress))
        if gain := _gain(progress):
            facts.add_row("to come", gain)
        if progress.last is not None:
            facts.add_row("last", _trial(progress.last).append(f"  {self._silence()} ago", "dim"))
        return facts

    def _silence(self) -> str:
        return duration(time.monotonic() - self.heard)


@dataclass
class Lines(_Listener):
    """One line at the first trial, at every tenth, at each new phase: for logs."""

    def __post_init__(self) -> None:
        before = f"{self.pace.place}: " if self.pace.place else ""
        self._say(f"{before}{title(self.problem)}: {place(self.hardware)}")

    def progress(self, progress: Progress) -> None:
        before = self.pace.last
        self.pace.note(progress)
        if before is None or before.phase != progress.phase or progress.done % EVERY == 0:
            self._say(self._line(progress))

    def _line(self, progress: Progress) -> str:
        rate = self.pace.per_minute
        parts = [
            f"{progress.phase}: {progress.done}/{progress.total} trials ({counts(progress.statuses)})",
            _best(progress).plain,
            f"{rate:.1f} a minute" if rate else "",
            _gain(progress),
            _left(self.pace),
        ]
        return "; ".join(part for part in parts if part)

    def _say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


def _left(pace: Pace, since: float = 0.0) -> str:
    """`1:24 left, 12:10 for all`"""
    own, every = pace.seconds_left, pace.all_left
    if own is None or every is None:
        return ""
    remaining = f"{duration(max(0.0, own - since))} left"
    return f"{remaining}, {duration(max(0.0, every - since))} for all" if pace.number < pace.of else remaining


def _best(progress: Progress) -> Text:
    """The best of the search. The figures of the finals are others, for those are taken in turn."""
    best, baseline = progress.best, progress.baseline_us
    if best is None or best.latency_us is None:
        return Text("nothing verified yet")
    if best.config.variant == "bsp":
        return Text(f"nothing beats BSP ({microseconds(best.latency_us)} us) yet")
    text = Text.assemble("best so far ", (best.config.variant, "bold green"), f" {microseconds(best.latency_us)} us")
    if baseline is not None:
        text.append(f", {faster(baseline / best.latency_us)} ({microseconds(baseline)} us)")
    return text.append(f" {parameters(best.config)}", "dim") if best.config.params else text


def _gain(progress: Progress) -> str:
    """The model's expected gain of more trials, during the search."""
    if progress.gain is None or progress.phase == "finalists":
        return ""
    return f"eight more trials should win {progress.gain:.1%}"


def _statuses(progress: Progress) -> Text:
    return Text(", ").join(Text(f"{count} {name}", style_of(name)) for name, count in progress.statuses.items())


def _trial(measurement: Measurement) -> Text:
    text = Text.assemble(measurement.config.variant, " ", (measurement.status, style_of(measurement.status)))
    if measurement.latency_us is not None:
        text.append(f" {microseconds(measurement.latency_us)} us")
    if measurement.error:
        text.append(f" {summary(measurement.error)[:80]}", "dim")
    return text
