"""Tables as the page's template takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotax.core.config import Config
from autotax.report.formatting import colour_of, parameters


@dataclass(frozen=True)
class Cell:
    """A text, the CSS class of its cell, and the colour of the dot before it."""

    text: str
    mark: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Table:
    """Columns whose names begin with `>` are figures."""

    head: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]


def table(head: Sequence[str], lines: Iterable[Sequence[str | Cell]]) -> Table:
    """Plain texts are cells without marks."""
    return Table(tuple(head), tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in line) for line in lines))


def variant_cell(variant: str, config: Config | None = None) -> Cell:
    """A variant with the dot of its colour, and the parameters of its config if one is given."""
    return Cell(f"{variant} {parameters(config)}".removesuffix(" -") if config else variant, colour=colour_of(variant))
