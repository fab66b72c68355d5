"""The part of the page that compares tuned configs with all alternatives measured in the same runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from autotax.core.conditions import Conditions
from autotax.hardware import Hardware
from autotax.operators.registry import problem_from_dict
from autotax.report import charts, ladder
from autotax.report.charts import Taxed
from autotax.report.formatting import Cell, PageTable, faster, heading, microseconds, table, times, variant_cell, won
from autotax.report.taxes import Document, bsp_us, fastest_us, geometric_mean, taxes, won_back
from autotax.tuner.comparison import TUNED

HEAD = ("problem", "variant", ">us", ">vs BSP", "best alternative", ">vs it", ">bound us", ">of the bound", ">won back")


@dataclass(frozen=True)
class Beside:
    """The comparisons of one machine and operator, as the page's template takes them."""

    anchor: str
    name: str
    means: str
    table: PageTable
    taxed: tuple[Markup, ...]
    ladder: PageTable | None
    ladder_drawing: Markup | None


def peers(compared: Sequence[Document]) -> list[Beside]:
    """The comparisons grouped by machine and operator, in the order of the documents."""
    ordered = sorted(compared, key=_heading)
    groups = [(name, list(group)) for name, group in groupby(ordered, _heading)]
    return [_beside(f"compared-{number}", name, documents) for number, (name, documents) in enumerate(groups, 1)]


def _beside(anchor: str, name: str, documents: Sequence[Document]) -> Beside:
    over_bsp = geometric_mean(_tuned(document).get("speedup_vs_bsp") for document in documents)
    over_peer = geometric_mean(document.get("speedup_vs_best_peer") for document in documents)
    calls = [call for document in documents if (call := _taxed(document))]
    ladders = ladder.of(documents)
    steps = None
    if ladders:
        first, *lines = ladder.table(ladders)
        steps = table([first[0], *(f">{step}" for step in first[1:])], lines)
    return Beside(
        anchor=anchor,
        name=name,
        means=f"geometric means: {faster(over_bsp)}, {faster(over_peer, 'the best alternative')}" if over_bsp else "no ratios",
        table=table(HEAD, map(_line, documents)),
        taxed=tuple(map(Markup, charts.taxed(calls))),
        ladder=steps,
        ladder_drawing=Markup(ladder.plot(ladders)) if ladders else None,
    )


def _heading(document: Document) -> str:
    hardware = Hardware(**document["hardware"])
    defaults = Conditions.usual(hardware.on_gpu).to_dict()
    return heading(problem_from_dict(document["problem"]), hardware, Conditions.from_dict(document.get("conditions") or defaults))


def _tuned(document: Document) -> Document:
    """The row of the tuned config if it was verified."""
    return next((row for row in document["rows"] if row["name"] == TUNED and row["verified"]), {})


def _taxed(document: Document) -> Taxed | None:
    """The taxes of a comparison for the chart; None if one of the figures is unknown."""
    if won_back(document) is None or _beaten(document):
        return None
    work, whole = taxes(document)[0].us, bsp_us(document)
    return Taxed(problem_from_dict(document["problem"]).brief(), work, _tuned(document)["latency_us"], whole or work)


def _beaten(document: Document) -> bool:
    """Whether a row is faster than the bound, which an earlier version knew less well."""
    return fastest_us(document) < (document.get("bound_us") or 0.0)


def _line(document: Document) -> list[str | Cell]:
    tuned, over, beaten = _tuned(document), document.get("speedup_vs_best_peer"), _beaten(document)
    failed = "not verified" + (f": {document['error']}" if document.get("error") else "")
    return [
        problem_from_dict(document["problem"]).brief(),
        variant_cell(tuned["variant"]) if tuned.get("variant") else failed,
        microseconds(tuned.get("latency_us")),
        times(tuned.get("speedup_vs_bsp")),
        document.get("best_peer") or "-",
        Cell(times(over), "loss" if over is not None and over < 1 else ""),
        microseconds(document.get("bound_us")) + (" (beaten)" if beaten else ""),
        "-" if beaten else times(document.get("over_bound")),
        won(None if beaten else won_back(document)),
    ]
