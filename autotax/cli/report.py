"""`autotax report`: one HTML page of all winners, trials and comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autotax.cli.messages import say
from autotax.cli.options import MachineOptions, require_readable
from autotax.core.errors import UsageError


@dataclass(frozen=True)
class ReportOptions:
    """Comparisons to show beside the database, and the file of the page."""

    PANEL: ClassVar[str] = "Report"

    compared: Annotated[
        list[Path] | None,
        typer.Argument(metavar="COMPARE.json...", help="Files that `autotax compare --json` printed.", show_default=False),
    ] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE.html")] = Path(
        "autotax-report.html"
    )

    def check(self) -> None:
        """Raises UsageError for a file that cannot be read."""
        for path in self.compared or []:
            require_readable(path, "give another")


def report(onto: ReportOptions, where: MachineOptions) -> int:
    """Write one HTML page with tables and plots of all winners, trials and comparisons."""
    from autotax.core.files import write_whole
    from autotax.db.url import named, shown
    from autotax.report import documents, tables
    from autotax.report import taxes as compared

    backends = where.backends()
    comparisons = [document for path in onto.compared or [] for document in compared.read(path)]
    with where.store(create=False) as store:
        winners = [winner for winner in store.winners(with_samples=False) if winner.hardware.backend in backends]
        trials = [trial for trial in store.trials() if trial.run and trial.run.hardware.backend in backends]
        if not (trials or comparisons):
            raise UsageError(f"database {shown(store.url)} holds no trials: tune some, give another --db, or name comparisons")
        from autotax.report import page  # imports Altair, which takes long

        write_whole(onto.output, page.page(named(store.url), datetime.now(UTC), winners, trials, comparisons))
    if undrawn := page.charts.RENDERER.undrawn:
        say(f"notice: {len(undrawn)} plots are left out ({undrawn[0]}): raise the limit of memory, and write the page again")
    where.show(lambda: tables.reported(onto.output, len(winners), len(trials), len(comparisons)))
    where.document(lambda: [documents.of_report(onto.output, len(winners), len(trials), len(comparisons))])
    return 0
