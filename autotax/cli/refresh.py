"""`autotax refresh`: proving winners again on one pool of ranks."""

from __future__ import annotations

from autotax.cli.messages import say
from autotax.cli.options import DeployOptions, MachineOptions, OperatorsOptions, ProblemOptions, RefreshOptions, seconds_of
from autotax.cli.problem_selection import problems_of


def refresh_all(of: OperatorsOptions, which: RefreshOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Proves them one by one, each shown as it comes. Exit code 1 if one could not be proven for want of a verified config."""
    from autotax.api import refresh_on, stale_here
    from autotax.cli.tune import closing, public_url
    from autotax.report import documents, tables
    from autotax.report.progress_display import TuningScreen

    hardware = where.hardware()
    conditions = deployed.conditions(hardware) if deployed.given else None
    problems = problems_of(ProblemOptions(), which.shapes, hardware) if which.shapes else None
    with where.store(create=True) as store:
        stale = stale_here(store, hardware, problems, conditions, everything=which.everything)
        stale = [each for each in stale if each.problem.op in of.operators]
        done = []
        watch = TuningScreen(len(stale), soak=which.soak, finalists_only=True)
        for found in refresh_on(
            stale, hardware, store, watch, soak=which.soak, timeout_s=seconds_of(which.timeout)
        ):
            done.append(found)
            say(f"{len(done)} of {len(stale)}: {found.verdict.problem}: {tables.refreshed_outcome(found)}")
        ok = len(done) == len(stale) and all(found.verdict.winner for found in done)
        if stale:
            where.show(lambda: tables.refreshed(done, hardware))
        if left := len(stale) - len(done):
            say(f"{left} of {len(stale)} problems are left: run `autotax refresh` again")
        if not stale:
            say("nothing to prove: no winner of these devices is stale; --all proves winners again that hold")
        elif not where.as_json:
            closing(store.url, f"autotax winners{where.again}")
        where.document(lambda: [documents.of_refreshed(found, public_url(store.url)) for found in done], ok=ok)
    return 0 if ok else 1
