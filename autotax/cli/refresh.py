"""`autotax refresh`: winners verified and measured against BSP again after an upgrade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from autotax.cli.messages import closing, public_url, say
from autotax.cli.options import (
    DeployOptions,
    LimitedOptions,
    MachineOptions,
    OperatorsOptions,
    ProblemOptions,
    flag,
    number,
    seconds_of,
    word,
)
from autotax.cli.problem_selection import problems_of
from autotax.core.errors import UsageError
from autotax.core.settings import Settings


@dataclass(frozen=True)
class RefreshOptions(LimitedOptions):
    """The winners to prove again, and limits."""

    PANEL: ClassVar[str] = "Refresh"

    everything: Annotated[bool, flag("--all", "Include winners that still hold.")] = False
    soak: Annotated[
        int | None,
        number("Replays that each config must pass with delayed ranks. 0: none. Default: 2000 on GPUs, 20 on CPU ranks."),
    ] = None
    each: Annotated[
        str | None, word("Prove only the best former winner of a problem, for at most this time. Default: all.", metavar="TIME")
    ] = None

    def check(self) -> None:
        super().check()
        Settings(soak=self.soak)
        if seconds_of(self.each, "each") == 0:
            raise UsageError("each is 0 s; it must be positive: give another --each")


def refresh(of: OperatorsOptions, which: RefreshOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Prove winners again after an upgrade: verified and measured against BSP, seconds for each problem.

    Candidates are your winners, the shipped ones that were measured on devices like these with other software, and what others
    wrote that can be served. Winners whose kernels compile to equal machine code here hold without a measurement.
    """
    from autotax.api import hold_equal, refresh_on, stale_here
    from autotax.report import documents, tables
    from autotax.report.progress_display import TuningScreen
    from autotax.tuner.tuning import TimeLimit

    limit = TimeLimit(seconds_of(which.timeout))
    hardware = where.hardware()
    conditions = deployed.conditions(hardware) if deployed.given else None
    problems = problems_of(ProblemOptions(), which.shapes, hardware) if which.shapes else None
    with where.store(create=True) as store:
        stale = stale_here(store, hardware, problems, conditions, everything=which.everything)
        stale = [winners for winners in stale if winners.problem.op in of.operators]
        some = bool(stale)
        if not which.everything:
            stale = hold_equal(stale, hardware, store, limit, say)
        done = []
        watch = TuningScreen(len(stale), soak=which.soak, finalists_only=True)
        for refreshed in refresh_on(
            stale, hardware, store, watch, soak=which.soak, limit=limit, each_s=seconds_of(which.each, "each"),
        ):
            done.append(refreshed)
            say(f"{len(done)} of {len(stale)}: {refreshed.verdict.problem}: {tables.refreshed_outcome(refreshed)}")
        ok = len(done) == len(stale) and all(refreshed.verdict.winner for refreshed in done)
        if stale:
            where.show(lambda: tables.refreshed(done, hardware))
        if left := len(stale) - len(done):
            say(f"{left} of {len(stale)} problems are left: run `autotax refresh` again")
        if not some:
            say("nothing to prove: no winner of these devices is stale; --all proves winners again that hold")
        elif not where.as_json:
            closing(store.url, f"autotax winners{where.again}")
        where.document(lambda: [documents.of_refreshed(refreshed, public_url(store.url)) for refreshed in done], ok=ok)
    return 0 if ok else 1
