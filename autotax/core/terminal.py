"""Text on a terminal: control characters in texts from files, databases and compilers are shown and never executed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleDimensions, RenderableType

NARROWEST, WIDEST = 20, 4000
"""Bounds for the number of columns that a terminal reports."""


def printable(text: str) -> str:
    """The text with escapes for all characters but printable ones, spaces and line breaks."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def settle_sizes() -> None:
    """Removes invalid terminal sizes from the environment variables of this process, and bounds valid ones. Rich, typer and
    argparse read these variables too, and some fail or take all memory for extreme values.
    """
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        text = os.environ.pop(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text):
            os.environ[name] = str(min(max(int(text), NARROWEST), WIDEST))


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Rich's console, without markup in plain texts and with control characters escaped."""
    from rich.console import Console, ConsoleDimensions, ConsoleOptions
    from rich.segment import Segment

    class Guarded(Console):
        @property
        def size(self) -> ConsoleDimensions:
            dimensions = super().size
            return ConsoleDimensions(min(max(dimensions.width, NARROWEST), WIDEST), dimensions.height)

        @size.setter
        def size(self, requested: tuple[int, int]) -> None:
            self._width, self._height = requested

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(printable(text), style)

    return Guarded(stderr=stderr, width=width, markup=False, emoji=False)
