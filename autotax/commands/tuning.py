"""Tuning many problems on one pool of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotax.commands.saying import say
from autotax.options import MachineOptions
from autotax.problem import Problem

if TYPE_CHECKING:
    from autotax.commands.asked import Job
    from autotax.db import Store
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner import Verdict


def tune_all(
    jobs: Sequence[Job], hardware: Hardware, store: Store, where: MachineOptions, *, then_compare: bool
) -> list[Verdict]:
    """All of them, each shown as it comes. Ends early when interrupted."""
    from autotax.api import tune_jobs
    from autotax.report.live import watch

    resumes = dict(jobs)

    def show(verdict: Verdict, runner: LiveRunner) -> None:
        _show(verdict, store, where, resumes[verdict.problem].resume)
        if then_compare and not where.as_json and not verdict.interrupted:
            _compare_verdict(verdict, runner, where)

    return list(tune_jobs(jobs, hardware, store, watch, show))


def _show(verdict: Verdict, store: Store, where: MachineOptions, resumed: bool) -> None:
    from autotax.db.url import shown
    from autotax.report import tables

    where.show(lambda: tables.finalists(verdict))
    if verdict.interrupted:
        again = "run the same command again" if resumed else "run the same command with --resume"
        say(f"interrupted; what was measured is kept in {shown(store.url)}: {again} to go on from there")
    elif verdict.winner is None:
        op = verdict.problem.op
        say(f"nothing could be verified for {verdict.problem}: `autotax trials {op} ...` tells why each trial failed")


def _compare_verdict(verdict: Verdict, runner: LiveRunner, where: MachineOptions) -> None:
    from autotax import tuner
    from autotax.report import tables
    from autotax.tuner.choices import Choice

    if verdict.winner is None or verdict.baseline is None:
        return
    comparison = tuner.compare(
        verdict.problem,
        hardware=verdict.hardware,
        runner=runner,
        tuned=Choice(verdict.winner.measurement.config, "the winner of this run"),
        baseline=Choice(verdict.baseline.config, "the baseline of this run"),
        conditions=verdict.conditions,
    )
    where.show(lambda: tables.comparison(comparison))


def verdict_documents(verdicts: Sequence[Verdict], problems: Sequence[Problem], url: str, *, alone: bool) -> Any:
    """One document for an operator that was named, a list in the order asked for a file or the usual pair."""
    from sqlalchemy import make_url

    from autotax.db.url import public
    from autotax.report import documents

    db = public(make_url(url))
    found = [documents.of_verdict(verdict, db) for verdict in sorted(verdicts, key=lambda v: problems.index(v.problem))]
    return found[0] if alone else found
