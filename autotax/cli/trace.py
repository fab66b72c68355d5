"""`autotax trace`: a timeline of one call, as a file and as a short table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autotax.cli.messages import say
from autotax.cli.options import DeployOptions, MachineOptions, ProblemOptions, check_variants, flag, word
from autotax.cli.problem_selection import check
from autotax.core.files import refuse_unwritable


@dataclass(frozen=True)
class TraceOptions:
    """The config to trace, and the file of the timeline."""

    PANEL: ClassVar[str] = "Trace"

    variant: Annotated[
        str | None,
        word("Trace the best known config of this variant. Default: the config that a look-up answers.", metavar="NAME"),
    ] = None
    # The name --output is taken: some operators have an option of that name.
    file: Annotated[Path, typer.Option("--file", "-o", help="The file to write.", metavar="FILE.json")] = Path(
        "autotax-trace.json"
    )
    kernels: Annotated[
        bool,
        flag("--kernels", "Show kernels and copies alone. Default on NVIDIA: also where their programs wait, which slows them."),
    ] = False

    def check(self) -> None:
        """Raises UsageError for an unknown variant, and for a file that cannot be written."""
        check_variants([self.variant] if self.variant is not None else None)
        refuse_unwritable(self.file)


def trace(what: ProblemOptions, which: TraceOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Write a timeline of one call, rank by rank, for Perfetto or chrome://tracing."""
    what.require()
    from autotax.core.files import write_whole
    from autotax.report import documents, tables
    from autotax.runner import trace
    from autotax.spaces import space_for
    from autotax.tuner.comparison import best_of, trials_here

    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    check([problem], hardware)
    config = None
    if which.variant:
        space = space_for(problem, hardware).only([which.variant])
        with where.store(create=False) as store:
            choice = best_of(which.variant, trials_here(store, space, conditions), space)
        config = choice.config
        say(f"tracing {config}: {choice.source}")
    timeline = trace.trace(
        problem, config=config, conditions=conditions, db=where.db, backend=where.backend, programs=not which.kernels
    )
    write_whole(which.file, json.dumps(trace.chrome(timeline), indent=1))
    where.show(lambda: tables.timeline(timeline))
    if not where.as_json:
        say(f"written to {which.file}; next: open it at https://ui.perfetto.dev or chrome://tracing")
    where.document(lambda: [documents.of_timeline(timeline)], about={"file": str(which.file)})
    return 0
