"""One self-contained page of HTML: winners, how they were found, and comparisons. No script, nothing from elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup, escape

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import summary
from autotax.core.problem import Problem
from autotax.db.records import TrialRecord, WinnerRecord, same_kernel
from autotax.hardware import Hardware
from autotax.operators.registry import problem_from_dict
from autotax.report import charts, ladder
from autotax.report.charts import Taxed
from autotax.report.formatting import colour_of, counts, faster, heading, interval, microseconds, number, parameters, times, won
from autotax.report.taxes import Document, bsp_us, fastest_us, geometric_mean, taxes, won_back
from autotax.tuner.comparison import TUNED

REASON = 200
"""Most characters of the error of a trial."""
CAPTION = (
    "Filled dots are verified trials, hollow diamonds pruned ones, crosses failed ones. The line is the best so far. "
    "Triangles are beyond the end of the scale. The scale is widest in the shaded band, within 5 % of the best. "
    "Point at a mark in the band to read its parameters."
)
GLOSSARY = (
    ("BSP", "Bulk-synchronous: a library collective and a library product or kernel in turn. Everything is compared with it."),
    ("Problem", "An operator with its sizes, type and number of ranks. A rank is one process with one GPU."),
    ("Variant", "One way to write an operator's kernel. A config is a variant with a value for each of its parameters."),
    ("Trial", "One config, measured and verified against a float32 reference, or failed with a reason."),
    ("Pruned", "A trial whose measurement ended early, because it was clearly slower than the best."),
    ("Winner", "The config that was faster than BSP with confidence when both were measured in turn. Otherwise BSP."),
    ("95 % interval", "The confidence interval of the speed-up. A tie is a winner whose interval holds 1."),
    ("Stale", "A winner that was measured with other kernel sources. Run `autotax refresh` to prove it again."),
    ("Best alternative", "The fastest measured row that is not autotax."),
    ("Bound", "The least time that the links, the memory or the product alone allow. Beaten: a row was faster, so it is none."),
    ("Won back", "The share of BSP's time beyond the work itself that the tuned config saves."),
)

@dataclass(frozen=True)
class Cell:
    """A text, the CSS class of its cell, the colour of the dot before it, and what is folded below it."""

    text: str
    mark: str = ""
    colour: str = ""
    folded: str = ""


def table(head: Sequence[str], lines: Iterable[Sequence[str | Cell]]) -> dict[str, Any]:
    """A table for the template. Columns whose names begin with `>` are figures. Plain texts become cells without marks."""
    return {"head": head, "lines": [[cell if isinstance(cell, Cell) else Cell(cell) for cell in line] for line in lines]}


def variant_cell(variant: str, config: Config | None = None) -> Cell:
    """A variant with the dot of its colour, and the parameters of its config, folded, if one is given."""
    return Cell(variant, colour=colour_of(variant), folded=parameters(config) if config and config.params else "")


Key = tuple[str, str, Problem]
"""Heading, hardware digest, problem."""


@dataclass(frozen=True)
class TunedProblem:
    """The winner and the trials of one problem. The heading names the machine and the conditions."""

    heading: str
    problem: Problem
    winner: WinnerRecord | None
    trials: tuple[TrialRecord, ...]

    @property
    def searched(self) -> list[TrialRecord]:
        """The trials of the search, without finalists."""
        return [trial for trial in self.trials if trial.conditions.get("stage") != "finalists"]


def page(
    source: str, made: datetime, winners: Sequence[WinnerRecord], trials: Sequence[TrialRecord], compared: Sequence[Document]
) -> str:
    """`source` is the name of the database without secrets. `compared` is the output of `autotax compare --json`."""
    tuned = _tuned(winners, trials)
    shown = [entry.winner for entry in tuned if entry.winner]
    groups = [list(group) for _, group in groupby(tuned, lambda entry: entry.heading)]
    beside = _compared(compared)
    summary = f"{number(len(shown), 'winner')} and {number(len(trials), 'trial')} of {source}, "
    summary += f"{number(len(compared), 'comparison')}; {made:%Y-%m-%d %H:%M %Z}"
    names = {trial.config.variant for trial in trials} | {winner.config.variant for winner in shown}
    rendered = _template().render(
        summary=summary,
        headline=" ".join([_headline(tuned), *([f"Compared: {beside[0]['means']}."] if len(beside) == 1 else [])]),
        variants=[{"name": name, "colour": colour_of(name)} for name in sorted(names)],
        sections=[_section(f"tuned-{at}", entries) for at, entries in enumerate(groups, 1)],
        compared=beside,
        glossary=GLOSSARY,
    )
    charts.RENDERER.close()
    return rendered


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("autotax.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["coded"] = _coded
    return environment.get_template("report.html.j2")


def _coded(text: str) -> Markup:
    """The escaped text with <code> in place of backticks."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _tuned(winners: Iterable[WinnerRecord], trials: Iterable[TrialRecord]) -> list[TunedProblem]:
    """The tuned problems, sorted by heading and sizes. If a problem has several winners, the one of the current sources is shown,
    else the last.
    """
    best: dict[Key, WinnerRecord] = {}
    for winner in sorted(winners, key=lambda winner: not _stale(winner)):
        best[_key(winner.problem, winner.hardware, winner.conditions)] = winner
    tried: dict[Key, list[TrialRecord]] = {key: [] for key in best}
    for trial in trials:
        if run := trial.run:
            tried.setdefault(_key(run.problem, run.hardware, trial.deployed), []).append(trial)
    return [TunedProblem(key[0], key[2], best.get(key), tuple(tried[key])) for key in sorted(tried, key=_order)]


def _key(problem: Problem, hardware: Hardware, conditions: Conditions) -> Key:
    return heading(problem, hardware, conditions), hardware.digest, problem


def _order(key: Key) -> tuple[str, str, list[tuple[str, str]]]:
    """Sort key: heading, then sizes, compared as numbers."""
    return key[0], key[1], [(name, str(value).rjust(12)) for name, value in key[2].to_dict().items()]


def _stale(winner: WinnerRecord) -> bool:
    return not same_kernel(winner)


def _headline(tuned: Sequence[TunedProblem]) -> str:
    """The page in one sentence."""
    winners = [entry.winner for entry in tuned if entry.winner]
    if not winners:
        return "No problem has a winner yet."
    ahead = sum(winner.speedup > 1 and not winner.tie for winner in winners)
    mean = faster(geometric_mean(winner.speedup for winner in winners))
    return f"{ahead} of {len(tuned)} problems beat BSP. Geometric mean of the winners: {mean}{_spread(winners)}."


def _spread(winners: Sequence[WinnerRecord]) -> str:
    ratios = [winner.speedup for winner in winners]
    return f", from {times(min(ratios))} to {times(max(ratios))}" if len(ratios) > 1 else ""


def _section(anchor: str, tuned: Sequence[TunedProblem]) -> dict[str, Any]:
    """A chart and a table of the winners, and of the problems without a winner. Then each search, folded."""
    winners = [entry.winner for entry in tuned if entry.winner]
    pairs = [
        charts.Ratio(
            winner.problem.brief(), winner.config.variant, winner.speedup, winner.interval_low, winner.interval_high,
            winner.latency_us, winner.baseline_us,
        )
        for winner in winners
    ]  # fmt: skip
    means = f"geometric mean: {faster(geometric_mean(winner.speedup for winner in winners))}{_spread(winners)}"
    return {
        "anchor": anchor,
        "name": tuned[0].heading,
        "summary": f"{number(len(tuned), 'problem')}, {means}" if pairs else "no winner yet",
        "speedups": Markup(charts.speedups(pairs)) if pairs else "",
        "table": table(["problem", "winner", ">us", ">BSP us", ">vs BSP [95 %]", ">tuned", ""], map(_winner_line, tuned)),
        "searches": [_search(entry) for entry in tuned if entry.searched],
    }


def _winner_line(tuned: TunedProblem) -> list[str | Cell]:
    winner = tuned.winner
    if winner is None:
        return [tuned.problem.brief(), "nothing yet", "-", "-", "-", "-", ""]
    over = f"{times(winner.speedup)} {interval((winner.interval_low, winner.interval_high))}"
    marks = ["a tie"] * winner.tie + ["stale"] * _stale(winner)
    return [
        tuned.problem.brief(),
        variant_cell(winner.config.variant, winner.config),
        microseconds(winner.latency_us),
        microseconds(winner.baseline_us),
        Cell(over, "loss" if winner.speedup < 1 else ""),
        f"{winner.created_at:%Y-%m-%d}" if winner.created_at else "-",
        ", ".join(marks),
    ]


def _search(tuned: TunedProblem) -> dict[str, Any]:
    trials = tuned.searched
    lines = [_variant_line(variant, trials) for variant in sorted({trial.config.variant for trial in trials})]
    statuses = counts(Counter(trial.status for trial in trials))
    failed = Counter((t.status, summary(t.error or "")[:REASON]) for t in trials if not t.verified)
    reasons = [[str(count), *outcome] for outcome, count in failed.most_common()]
    return {
        "summary": f"{tuned.problem.brief()}: {number(len(trials), 'trial')}, {statuses}",
        "drawing": Markup(charts.search(trials)),
        "caption": CAPTION,
        "variants": table(["variant", ">trials", ">verified", ">best of the search, us", "with"], lines),
        "failed": table([">trials", "status", "because"], reasons) if reasons else None,
    }


def _variant_line(variant: str, trials: Sequence[TrialRecord]) -> list[str | Cell]:
    own = [trial for trial in trials if trial.config.variant == variant]
    timed = [(trial.latency_us, trial) for trial in own if trial.verified and trial.latency_us]
    us, best = min(timed, key=lambda pair: pair[0], default=(None, None))
    figures = str(len(own)), str(len(timed)), microseconds(us)
    return [variant_cell(variant), *figures, parameters(best.config) if best else ""]


# The part that compares tuned configs with all alternatives measured in the same runs.

HEAD = ("problem", "variant", ">us", ">vs BSP", "best alternative", ">vs it", ">bound us", ">of the bound", ">won back")


def _compared(compared: Sequence[Document]) -> list[dict[str, Any]]:
    """The comparisons grouped by machine and operator, in the order of the documents."""
    groups = groupby(sorted(compared, key=_of_heading), _of_heading)
    return [_beside(f"compared-{at}", name, list(documents)) for at, (name, documents) in enumerate(groups, 1)]


def _beside(anchor: str, name: str, documents: Sequence[Document]) -> dict[str, Any]:
    over_bsp = geometric_mean(_tuned_row(document).get("speedup_vs_bsp") for document in documents)
    over_peer = geometric_mean(document.get("speedup_vs_best_peer") for document in documents)
    calls = [call for document in documents if (call := _taxed(document))]
    ladders = ladder.of(documents)
    first, *lines = ladder.table(ladders)
    return {
        "anchor": anchor,
        "name": name,
        "means": f"geometric means: {faster(over_bsp)}, {faster(over_peer, 'the best alternative')}" if over_bsp else "no ratios",
        "table": table(HEAD, map(_compared_line, documents)),
        "taxed": [Markup(drawing) for drawing in charts.taxed(calls)],
        "ladder": table([first[0], *(f">{step}" for step in first[1:])], lines) if ladders else None,
        "ladder_drawing": Markup(ladder.plot(ladders)) if ladders else None,
    }


def _of_heading(document: Document) -> str:
    hardware = Hardware(**document["hardware"])
    defaults = Conditions.usual(hardware.on_gpu).to_dict()
    return heading(problem_from_dict(document["problem"]), hardware, Conditions.from_dict(document.get("conditions") or defaults))


def _tuned_row(document: Document) -> Document:
    return next((row for row in document["rows"] if row["name"] == TUNED and row["verified"]), {})


def _taxed(document: Document) -> Taxed | None:
    """The taxes of a comparison for the chart; None if one of the figures is unknown."""
    if won_back(document) is None or _beaten(document):
        return None
    work, whole = taxes(document)[0].us, bsp_us(document)
    return Taxed(problem_from_dict(document["problem"]).brief(), work, _tuned_row(document)["latency_us"], whole or work)


def _beaten(document: Document) -> bool:
    """Whether a row is faster than the bound, which an earlier version knew less well."""
    return fastest_us(document) < (document.get("bound_us") or 0.0)


def _compared_line(document: Document) -> list[str | Cell]:
    tuned, over, beaten = _tuned_row(document), document.get("speedup_vs_best_peer"), _beaten(document)
    failed = "not verified" + (f": {document['error']}" if document.get("error") else "")
    return [
        problem_from_dict(document["problem"]).brief(),
        variant_cell(tuned["variant"]) if tuned.get("variant") else failed,
        microseconds(tuned.get("latency_us")),
        times(tuned.get("speedup_vs_bsp")),
        document.get("best_peer") or "-",
        Cell(times(over), "loss" if over is not None and over < 1 else ""),
        "-" if beaten else microseconds(document.get("bound_us")),
        "-" if beaten else times(document.get("over_bound")),
        won(None if beaten else won_back(document)),
    ]
