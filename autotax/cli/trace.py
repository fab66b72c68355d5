"""`autotax trace`: a timeline of one call, as a file and as a short table."""

from __future__ import annotations

import json

from autotax.cli.messages import say
from autotax.cli.options import DeployOptions, MachineOptions, ProblemOptions, TraceOptions
from autotax.cli.problem_selection import check


def trace_call(what: ProblemOptions, which: TraceOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Traces the config that a look-up answers, or the best known one of a variant."""
    from autotax.core.files import write_whole
    from autotax.report import documents, tables
    from autotax.runner import trace
    from autotax.spaces import space_for
    from autotax.tuner.compare import best_of, trials_here

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
