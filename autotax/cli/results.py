"""The commands that look at results: lookup, winners, trials, report, trace and status."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from autotax.cli.messages import say
from autotax.cli.options import (
    DeployOptions,
    ListOptions,
    MachineOptions,
    OperatorsOptions,
    OutputOptions,
    ProblemOptions,
    check_variants,
    flag,
    flags,
    number,
    one_of,
    require_readable,
    word,
)  # fmt: skip
from autotax.core.errors import UsageError
from autotax.core.files import refuse_unwritable, write_whole
from autotax.core.settings import TRIAL_STATUSES
from autotax.operators import operators

if TYPE_CHECKING:
    from rich.console import Group

    from autotax.db import Store, TrialRecord
    from autotax.engines.plugin import Published


ONE_VARIANT = "give one of these as --variant"


@dataclass(frozen=True)
class LookupOptions:
    """The winners that may answer a look-up, and the form of the answer."""

    PANEL: ClassVar[str] = "Answer"

    allow_stale: Annotated[
        bool, flag("--allow-stale", "Let a winner answer that was measured elsewhere or with other software.")
    ] = False
    pin: Annotated[bool, flag("--pin", "Print only the config, as Python to paste into `config=`.")] = False


def lookup(what: ProblemOptions, deployed: DeployOptions, how: LookupOptions, where: MachineOptions) -> int:
    """Show the config that the run-time library would use here, and why."""
    what.require()
    if how.pin and where.as_json:
        raise UsageError("--pin and --json given; allowed is one of them: take the other out")
    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    from autotax.db.lookup import lookup as look_up
    from autotax.report import documents, tables

    answer = look_up(problem, hardware=hardware, db=where.db, conditions=conditions, allow_stale=how.allow_stale)
    if how.pin and answer.match == "fallback":
        say(f"no winner, so this is the bulk-synchronous baseline: {answer.reason}")
    table = documents.pinned(answer) if how.pin else lambda: tables.answer(problem, hardware, answer)
    return where.answer(table, lambda: [documents.of_answer(problem, answer)])


SORTS = ("number", "latency", "variant", "status")


@dataclass(frozen=True)
class TrialOptions(ListOptions):
    """The selection and the order of trials."""

    PANEL: ClassVar[str] = "List"

    top: Annotated[int | None, number("List only the first INT trials of each stage of each run. Default: all.")] = None
    sort: Annotated[
        str | None, word(f"Order: {', '.join(SORTS)}. Default: latency with --top, else number.", metavar="KEY")
    ] = None
    status: Annotated[
        str | None, word("List only trials with this status, for instance ok or wrong_result. Default: all.", metavar="NAME")
    ] = None
    variant: Annotated[str | None, word("List only trials of this variant. Default: all.", metavar="NAME")] = None
    errors: Annotated[bool, flag("--errors", "Print the errors of failed trials whole, with their tracebacks.")] = False

    def check(self) -> None:
        if self.top is not None and self.top < 1:
            raise UsageError(f"top is {self.top}; it must be at least 1: give another --top")
        one_of("sort", self.sort, SORTS)
        one_of("status", self.status, TRIAL_STATUSES)
        check_variants([self.variant] if self.variant is not None else None, ONE_VARIANT)
        if self.csv and self.errors:
            raise UsageError("--csv and --errors given; allowed is one of them: take the other out")


def winners(of: OperatorsOptions, form: ListOptions, where: MachineOptions) -> int:
    """List the winners in the database, one line each, and whether each holds here."""
    _one_form(form, where)
    from autotax.db.records import Place, differences, same_devices
    from autotax.hardware import detect
    from autotax.report import documents, tables
    from autotax.software import environment

    backends, chosen = where.backends(), " ".join(of.ops or ())
    try:
        hardware = where.hardware()
    except UsageError:  # winners of another machine's backend are listed, too; none of them holds here
        hardware = detect("cpu")
    with where.store(create=False) as store:
        records = [winner for winner in store.winners(with_samples=False) if winner.problem.op in of.operators]
        records = [winner for winner in records if winner.hardware.backend in backends]
        filters = {"OP": chosen, "--backend": where.backend}
        _tell_hidden(store, "winners", len(records), filters)
    here = environment(hardware.backend)
    why = [", ".join(differences(winner, winner.place, Place(hardware, here, winner.conditions))) for winner in records]
    pairs = list(zip(records, why, strict=True))
    table = _csv(documents.flat_winner(*pair) for pair in pairs) if form.csv else lambda: tables.winners(records, why, chosen)
    where.answer(table, lambda: [documents.of_winner(*pair) for pair in pairs])
    holding = {(winner.problem, winner.conditions) for winner, stale in pairs if not stale}
    mine = [winner for winner in records if same_devices(winner.hardware, hardware)]
    if any((winner.problem, winner.conditions) not in holding for winner in mine) and not where.as_json:
        say("winners that do not hold because of other software can be proven again: run `autotax refresh`")
    return 0


def trials(what: ProblemOptions, which: TrialOptions, where: MachineOptions) -> int:
    """List the trials of a problem, or of all problems; failed ones with the reason."""
    _one_form(which, where)
    if what.op is None and what.given:
        raise UsageError(f"{flags(what.given)} given, but no operator; allowed are {', '.join(operators())}: name one")
    hardware = where.hardware() if what.op or where.backend else None
    problem = what.problem(hardware) if what.op and hardware else None
    from autotax.report import documents, tables

    with where.store(create=False) as store:
        records = store.trials(problem, status=which.status)
        if where.backend:
            records = [trial for trial in records if trial.run and trial.run.hardware.backend == where.backend]
        if which.variant:
            records = [trial for trial in records if trial.config.variant == which.variant]
        filters = {"the problem": what.op, "--status": which.status, "--variant": which.variant, "--backend": where.backend}
        _tell_hidden(store, "trials", len(records), filters)
    records = _chosen([trial for trial in records if trial.error] if which.errors else records, which)
    if which.errors and not records and not where.as_json:
        say("no such trial failed")
    if which.errors:
        table: Callable[[], Group] | str | None = _errors(records) or None
    else:
        table = _csv(map(documents.flat_trial, records)) if which.csv else lambda: tables.trials(problem, records)
    about = {"problem": problem.to_dict()} if problem else {}
    return where.answer(table, lambda: [documents.of_trial(trial) for trial in records], about=about)


def _tell_hidden(store: Store, kind: str, shown: int, filters: Mapping[str, str | None]) -> None:
    """Says that there is no database, or how many of its records an empty list leaves out, and how to see them. Records of
    operators that are not loaded are counted for every list.
    """
    from autotax.db.url import shown as url_shown

    if not store.exists:
        say(f"there is no database {url_shown(store.url)} yet: run `autotax tune`")
    counts = store.counts_by_operator(kind)
    unknown = {op: count for op, count in counts.items() if op not in operators()}
    filtered = " and ".join(name for name, value in filters.items() if value)
    if hidden := 0 if shown else sum(counts.values()) - sum(unknown.values()):
        others = f"{hidden} other {kind}" if hidden > 1 else f"1 other {kind.removesuffix('s')}"
        say(f"the database holds {others}: leave {filtered} out to see {'them' if hidden > 1 else 'it'}")
    if unknown and not any(filters.values()):
        names = ", ".join(f"{count} of {op}" for op, count in unknown.items())
        say(f"{kind} of operators that are not loaded are hidden ({names}): --load the modules that declare them")


def _one_form(form: ListOptions, where: MachineOptions) -> None:
    if form.csv and where.as_json:
        raise UsageError("--csv and --json given; allowed is one of them: take the other out")


def _chosen(records: Sequence[TrialRecord], which: TrialOptions) -> list[TrialRecord]:
    """The trials by run and stage, in the requested order, and at most the requested number of each run and stage."""
    sort = which.sort or ("latency" if which.top else "number")
    stages: dict[tuple[int, bool], list[TrialRecord]] = {}
    for trial in records:
        stages.setdefault((trial.run_id or 0, "stage" not in trial.conditions), []).append(trial)

    def key(trial: TrialRecord) -> tuple[Any, ...]:
        latency = math.inf if trial.latency_us is None or not trial.verified else trial.latency_us
        by = {
            "number": (trial.id or 0,),
            "latency": (latency,),
            "variant": (trial.config.variant, latency),
            "status": (TRIAL_STATUSES.index(trial.status), latency),
        }
        return by[sort]

    return [trial for stage in sorted(stages) for trial in sorted(stages[stage], key=key)[: which.top]]


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """CSV of rows with equal keys; the keys are the first line. No line break at the end."""
    text, rows = io.StringIO(), list(rows)
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _errors(records: Sequence[TrialRecord]) -> str:
    """Each error of failed trials whole, behind the first trial that had it and the number of the others."""
    by_error: dict[str, list[str]] = {}
    for trial in records:
        by_error.setdefault(f"{trial.status}: {trial.error}", []).append(f"trial {trial.number}: {trial.config}")
    more = {error: f", and {len(failed) - 1} more with the same error" * (len(failed) > 1) for error, failed in by_error.items()}
    return "\n".join(f"{failed[0]}{more[error]}\n{error}\n" for error, failed in by_error.items())


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
        for path in self.compared or []:
            require_readable(path, "give another")


def report(onto: ReportOptions, where: MachineOptions) -> int:
    """Write one HTML page with tables and plots of all winners, trials and comparisons."""
    from rich.text import Text

    from autotax.db.url import named, shown
    from autotax.report import formatting
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
    counts = {"winners": len(winners), "trials": len(trials), "comparisons": len(comparisons)}
    shown_counts = [formatting.number(count, name.removesuffix("s")) for name, count in counts.items()]
    text = f"{onto.output} shows {', '.join(shown_counts[:2])} and {shown_counts[2]}"
    return where.answer(lambda: Text(text), lambda: [{"file": str(onto.output), **counts}])


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
        check_variants([self.variant] if self.variant is not None else None, ONE_VARIANT)
        refuse_unwritable(self.file)


def trace(what: ProblemOptions, which: TraceOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Write a timeline of one call, rank by rank, for Perfetto or chrome://tracing."""
    what.require()
    from autotax.hardware import check_problems
    from autotax.report import documents, tables
    from autotax.runner import trace
    from autotax.spaces import space_for
    from autotax.tuner.comparison import best_of, trials_here

    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    check_problems([problem], hardware)
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
    about = {"file": str(which.file)}
    code = where.answer(lambda: tables.timeline(timeline), lambda: [documents.of_timeline(timeline)], about=about)
    if not where.as_json:
        say(f"written to {which.file}; next: open it at https://ui.perfetto.dev or chrome://tracing")
    return code


@dataclass(frozen=True)
class StatusOptions:
    """The process to look at."""

    PANEL: ClassVar[str] = "Process"

    pid: Annotated[
        int | None, typer.Argument(metavar="PID", help="A process of a server. Default: all of yours.", show_default=False)
    ] = None

    def check(self) -> None:
        if self.pid is not None and self.pid < 1:
            raise UsageError(f"PID is {self.pid}; it must be the number of a process: give another, or none for all")


def status(of: StatusOptions, form: OutputOptions) -> int:
    """Show which calls of a running server tuned kernels ran, and why others did not."""
    from msgspec import to_builtins

    from autotax.engines.plugin import published, summary

    servers = published(of.pid)
    form.document(lambda: [to_builtins(process) for process in servers], ok=bool(servers))
    if not servers:
        whose = f"process {of.pid} publishes" if of.pid else "no process of yours publishes"
        no = " no" * bool(of.pid)
        return say(f"{whose}{no} counts: ranks of vLLM, SGLang and torchtitan do once autotax's plugin is loaded there", 1)
    form.show(lambda: _tables(servers))
    for process in servers:
        say(f"process {process.pid}: {summary(process)}")
    return 0


def _tables(servers: list[Published]) -> Group:
    from rich.console import Group

    from autotax.engines.plugin import CAPTURED
    from autotax.report.formatting import columns, grid

    tables = []
    for process in servers:
        table = grid(f"{process.framework}, process {process.pid}", CAPTURED)
        columns(table, "calls>", "operator", "runs", "why not ours")
        for call in process.calls:
            table.add_row(str(call.calls), f"{call.operator}{call.call}", call.runs, call.reason)
        tables.append(table)
    return Group(*tables)
