"""As much of SVG as the plots need. Places are pixels; every word is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

COLOURS = ("#444444", "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#8c6d31", "#b2a400")
"""To be told apart by everybody."""
GREY, PALE = "#aaaaaa", "#dddddd"
MOST_TICKS = 40
"""Of an axis."""


def picture(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole, on white."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def words(x: float, y: float, text: str, anchor: str = "start") -> str:
    """`anchor`: the end of the text that is at x, start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def dot(x: float, y: float, colour: str, title: str, radius: float = 5) -> str:
    """`title` is shown when a pointer rests on it."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"><title>{escape(title)}</title></circle>'


def ticks(low: float, high: float, step: float) -> list[float]:
    """Multiples of a step between two values; of a step ten times as long as often as there are too many."""
    while (high - low) / step > MOST_TICKS:
        step *= 10
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def bar(x1: float, x2: float, y: float, colour: str, title: str) -> str:
    size = f'width="{max(0.0, x2 - x1):.1f}" height="14"'
    return f'<rect x="{x1:.1f}" y="{y - 7:.1f}" {size} fill="{colour}"><title>{escape(title)}</title></rect>'


def path(points: Sequence[tuple[float, float]], colour: str) -> str:
    """A line through all points."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{colour}"/>'


def cross(x: float, y: float, colour: str, title: str) -> str:
    strokes = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
    return f'<path d="{strokes}" stroke="{colour}" stroke-width="1.5"><title>{escape(title)}</title></path>'
