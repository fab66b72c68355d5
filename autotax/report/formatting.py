"""One colour for each variant, the same in all charts and tables. All colours can be seen on white and on near-black."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import summary
from autotax.core.problem import Problem
from autotax.core.terminal import WIDEST, console
from autotax.hardware import Hardware
from autotax.operators import operators

if TYPE_CHECKING:
    from autotax.tuner import Comparison, Verdict

BASELINE = "#808080"
COLOURS = (
    "#1f7fd1", "#c46a00", "#d1437a", "#8a5cd6", "#7d8512", "#0d8fa3", "#d2452b", "#4d8f2a", "#b04fc4", "#a0622d", "#5570e0",
    "#9e24f0", "#b27db2", "#f024b3", "#9e575e", "#616b3b", "#f024f0", "#19a819", "#f0244d", "#1d7564", "#735da8", "#a8438a",
    "#a88a5d", "#db7258", "#f0606e", "#1f9cd1", "#806c20", "#3c60f0", "#68946c", "#f02424", "#19a852", "#b61ec7", "#2a9d8f",
    "#6a8caf", "#c9822b", "#7b3f61", "#3f7b3a", "#b3446c", "#5a5fae", "#8f6b2f", "#268b9c", "#7a4fd0", "#5f8a12", "#c2577f",
    "#4a78b8", "#9a4d8c", "#b0582e",
)  # fmt: skip
WORK, STILL_PAID, WON_BACK = "#66809a", "#b5831a", "#12905c"
"""Parts of a bulk-synchronous call. No variant has these colours."""


def colour_of(variant: str) -> str:
    """The colour of a variant. Undeclared variants get one too: they may come from an older version or from a module that is not
    loaded.
    """
    declared = _declared(tuple(tuple(operator.variants) for operator in operators().values()))
    return declared.get(variant) or COLOURS[sum(variant.encode()) % len(COLOURS)]


@cache
def _declared(families: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """Colours of the declared variants, all different as long as there are enough colours, for a page may show all operators.
    Equal names of several operators share a colour.
    """
    names = [name for name in dict.fromkeys(chain.from_iterable(families)) if name != "bsp"]
    return {"bsp": BASELINE, **dict(zip(names, cycle(COLOURS), strict=False))}


def scale(variants: Iterable[str]) -> dict[str, list[str]]:
    """Domain and range of a colour scale, in the order of the names."""
    names = sorted(set(variants))
    return {"domain": names, "range": [colour_of(name) for name in names]}


# The spelling of figures, problems and configs, in tables and in progress displays.

CPU_NOTE = "CPU ranks on the Triton interpreter: these figures say nothing about GPUs"

STATUS_STYLES = {"ok": "green", "pruned": "cyan", "infeasible": "yellow"}
FAILED_STYLE = "red"


def style_of(status: str) -> str:
    return STATUS_STYLES.get(status, FAILED_STYLE)


def title(problem: Problem) -> str:
    """`all-gather-gemm m=512 n=7168 k=8192 dtype=bf16 shard=m world_size=4`"""
    return " ".join([problem.op, *(f"{name}={value}" for name, value in problem.to_dict().items() if name != "op")])


def place(hardware: Hardware) -> str:
    """The hardware of figures. For CPU ranks it always contains a warning."""
    return str(hardware) if hardware.on_gpu else CPU_NOTE


def deployed(conditions: Conditions) -> str:
    """`calls in place, cold L2`, `graph calls, cold L2, back to back`, `eager calls, cold L2, ranks up to 20 us apart`"""
    apart = f", ranks up to {conditions.skew_us:g} us apart" if conditions.skew_us else ""
    calls = "calls in place" if conditions.in_place else f"{conditions.mode} calls"
    behind = ", back to back" if conditions.mode == "graph" and not apart else ""
    return f"{calls}, {conditions.l2} L2{behind}{apart}"


def heading(problem: Problem, hardware: Hardware, conditions: Conditions) -> str:
    """The heading of a table: operator, ranks, hardware and conditions, which all its problems share."""
    return f"{problem.op}, {number(problem.world_size, 'rank')}: {place(hardware)}; {deployed(conditions)}"


def unusual(conditions: Conditions, hardware: Hardware) -> str:
    """The conditions, or nothing if they are the usual ones."""
    return "" if conditions == Conditions.usual(hardware.on_gpu) else f"tuned for {deployed(conditions)}"


def accounts(parts: Mapping[str, float], hardware: Hardware) -> str:
    """Where the time of a run went: `Search 5 s, finals 9 s; ranks waited for the host 16 % of the time.`"""
    seconds, search_s = parts["seconds"], parts["search_s"]
    idle = f"{'GPUs' if hardware.on_gpu else 'ranks'} waited for the host {share(parts['idle_share'])} of the time"
    return f"Search {search_s:.0f} s, finals {max(0.0, seconds - search_s):.0f} s; {idle}."


def share(part: float) -> str:
    """`61 %`"""
    return f"{100 * part:.0f} %"


def won(part: float | None) -> str:
    """`61 %`, or `all` if the tuned call takes no longer than the work. The work is measured by another kernel, for instance a
    copy, so a call may take even less.
    """
    return "-" if part is None else "all" if part >= 1 else share(part)


def microseconds(value: float | None) -> str:
    """Four digits or so: `38.41`, `512.3`, `12,345`."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0
    return f"{value:,.{digits}f}"


def times(speedup: float | None) -> str:
    """`1.31x`"""
    return "-" if speedup is None else f"{speedup:.2f}x"


def faster(speedup: float | None, than: str = "BSP") -> str:
    """`1.31x faster than BSP`, `1.05x slower than BSP`, `as fast as BSP`"""
    if speedup is None:
        return "-"
    if times(speedup) == times(1.0):
        return f"as fast as {than}"
    return f"{times(max(speedup, 1 / speedup))} {'faster' if speedup > 1 else 'slower'} than {than}"


def interval(ends: tuple[float, float]) -> str:
    """`[1.28, 1.33]`"""
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def duration(seconds: float) -> str:
    """`0:09`, `12:34`, `1:02:03`"""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parameters(config: Config) -> str:
    """`block_m=128 block_n=256`, or a dash where there are none."""
    return " ".join(f"{name}={value}" for name, value in config.params) or "-"


def number(count: int, noun: str) -> str:
    """`1 trial`, `3 trials`"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counts(statuses: Mapping[str, int]) -> str:
    """`18 ok, 3 pruned, 1 hang`"""
    return ", ".join(f"{count} {status}" for status, count in statuses.items()) or "none"


MOST_FOLD, FEWEST_ROUNDS = 5.0, 10
"""Ratios are not shown if a tenth of the samples takes this many times as long as another tenth."""


def scatter_of(result: Verdict | Comparison) -> str:
    """A line in place of ratios if samples of CPU ranks scatter so much that medians mean nothing; else nothing."""
    shown: Any = result
    rows = shown.standings if hasattr(shown, "standings") else [row for row in shown.rows if row.measurement.verified]
    spreads = [] if result.hardware.on_gpu else [sorted(row.measurement.rounds) for row in rows]
    rounds = [times for times in spreads if len(times) >= FEWEST_ROUNDS]
    fold = max((times[-1 - len(times) // 10] / max(times[len(times) // 10], 1e-3) for times in rounds), default=1.0)
    if fold < MOST_FOLD:
        return ""
    many = f"{fold:.0f}-fold" if fold < 1000 else "more than 1000-fold"
    return f"samples of one config scatter {many}, so medians mean little here and no ratios are shown"


def outcome(verdict: Verdict) -> str:
    """How a run ended, in one line: `push wins: 1.31x faster than BSP (95 % CI 1.28 to 1.33); 60 trials (60 ok) in 1:12`"""
    tried = f"{number(sum(verdict.trials.values()), 'trial')} ({counts(verdict.trials)}) in {duration(verdict.seconds)}"
    if verdict.winner is None:
        ended = "interrupted before a verdict" if verdict.interrupted else "no winner: nothing could be verified"
        ended = "no winner: the time limit came first" if verdict.late else ended
    elif verdict.tie:
        ended = "Differences are within noise; BSP is kept"
    elif verdict.winner.measurement.config.variant == "bsp":
        ended = f"Nothing beats BSP ({microseconds(verdict.winner.measurement.latency_us)} us) yet"
    else:
        low, high = verdict.winner.interval
        ended = f"{verdict.winner.measurement.config.variant} wins"
        if not scatter_of(verdict):
            ended += f": {faster(verdict.winner.speedup)} (95 % CI {low:.2f} to {high:.2f})"
    return f"{ended}; {tried}"


# The look of all tables, on wide and on narrow screens.

READABLE = 32
"""Columns that a cell of several words gets at least, if it has so many."""


@dataclass(frozen=True)
class Fitting:
    """The same facts in several forms. A screen gets the first form for which it is wide enough, else the last one."""

    forms: tuple[RenderableType, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        every = options.update(max_width=WIDEST)
        fitting = (form for form in self.forms if Measurement.get(console, every, form).minimum <= options.max_width)
        yield next(fitting, self.forms[-1])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.forms[0])


class Captioned(Table):
    """A table as wide as its cells between a heading and notes, which may be wider."""

    def __init__(self, heading: str, *notes: str, header: bool = True) -> None:
        super().__init__(box=box.SIMPLE_HEAD, show_header=header, header_style="dim", pad_edge=False)
        self.heading = Text(heading, "bold")
        self.notes = Text("\n".join(note for note in notes if note), "dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield self.heading
        yield from super().__rich_console__(console, options)
        if self.notes:
            yield self.notes

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        texts = [text.cell_len for part in (self.heading, self.notes) for text in part.split()]
        whole = super().__rich_measure__(console, options).maximum
        widths = [(self._measure_column(console, options, column).maximum, column.no_wrap) for column in self.columns]
        spared = sum(max(0, width - READABLE) for width, unfolded in widths if not unfolded)
        return Measurement(whole - spared, max(whole, *texts, 1)).clamp(max_width=options.max_width)


grid = Captioned


def config_text(config: Config) -> Text:
    """The variant and, dimmer, its parameters."""
    text = Text(config.variant)
    return text.append(f" {parameters(config)}", "dim") if config.params else text


def labelled(min_width: int | None = None, **more: Any) -> Table:
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True, min_width=min_width)
    lines.add_column(**{"overflow": "fold"} | more)
    return lines


def columns(table: Table, *names: str) -> None:
    """Adds columns. A name that ends with `>` is a column of figures, aligned right. Columns with `>` or `|` are never folded."""
    for name in names:
        justify, whole = "right" if name.endswith(">") else "left", name.endswith((">", "|"))
        overflow = "ellipsis" if whole else "fold"
        table.add_column(name.rstrip(">|"), justify=justify, no_wrap=whole, overflow=overflow)  # type: ignore[arg-type]


def listing(name: str, texts: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Fitting:
    """Rows of facts. The first fact of a row is its subject. On narrow screens each fact has a line with its label."""
    table = grid(name, *texts)
    columns(table, *names)
    narrow: list[RenderableType] = [Text(name, "bold")]
    for first, *facts in rows:
        table.add_row(first, *facts)
        lines = labelled()
        for label, fact in zip(names[1:], facts, strict=True):
            if fact:
                lines.add_row(f"  {label.rstrip('>|')}", fact)
        narrow += [Text(), first, lines]
    return Fitting((table, Group(*narrow, Text(), *(Text(line, "dim") for line in texts if line))))


def status_text(status: str, error: str | None) -> Text:
    text = Text(status, style_of(status))
    return text.append(f": {summary(error)}", "dim") if error else text


def natural_width(shown: RenderableType) -> int:
    """The width in columns of a table, or of several below each other, if nothing is folded or cut."""
    wide = console(width=WIDEST)
    return max(Measurement.get(wide, wide.options, shown).maximum, 1)
