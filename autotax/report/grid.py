"""The look of all tables, on wide and on narrow screens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from autotax.core.config import Config
from autotax.core.terminal import WIDEST
from autotax.report.formatting import CPU_NOTE, parameters, style_of

NARROW = 110
"""Columns below which parameters of configs move from the table to lines of their own."""


@dataclass(frozen=True)
class Fitting:
    """A table for wide screens and the same facts for narrow ones."""

    wide: RenderableType
    narrow: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        whole = Measurement.get(console, options.update(max_width=WIDEST), self.wide).maximum
        yield self.narrow if options.max_width < min(NARROW, whole) else self.wide

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.wide)


def grid(name: str, *caption: str, header: bool = True) -> Table:
    return Table(
        title=Text(name, "bold"),
        caption=Text("\n".join(line for line in caption if line), "dim"),
        box=box.SIMPLE_HEAD,
        show_header=header,
        header_style="dim",
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        min_width=len(CPU_NOTE) + 1,  # else it would be folded under a narrow table
    )


def config_text(config: Config) -> Text:
    """The variant and, dimmer, its parameters."""
    text = Text(config.variant)
    return text.append(f" {parameters(config)}", "dim") if config.params else text


def legend(configs: list[tuple[str, Config]]) -> Table:
    """The parameters of configs by the names of their rows, for screens whose tables have no room for them."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, config in configs:
        if config.params:
            lines.add_row(name, Text(parameters(config), "dim"))
    return lines


def columns(table: Table, *names: str) -> None:
    """Adds columns. A name with `>` at its end is one of figures, aligned right. Columns with `>` or `|` are never folded."""
    for name in names:
        justify, whole = "right" if name.endswith(">") else "left", name.endswith((">", "|"))
        table.add_column(name.rstrip(">|"), justify=justify, no_wrap=whole, overflow="fold")  # type: ignore[arg-type]


def listing(name: str, told: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Fitting:
    """Rows of facts, the first of which says what the others are about; on narrow screens each fact has a line with its label."""
    table = grid(name, *told)
    columns(table, *names)
    narrow: list[RenderableType] = [Text(name, "bold")]
    for first, *facts in rows:
        table.add_row(first, *facts)
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="dim", no_wrap=True)
        lines.add_column(overflow="fold")
        for label, fact in zip(names[1:], facts, strict=True):
            if fact:
                lines.add_row(f"  {label.rstrip('>|')}", fact)
        narrow += [Text(), first, lines]
    return Fitting(table, Group(*narrow, Text(), *(Text(line, "dim") for line in told if line)))


def status_text(status: str, error: str | None) -> Text:
    text = Text(status, style_of(status))
    return text.append(f": {' '.join(error.split())}", "dim") if error else text
