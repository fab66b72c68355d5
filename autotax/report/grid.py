"""What all tables look like."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from autotax.config import Config
from autotax.report.wording import CPU_NOTE, parameters, style_of


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


def columns(table: Table, *names: str) -> None:
    """Adds columns; a name that ends in `>` is one of figures, aligned right and never folded."""
    for name in names:
        figures = name.endswith(">")
        justify = "right" if figures else "left"
        table.add_column(name.rstrip(">"), justify=justify, no_wrap=figures, overflow="fold")  # type: ignore[arg-type]


def status_text(status: str, error: str | None) -> Text:
    text = Text(status, style_of(status))
    return text.append(f": {' '.join(error.split())}", "dim") if error else text
