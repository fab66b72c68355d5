"""As much of HTML as the page needs. Every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td:first-child { white-space: nowrap }
th { color: #666; font-weight: normal }
.figure { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.loss { color: #b04000 }
small, .dim { color: #666 }
summary { cursor: pointer; padding: .3em 0 }
svg { max-width: 100%; height: auto }
"""

Cell = str | tuple[str, str]
"""Text, or text and the class of its cell."""


def table(head: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """Columns whose names begin with `>` are figures."""
    figures = [name.startswith(">") for name in head]
    rows = ["".join(_cell("th", name.lstrip(">"), figure) for name, figure in zip(head, figures, strict=True))]
    rows += ["".join(_cell("td", cell, figure) for cell, figure in zip(line, figures, strict=True)) for line in lines]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>\n"


def _cell(kind: str, cell: Cell, figure: bool) -> str:
    text, mark = (cell, "") if isinstance(cell, str) else cell
    names = " ".join(name for name in ("figure" if figure else "", mark) if name)
    return f'<{kind} class="{names}">{escape(text)}</{kind}>' if names else f"<{kind}>{escape(text)}</{kind}>"


def document(name: str, body: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(name)}</title>'
    parts = [f"<!doctype html>\n<html lang=en><head>{head}<style>{STYLE}</style></head><body>", *body, "</body></html>\n"]
    return "\n".join(parts)
