"""Altair charts as small static SVG: text takes the colour of the page, and each mark shows its value as a tooltip."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from xml.etree import ElementTree

from autotax.core.config import Config
from autotax.core.files import a_home
from autotax.db.records import TrialRecord
from autotax.report import formatting
from autotax.report.formatting import faster, interval, microseconds, number, outcome, parameters, scatter_of, times
from autotax.report.renderer import Renderer, Undrawn
from autotax.tuner.comparison import Comparison
from autotax.tuner.finalists import speedup
from autotax.tuner.progress import Verdict

RENDERER = Renderer()
NAMESPACE = "http://www.w3.org/2000/svg"
FONT = "Arial, Helvetica, Liberation Sans, sans-serif"
INK = "currentColor"
CONFIG = {
    "background": "transparent",
    "font": FONT,
    "padding": {"left": 28, "right": 12, "top": 5, "bottom": 5},
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK, "titleColor": INK, "ticks": False, "domainColor": INK, "gridColor": INK, "gridOpacity": 0.15,
        "domainOpacity": 0.4, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
    },
    "legend": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
    "text": {"color": INK, "fontSize": 12},
    "title": {"color": INK, "fontSize": 12, "fontWeight": "normal", "anchor": "start"},
}  # fmt: skip
"""The configuration of all charts."""
NEEDLESS = ("class", "pointer-events", "aria-hidden", "role", "aria-roledescription", "font-family", "version")
USUAL = {"opacity": "1", "fill-opacity": "1", "stroke-opacity": "1", "transform": "translate(0,0)", "stroke-width": "1"}
INHERITED = ("fill", "stroke", "font-size", "font-weight", "text-anchor", "fill-opacity", "stroke-opacity", "stroke-width")
PLACES = ("transform", "d", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "viewBox")
PLACED = re.compile(r"translate\(([-\d.]+),([-\d.]+)\)")
ZEROS = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy")
CIRCLE = re.compile(r"M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0")


def drawn(chart: Any, title: str, label: str, background: str | None = None) -> str:
    """One `<svg>` element of a chart of Altair's. `title` and `label` are its name and its description for screen readers.

    `background` is for standalone pictures. Without it the picture is transparent.
    """
    chart = chart.configure(**CONFIG)
    try:
        root = ElementTree.fromstring(RENDERER.svg(chart.to_dict()))
        _shrink(root)
    except Undrawn as why:
        root = _element("svg", "")
        root.append(_element("text", f"This plot is left out: {why}"))
        root[0].set("y", "1em")
    root.set("role", "img")
    root.set("font-family", FONT)
    for tag, text in (("desc", label), ("title", title)):
        root.insert(0, _element(tag, text))
    if background:
        root.set("style", "color: #222222")
        root.insert(2, ElementTree.Element(f"{{{NAMESPACE}}}rect", {"width": "100%", "height": "100%", "fill": background}))
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _element(tag: str, text: str) -> ElementTree.Element:
    made = ElementTree.Element(f"{{{NAMESPACE}}}{tag}")
    made.text = text
    return made


def _shrink(element: ElementTree.Element) -> None:
    """Drops elements that draw nothing and attributes with default values. The label of a mark becomes its tooltip.

    An attribute that all children of a group share moves to the group.
    """
    label = element.attrib.pop("aria-label", None)
    for name in NEEDLESS:
        element.attrib.pop(name, None)
    for name, default in USUAL.items():
        if element.get(name) == default:
            del element.attrib[name]
    for name in PLACES:
        if name in element.attrib:
            element.set(name, re.sub(r"\d+\.\d+", _shorter, element.attrib[name]))
    for child in list(element):
        _shrink(child)
        if _draws_nothing(child):
            element.remove(child)
    if circle := CIRCLE.fullmatch(element.get("d", "")):
        _round(element, circle[1])
    if element.tag.endswith("}text") and not len(element) and not {"x", "y"} & element.attrib.keys():
        _place(element, "x", "y")
    for name in ZEROS:
        if element.get(name) == "0":
            del element.attrib[name]
    if label and element.tag.endswith(("path", "circle")):
        element.append(_element("title", label))
    for name in INHERITED:
        common = {child.get(name) for child in element}
        if element.tag.endswith("}g") and len(common) == 1 and None not in common:
            element.set(name, common.pop() or "")
            for child in element:
                del child.attrib[name]
    if element.tag.endswith("}g") and len(element) == 1 and element[0].tag.endswith("}g") and not element[0].attrib:
        element[:] = list(element[0])


def _shorter(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _round(element: ElementTree.Element, radius: str) -> None:
    del element.attrib["d"]
    element.tag = f"{{{NAMESPACE}}}circle"
    element.set("r", radius)
    _place(element, "cx", "cy")


def _place(element: ElementTree.Element, x: str, y: str) -> None:
    """Replaces a transform that is only a translation by coordinates, which are shorter."""
    if placed := PLACED.fullmatch(element.get("transform", "")):
        del element.attrib["transform"]
        element.attrib |= {x: placed[1], y: placed[2]}


def _draws_nothing(element: ElementTree.Element) -> bool:
    kind = element.tag.rpartition("}")[2]
    if kind == "path":
        unpainted = not element.get("stroke") and element.get("fill", "none") == "none"
        return not element.get("d") or (unpainted and "title" not in {child.tag.rpartition("}")[2] for child in element})
    return kind == "g" and not len(element)


# The charts of the page, drawn by Altair: speed-ups of winners, the time of BSP by parts, searches, ladders.

with a_home():  # Altair wants a home for its cache of data sets, which no chart here uses
    import altair as alt

WIDTH, ROW, SEARCH_HEIGHT, FAILED_ROW = 540, 22, 190, 16
"""Pixels: of all axes, of a row of a chart, of the trials of a search, of a status of failed trials."""
SLOWEST = 7.0
"""Trials that exceed the best by more than this, as a multiple of the best, are drawn at this limit, as triangles."""
SHAPES, CLAMPED, BEYOND = {False: "circle", True: "diamond"}, "triangle-up", ", beyond the scale"
LAST = 0.05
"""The excess over the best that the scale shows at full width. Only trials below it have tooltips with parameters, which keeps
pages small.
"""
FINEST = 0.02
"""Below this excess over the best the scale of a search is linear, above it logarithmic."""
EXCESSES = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 7.0)
MAGNITUDE = 6.0
"""Bars of one chart differ by at most this factor, so that all can be read on one axis."""
STRAIGHT = 8.0
"""An axis of ratios is logarithmic if they differ by more than this factor."""
CROSS = "M-1,-1L1,1M-1,1L1,-1"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Taxed:
    """Parts of a bulk-synchronous call in microseconds: `work` is the work itself, `tuned` the whole tuned call, `bsp` the whole
    BSP call.
    """

    name: str
    work: float
    tuned: float
    bsp: float


@dataclass(frozen=True)
class Ratio:
    """A named row of a chart of speed-ups: the speed-up over BSP, its interval, and the latencies of both in microseconds."""

    name: str
    variant: str
    speedup: float
    low: float
    high: float
    us: float | None
    bsp_us: float | None


def speedups(ratios: Sequence[Ratio]) -> str:
    """A row for each config: its speed-up over BSP with the confidence interval."""
    rows: list[dict[str, Any]] = [
        {
            "place": place, "ratio": row.speedup, "low": row.low, "high": row.high, "variant": row.variant,
            "shown": times(row.speedup),
            "description": f"{row.name}, {row.variant}: {microseconds(row.us)} us, {faster(row.speedup)} "
            f"{interval((row.low, row.high))}, which takes {microseconds(row.bsp_us)} us",
        }
        for place, row in enumerate(ratios)
    ]  # fmt: skip
    low, high = min(0.95, *(row["low"] for row in rows)), max(1.1, *(row["high"] for row in rows))
    kind: Any = "linear" if high < STRAIGHT * low else "log"
    x = alt.X("ratio:Q", title="speed-up over BSP (times), with the 95 % interval")
    x = x.scale(type=kind, domain=[low, high + (high - low) * 0.08], nice=False).axis(orient="top", tickCount=8)
    colour = alt.Color("variant:N", title="variant").scale(**formatting.scale(row["variant"] for row in rows)).legend(_legend())
    base = alt.Chart(_data(rows)).encode(y=_places([row.name for row in ratios]), color=colour)
    bars = base.transform_calculate(ratio="datum.low").mark_rule(aria=False, strokeWidth=3, opacity=0.45).encode(x=x, x2="high:Q")
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(x=x, description="description:N")
    labels = base.transform_calculate(ratio="datum.high").mark_text(aria=False, align="left", dx=7)
    labels = labels.encode(x=x, text="shown:N", color=alt.value("currentColor"))
    bsp = alt.Chart(_data([{"ratio": 1.0}])).mark_rule(aria=False, color="currentColor", strokeWidth=2, opacity=0.6).encode(x=x)
    chart = alt.layer(bsp, bars, dots, labels).properties(width=WIDTH, height=ROW * len(rows))
    label = "A dot for each config, a bar for its interval."
    return drawn(chart, "Speed-up over BSP by problem", label)


def taxed(calls: Sequence[Taxed]) -> list[str]:
    """Bars in microseconds: the work, the remaining overhead of the tuned config, and the time won back over BSP. There is a
    chart for each magnitude.
    """
    return [_taxed(group) for group in _alike(calls)]


def _alike(calls: Sequence[Taxed]) -> Iterator[list[Taxed]]:
    """Calls whose bars fit on one axis, quickest first; within a group in the order given."""
    left = list(calls)
    while left:
        limit = MAGNITUDE * min(call.bsp for call in left)
        yield [call for call in left if call.bsp <= limit]
        left = [call for call in left if call.bsp > limit]


def _taxed(calls: Sequence[Taxed]) -> str:
    rows, totals = [], []
    for place, call in enumerate(calls):
        ends = [0.0, min(call.work, call.tuned, call.bsp), min(call.tuned, call.bsp), call.bsp]
        for part, first, last in zip(("work", "still paid", "won back"), ends, ends[1:], strict=False):
            label = f"{call.name}, {part}: {microseconds(last - first)} us of {microseconds(call.bsp)}"
            rows.append({"place": place, "part": part, "first": first, "last": last, "description": label})
        totals.append({"place": place, "end": call.bsp, "shown": f"{microseconds(call.tuned)} of {microseconds(call.bsp)}"})
    shades = [formatting.WORK, formatting.STILL_PAID, formatting.WON_BACK]
    colours = {"domain": ["work", "still paid", "won back"], "range": shades}
    y, longest = _places([call.name for call in calls]), max(call.bsp for call in calls)
    x = alt.X("first:Q", title="microseconds of a BSP call").scale(domain=[0, longest * 1.2], nice=False)
    x = x.axis(orient="top", tickCount=8)
    bars = alt.Chart(_data(rows)).mark_bar(height=13).encode(
        x=x, x2="last:Q", y=y, description="description:N",
        color=alt.Color("part:N", title=None).scale(**colours).legend(_legend()),
    )  # fmt: skip
    labels = alt.Chart(_data(totals)).mark_text(aria=False, align="left", dx=5).encode(x="end:Q", y=y, text="shown:N")
    chart = alt.layer(bars, labels).properties(width=WIDTH, height=ROW * len(calls))
    label = "Each bar is one BSP call: work, what the tuned config still pays beyond it, and what it won back."
    return drawn(chart, "Where the time of BSP calls goes, in microseconds", label)


def first_search(trials: Sequence[TrialRecord]) -> str:
    """The trials of the search of the first problem, or nothing."""
    problem = next((trial.run.problem for trial in trials if trial.run), None)
    shown = [trial for trial in trials if trial.run and trial.run.problem == problem and "stage" not in trial.conditions]
    return search(shown) if shown else ""


def search(trials: Sequence[TrialRecord]) -> str:
    """Trials in their order. The scale shows the last 5 % before the best at full width. Failed trials are above, by status."""
    configs = dict(enumerate(_configs(trials), 1))
    timed = {at: trial for at, trial in enumerate(trials, 1) if trial.verified and trial.latency_us}
    failed = [(at, trial) for at, trial in enumerate(trials, 1) if at not in timed]
    names = formatting.scale(trial.config.variant for trial in trials)
    colour = alt.Color("variant:N", title=None).scale(**names).legend(_legend())
    parts: list[Any] = []
    if failed:
        rows = [
            {
                "trial": at, "variant": trial.config.variant, "status": trial.status,
                "description": f"{at}. {trial.status}: {configs[at]}",
            }
            for at, trial in failed
        ]
        y = alt.Y("status:N", title=None).axis(domain=False)
        crosses = alt.Chart(_data(rows)).mark_point(shape=CROSS, size=40, strokeWidth=1.5, opacity=1)
        encoded = crosses.encode(x=_numbers(len(trials), labels=not timed), y=y, color=colour, description="description:N")
        parts.append(encoded.properties(width=WIDTH, height=FAILED_ROW * len({row["status"] for row in rows})))
    if timed:
        parts.append(_timed({at: (trial, trial.latency_us or 0.0) for at, trial in timed.items()}, configs, colour))
    chart = alt.vconcat(*parts, spacing=4).resolve_scale(color="shared")
    best = min((trial.latency_us or 0.0 for trial in timed.values()), default=None)
    tried = f"{number(len(trials), 'trial')}, {len(failed)} failed"
    label = f"{tried}, the best {microseconds(best)} us. The table has the best of each."
    return drawn(chart, "Latency of each trial, and the best so far", label)


def _timed(timed: Mapping[int, tuple[TrialRecord, float]], configs: Mapping[int, str], colour: alt.Color) -> Any:
    best = min(us for _, us in timed.values())
    worst = max(us for _, us in timed.values())
    top = min(max(1.1 * (worst / best - 1.0), 2 * LAST), SLOWEST)
    rows, steps, so_far = [], [], math.inf
    for at, (trial, us) in timed.items():
        config = configs[at] if us <= best * (1.0 + LAST) else trial.config.variant
        label = f"{at}. {trial.status} {microseconds(us)} us: {config}"
        excess, so_far = min(us / best - 1.0, top), min(so_far, us)
        clamped = us / best - 1.0 > top
        rows.append({"trial": at, "excess": excess, "variant": trial.config.variant, "description": label + BEYOND * clamped})
        rows[-1] |= {"pruned": trial.status == "pruned", "shape": CLAMPED if clamped else SHAPES[trial.status == "pruned"]}
        if us == so_far:
            steps.append({"trial": at, "excess": min(us / best - 1.0, top)})
    steps.append({"trial": len(configs), "excess": 0.0})
    over = "(datum.value ? ' us (+' + format(datum.value, '.0%') + ')' : ' us (best)')"
    label = f"format({best!r} * (1 + datum.value), ',.4~r') + {over}"
    y = alt.Y("excess:Q", title=None).scale(type="symlog", constant=FINEST, domain=[0, top], nice=False)
    y = y.axis(values=[value for value in EXCESSES if value <= top], labelExpr=label)
    x = _numbers(len(configs))
    last = alt.Chart(_data([{"excess": 0.0, "to": LAST}])).mark_rect(aria=False, opacity=0.08, color="currentColor")
    line = alt.Chart(_data(steps)).mark_line(aria=False, interpolate="step-after", color="currentColor", opacity=0.6)
    dots = alt.Chart(_data(rows)).encode(x=x, y=y, color=colour, description="description:N")
    dots = dots.encode(shape=alt.Shape("shape:N").scale(None))
    others = dots.transform_filter("!datum.pruned").mark_point(filled=True, size=32, opacity=1)
    pruned = dots.transform_filter("datum.pruned").mark_point(filled=False, size=32, opacity=1)
    chart = alt.layer(last.encode(y=y, y2="to:Q"), line.encode(x=x, y=y), pruned, others)
    return chart.properties(width=WIDTH, height=SEARCH_HEIGHT)


def ladders(shapes: Sequence[str], steps: Sequence[Row], background: str | None = None) -> str:
    """A row for each shape, on it a dot for each step at its time relative to BSP.

    Steps have `place`, `relative`, `variant` and `description`.
    """
    reach = max(1.0, *(step["relative"] for step in steps))
    variants = list(dict.fromkeys(step["variant"] for step in steps))
    x = alt.X("relative:Q", title="time relative to BSP (left is faster)").scale(domain=[0, reach], nice=False).axis(orient="top")
    colours = {"domain": variants, "range": [formatting.colour_of(name) for name in variants]}
    base = alt.Chart(_data(steps)).encode(y=_places(shapes))
    spans = base.mark_rule(aria=False, color="currentColor", opacity=0.3).encode(x="min(relative):Q", x2="max(relative):Q")
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=x, color=alt.Color("variant:N", title="variant").scale(**colours).legend(_legend()), description="description:N"
    )
    chart = alt.layer(spans, dots).properties(width=WIDTH, height=ROW * len(shapes))
    return drawn(chart, "What each step of the ladder takes", "Time relative to BSP, a dot for each step.", background)


def _data(rows: Sequence[Row]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])


def _places(names: Sequence[str]) -> alt.Y:
    """Rows by their place, because two problems may share a short name."""
    axis = alt.Axis(labelExpr=f"{json.dumps(list(names))}[datum.value]", labelLimit=260, domain=False, grid=True)
    return alt.Y("place:O", title=None, axis=axis)


def _numbers(count: int, labels: bool = True) -> alt.X:
    x = alt.X("trial:Q", title="trial" if labels else None).scale(domain=[0, count + 1], nice=False)
    return x.axis(grid=False, tickMinStep=1, tickCount=8, labels=labels, domain=labels)


def _legend() -> alt.Legend:
    return alt.Legend(orient="top", columns=5, symbolType="circle", symbolOpacity=1, labelLimit=200)


def _configs(trials: Sequence[TrialRecord]) -> list[str]:
    """The variant of each trial, and those of its parameters that vary among the trials of that variant."""
    values: dict[tuple[str, str], set[object]] = {}
    for trial in trials:
        for name, value in trial.config.params:
            values.setdefault((trial.config.variant, name), set()).add(value)
    vary = {key for key, values_of_key in values.items() if len(values_of_key) > 1}
    lines = []
    for trial in trials:
        chosen = {name: value for name, value in trial.config.params if (trial.config.variant, name) in vary}
        lines.append(f"{trial.config.variant} {parameters(Config.of(trial.config.variant, chosen))}".removesuffix(" -"))
    return lines


# Plots of results for notebooks.

@dataclass(frozen=True, repr=False)
class Plot:
    """A plot that a notebook displays."""

    title: str
    svg: str
    """The picture, or nothing if there is nothing to draw; the title says why."""

    def __repr__(self) -> str:
        return f"<Plot: {self.title}>"

    def _repr_html_(self) -> str:
        return f"<figure>{self.svg}<figcaption>{escape(self.title)}</figcaption></figure>"


def plot(result: Verdict | Comparison | Sequence[TrialRecord]) -> Plot:
    """The plot of a result.

    Args:
        result: A verdict or a comparison: its rows, in times of BSP with 95 % intervals. Trials: the search of the first problem,
            trial by trial, and the best so far.

    Returns:
        A plot that a notebook displays. Where samples of CPU ranks scatter so that ratios mean nothing, it has no picture and
        says so.
    """
    if isinstance(result, Verdict | Comparison):
        about = f"{formatting.title(result.problem)}: {outcome(result) if isinstance(result, Verdict) else 'compared'}"
        noise = scatter_of(result)
        ratios = [] if noise else _of_verdict(result) if isinstance(result, Verdict) else _of_comparison(result)
        shown = Plot(f"{about}; {noise}" if noise else about, speedups(ratios) if ratios else "")
    else:
        problem = next((trial.run.problem for trial in result if trial.run), None)
        shown = Plot(f"{formatting.title(problem)}: the search" if problem else "no trials", first_search(result))
    RENDERER.close()
    return shown


def _of_verdict(verdict: Verdict) -> list[Ratio]:
    bsp = verdict.baseline.latency_us if verdict.baseline else None
    return [
        Ratio(
            f"{rank}. {standing.measurement.config.variant}", standing.measurement.config.variant, standing.speedup,
            *standing.interval, standing.measurement.latency_us, bsp,
        )
        for rank, standing in enumerate(verdict.standings, 1)
    ]  # fmt: skip


def _of_comparison(compared: Comparison) -> list[Ratio]:
    """The rows with a speed-up; the interval is that of the median of the paired samples."""
    bsp = next((row.measurement for row in compared.rows if row.variant == "bsp" and row.speedup == 1.0), None)
    if bsp is None:
        return []
    return [
        Ratio(row.name, row.variant, row.speedup, *speedup(bsp.rounds, row.measurement.rounds)[1], row.measurement.latency_us,
              bsp.latency_us)
        for row in compared.rows if row.speedup is not None
    ]  # fmt: skip
