"""Tuning many problems on one pool of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotax.commands.ranks import ranks
from autotax.commands.saying import say
from autotax.options import Where
from autotax.problem import Problem

if TYPE_CHECKING:
    from autotax.commands.asked import Job
    from autotax.db import Store
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner import Settings, Verdict


def tune_all(jobs: Sequence[Job], hardware: Hardware, store: Store, where: Where, *, then_compare: bool) -> list[Verdict]:
    """One pool of ranks for all problems of a world size. Ends early when interrupted."""
    verdicts: list[Verdict] = []
    for world_size in dict.fromkeys(problem.world_size for problem, _ in jobs):
        with ranks(hardware, world_size, jobs[0][1].seed) as runner:
            for problem, settings in (job for job in jobs if job[0].world_size == world_size):
                verdict = _tune_one(problem, settings, hardware, runner, store, where)
                verdicts.append(verdict)
                if verdict.winner:
                    store.forget_miss(problem, hardware, verdict.conditions)
                if verdict.interrupted:
                    return verdicts
                if then_compare and not where.as_json:
                    _compare_verdict(verdict, runner, where)
    return verdicts


def _tune_one(
    problem: Problem, settings: Settings, hardware: Hardware, runner: LiveRunner, store: Store, where: Where
) -> Verdict:
    from autotax import tuner
    from autotax.db.url import shown
    from autotax.report import tables
    from autotax.report.live import watch

    with watch(problem, hardware) as listener:
        verdict = tuner.tune(
            problem,
            hardware=hardware,
            runner=runner,
            store=store,
            environment=runner.environment,
            settings=settings,
            listener=listener,
        )
    where.show(lambda: tables.finalists(verdict))
    if verdict.interrupted:
        again = "run the same command again" if settings.resume else "run the same command with --resume"
        say(f"interrupted; what was measured is kept in {shown(store.url)}: {again} to go on from there")
    elif verdict.winner is None:
        say(f"nothing could be verified for {problem}: `autotax trials {problem.op} ...` tells why each trial failed")
    return verdict


def _compare_verdict(verdict: Verdict, runner: LiveRunner, where: Where) -> None:
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

    from autotax.report import documents

    db = make_url(url).render_as_string(hide_password=True)
    found = [documents.of_verdict(verdict, db) for verdict in sorted(verdicts, key=lambda v: problems.index(v.problem))]
    return found[0] if alone else found
