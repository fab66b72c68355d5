"""One self-contained page of HTML: winners, how they were found, and comparisons. No script, nothing from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from itertools import groupby

from autotax.conditions import Conditions
from autotax.db.records import TrialRecord, WinnerRecord
from autotax.hardware import Hardware
from autotax.problem import Problem
from autotax.report import plots
from autotax.report.bounds import geometric_mean
from autotax.report.comparison_files import Document
from autotax.report.html import Cell, document, table
from autotax.report.peers import peers
from autotax.report.wording import counts, faster, heading, interval, microseconds, parameters, times
from autotax.sources import variant_digest

REASON = 200
"""Characters of why a trial failed."""


Key = tuple[str, str, Problem]
"""Heading, hardware digest, problem."""


@dataclass(frozen=True)
class TunedProblem:
    """What is known of one problem on one machine under one set of conditions, which the heading tells."""

    heading: str
    problem: Problem
    winner: WinnerRecord | None
    trials: tuple[TrialRecord, ...]


def page(
    source: str, made: datetime, winners: Sequence[WinnerRecord], trials: Sequence[TrialRecord], compared: Sequence[Document]
) -> str:
    """`source` is the database as it may be shown, `compared` what `autotax compare --json` printed."""
    told = f"{len(winners)} winners and {len(trials)} trials of {source}, {len(compared)} comparisons; {made:%Y-%m-%d %H:%M %Z}"
    body = [f"<h1>autotax</h1><p class=dim>{escape(told)}</p>"]
    for name, group in groupby(_tuned(winners, trials), lambda tuned: tuned.heading):
        there = list(group)
        body += [f"<h2>{escape(name)}</h2>", _winners(there), *map(_search, there)]
    return document("autotax", [*body, peers(compared) if compared else ""])


def _tuned(winners: Iterable[WinnerRecord], trials: Iterable[TrialRecord]) -> list[TunedProblem]:
    """By heading and sizes. Of several winners of one problem one is of the sources that are here; else the last one is shown."""
    best: dict[Key, WinnerRecord] = {}
    for winner in sorted(winners, key=lambda winner: not _stale(winner)):
        best[_key(winner.problem, winner.hardware, winner.conditions)] = winner
    tried: dict[Key, list[TrialRecord]] = {key: [] for key in best}
    for trial in trials:
        if run := trial.run:
            tried.setdefault(_key(run.problem, run.hardware, Conditions.from_dict(trial.conditions)), []).append(trial)
    return [TunedProblem(key[0], key[2], best.get(key), tuple(tried[key])) for key in sorted(tried, key=_order)]


def _key(problem: Problem, hardware: Hardware, conditions: Conditions) -> Key:
    return heading(problem, hardware, conditions), hardware.digest, problem


def _order(key: Key) -> tuple[str, str, list[tuple[str, str]]]:
    """By sizes, numbers as numbers."""
    return key[0], key[1], [(name, str(value).rjust(12)) for name, value in key[2].to_dict().items()]


def _stale(winner: WinnerRecord) -> bool:
    return winner.kernel_digest != variant_digest(winner.problem.op, winner.config.variant)


def _winners(tuned: Sequence[TunedProblem]) -> str:
    """A plot and a table of what won; what nothing won is there too."""
    there = [(each.problem.brief(), each.winner) for each in tuned if each.winner]
    means = f"geometric mean: {faster(geometric_mean(winner.speedup for _, winner in there))}"
    head = ["problem", "winner", ">us", ">BSP us", ">vs BSP [95 %]", ">tuned", ""]
    drawn = plots.speedups(there) + f"<p>{means}</p>" if there else ""
    return drawn + table(head, map(_winner_line, tuned))


def _winner_line(tuned: TunedProblem) -> list[Cell]:
    winner = tuned.winner
    if winner is None:
        return [tuned.problem.brief(), "nothing yet", "-", "-", "-", "-", ""]
    over = f"{times(winner.speedup)} {interval((winner.interval_low, winner.interval_high))}"
    marks = ["a tie"] * winner.tie + ["stale: measured with other kernel sources"] * _stale(winner)
    return [
        tuned.problem.brief(),
        f"{winner.config.variant} {parameters(winner.config)}".removesuffix(" -"),
        microseconds(winner.latency_us),
        microseconds(winner.baseline_us),
        (over, "loss") if winner.speedup < 1 else over,
        f"{winner.created_at:%Y-%m-%d}" if winner.created_at else "-",
        ", ".join(marks),
    ]


def _search(tuned: TunedProblem) -> str:
    """How the trials of a problem went, folded."""
    trials = [trial for trial in tuned.trials if trial.conditions.get("stage") != "finalists"]
    if not trials:
        return ""
    told = f"{tuned.problem.brief()}: {len(trials)} trials, {counts(Counter(trial.status for trial in trials))}"
    lines = [_variant_line(variant, trials) for variant in sorted({trial.config.variant for trial in trials})]
    failed = Counter((t.status, " ".join((t.error or "").split())[:REASON]) for t in trials if not t.verified)
    parts = [plots.search(trials), table(["variant", ">trials", ">verified", ">best us", "with"], lines)]
    if failed:
        parts.append(table([">trials", "status", "because"], [[str(n), *outcome] for outcome, n in failed.most_common()]))
    return f"<details><summary>{escape(told)}</summary>{''.join(parts)}</details>"


def _variant_line(variant: str, trials: Sequence[TrialRecord]) -> list[Cell]:
    own = [trial for trial in trials if trial.config.variant == variant]
    timed = [(trial.latency_us, trial) for trial in own if trial.verified and trial.latency_us]
    us, best = min(timed, key=lambda pair: pair[0], default=(None, None))
    return [variant, str(len(own)), str(len(timed)), microseconds(us), parameters(best.config) if best else ""]
