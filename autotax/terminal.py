"""TEXT on a terminal: what comes from files, databases and compilers is shown and never obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: str) -> str:
    """The same with escapes for all characters but printable ones, spaces and line breaks."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Rich's console, without markup in plain texts and with control characters escaped."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Guarded(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(printable(text), style)

    return Guarded(stderr=stderr, width=width, markup=False, emoji=False)
