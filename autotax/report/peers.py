"""The part of the page that sets tuned configs beside everything else that was measured in the same runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from autotax.conditions import Conditions
from autotax.hardware import Hardware
from autotax.operators.registry import problem_from_dict
from autotax.report import ladder, plots
from autotax.report.bounds import geometric_mean
from autotax.report.comparison_files import Document
from autotax.report.html import Cell, table
from autotax.report.taxes import bsp_us, taxes, won_back
from autotax.report.wording import faster, heading, microseconds, times, won
from autotax.tuner.compare import TUNED

HEAD = ("problem", "variant", ">us", ">vs BSP", "best alternative", ">vs it", ">bound us", ">of the bound", ">won back")


def peers(compared: Sequence[Document]) -> str:
    """A table for each machine and operator, in the order of the documents, and the ladder of Flash Decode."""
    parts = ["<h2>Compared, interleaved in one run a problem</h2>"]
    for name, group in groupby(sorted(compared, key=_heading), _heading):
        documents = list(group)
        over_bsp = geometric_mean(_tuned(document).get("speedup_vs_bsp") for document in documents)
        over_peer = geometric_mean(document.get("speedup_vs_best_peer") for document in documents)
        means = f"geometric means: {faster(over_bsp)}, {faster(over_peer, 'the best alternative')}"
        parts += [f"<h3>{escape(name)}</h3>", table(HEAD, map(_line, documents)), f"<p>{escape(means)}</p>"]
        if drawn := [call for document in documents if (call := _taxed(document))]:
            parts += ["<p>What bulk-synchronous calls take:</p>", plots.taxed(drawn)]
        if ladders := ladder.of(documents):
            first, *lines = ladder.table(ladders)
            parts += ["<p>What each step won over the one before it:</p>"]
            parts += [table([first[0], *(f">{step}" for step in first[1:])], lines), ladder.plot(ladders)]
    return "\n".join(parts)


def _heading(document: Document) -> str:
    hardware = Hardware(**document["hardware"])
    usual = Conditions.usual(hardware.on_gpu).to_dict()
    return heading(problem_from_dict(document["problem"]), hardware, Conditions.from_dict(document.get("conditions") or usual))


def _tuned(document: Document) -> Document:
    """The row of the tuned config if it was verified."""
    return next((row for row in document["rows"] if row["name"] == TUNED and row["verified"]), {})


def _taxed(document: Document) -> tuple[str, float, float, float] | None:
    """The name of a problem, and the microseconds of the work, of the tuned config and of BSP; None if one is not known."""
    if won_back(document) is None:
        return None
    work, whole = taxes(document)[0].us, bsp_us(document)
    return problem_from_dict(document["problem"]).brief(), work, _tuned(document)["latency_us"], whole or work


def _line(document: Document) -> list[Cell]:
    tuned, over = _tuned(document), document.get("speedup_vs_best_peer")
    failed = "not verified" + (f": {document['error']}" if document.get("error") else "")
    return [
        problem_from_dict(document["problem"]).brief(),
        tuned.get("variant") or failed,
        microseconds(tuned.get("latency_us")),
        times(tuned.get("speedup_vs_bsp")),
        document.get("best_peer") or "-",
        (times(over), "loss") if over is not None and over < 1 else times(over),
        microseconds(document.get("bound_us")),
        times(document.get("over_bound")),
        won(won_back(document)),
    ]
