"""Tuning many problems on one pool of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotax.cli.messages import say
from autotax.cli.options import MachineOptions
from autotax.cli.problem_selection import warn_of_slow_ranks
from autotax.core.conditions import Conditions
from autotax.core.problem import Problem

if TYPE_CHECKING:
    from autotax.cli.problem_selection import Job
    from autotax.db import Store
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner import Verdict


def tune_all(
    jobs: Sequence[Job], hardware: Hardware, store: Store, where: MachineOptions, *, then_compare: bool
) -> list[Verdict]:
    """All of them, each shown as it comes, and a summary at the end. Ends early when interrupted."""
    from autotax.api import tune_jobs
    from autotax.report import tables
    from autotax.report.progress_display import TuningScreen

    resumes = dict(jobs)
    for problem, settings in jobs:
        warn_of_slow_ranks(problem, hardware, settings.trials)

    def show(verdict: Verdict, runner: LiveRunner) -> None:
        _show(verdict, store, where, resumes[verdict.problem].resume)
        if then_compare and not where.as_json and not verdict.interrupted:
            _compare_verdict(verdict, runner, where)

    watch = TuningScreen(len(jobs), soak=jobs[0][1].soak if jobs else None)
    verdicts = list(tune_jobs(jobs, hardware, store, watch, show))
    if not where.as_json and verdicts and not verdicts[-1].interrupted:
        if len(jobs) > 1:
            where.show(lambda: tables.summary(verdicts))
        proven = [verdict for verdict in verdicts if verdict.winner]
        if len(jobs) == 1 and proven:
            (verdict,) = proven
            asked = command_line(verdict.problem) + flags_of(verdict.conditions, hardware)
            closing(store.url, f"autotax lookup {asked}{where.again} --pin")
        else:
            closing(store.url, f"autotax {'winners' if proven else 'trials'}{where.again}")
    return verdicts


def closing(url: str, following: str) -> None:
    """The last line of a command that stored something: where, and what to do next."""
    from autotax.db.url import shown

    say(f"stored in {shown(url)}; next: {following}")


def flags_of(conditions: Conditions, hardware: Hardware) -> str:
    """Conditions as they are given to a command, those that are not the usual ones: ` --mode eager`."""
    usual = Conditions.usual(hardware.on_gpu).to_dict()
    other = {name.removesuffix("_us"): value for name, value in conditions.to_dict().items() if value != usual[name]}
    return "".join(f" --{name} {value}" for name, value in other.items())


def command_line(problem: Problem) -> str:
    """A problem as it is given to a command: `all-gather-gemm --m 512 ...`."""
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in problem.to_dict().items() if name != "op")
    return f"{problem.op} {given}"


def _show(verdict: Verdict, store: Store, where: MachineOptions, resumed: bool) -> None:
    from autotax.db.url import shown
    from autotax.report import tables

    where.show(lambda: tables.finalists(verdict))
    if verdict.interrupted:
        again = "run the same command again" if resumed else "run the same command with --resume"
        say(f"interrupted; the finished trials are stored in {shown(store.url)}: {again} to go on from there")
    elif verdict.winner is None:
        reasons = f"autotax trials {command_line(verdict.problem)}{where.again}"
        say(f"nothing could be verified for {verdict.problem}: `{reasons}` shows why each trial failed")


def _compare_verdict(verdict: Verdict, runner: LiveRunner, where: MachineOptions) -> None:
    from autotax import tuner
    from autotax.report import tables
    from autotax.tuner.compare import Choice

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


def verdict_documents(verdicts: Sequence[Verdict], problems: Sequence[Problem], url: str) -> list[Any]:
    """A document for each verdict, in the order asked for."""
    from autotax.report import documents

    ordered = sorted(verdicts, key=lambda verdict: problems.index(verdict.problem))
    return [documents.of_verdict(verdict, public_url(url)) for verdict in ordered]


def public_url(url: str) -> str:
    """A database without its secrets."""
    from sqlalchemy import make_url

    from autotax.db.url import public

    return public(make_url(url))
