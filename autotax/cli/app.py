"""The commands. Each reads its options, makes one call and prints a table, or one JSON document with `--json`.

Bad input ends a command with exit code 2 and one line on stderr before a rank is started or a database is touched.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autotax import __version__
from autotax.cli import fleet, options
from autotax.cli.messages import Failed, say
from autotax.cli.options import (
    CompareOptions,
    DeployOptions,
    ExportOptions,
    ImportOptions,
    ListOptions,
    LookupOptions,
    MachineOptions,
    ModelOptions,
    OperatorsOptions,
    OutputOptions,
    ProblemOptions,
    RefreshOptions,
    ReportOptions,
    SearchOptions,
    ShapesOptions,
    TargetOptions,
    TraceOptions,
    TrialOptions,
    operator_named,
)
from autotax.cli.parsing import Command, explained, loads_in, make_app
from autotax.cli.problem_selection import CPU_PAIR_TRIALS, GPU_PAIR_TRIALS, jobs_of, missed, problems_of, usual_pair
from autotax.cli.replay import record, replay
from autotax.cli.streams import CLOSED, LOST, deliver, drain, forgiving_stderr, hold_the_first_three
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.operators import load
from autotax.operators import of as operator_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.cli.problem_selection import Job
    from autotax.hardware import Hardware
    from autotax.tuner.compare import Comparison

# Commands import torch, the database and tables themselves, so that `--help` and errors come at once.

# The commands


def tune(what: ProblemOptions, of: ModelOptions, deployed: DeployOptions, how: SearchOptions, where: MachineOptions) -> int:
    """Find the fastest config, prove it and store it.

    Without an operator: tune and compare one example problem of each operator, sized for this machine.
    """
    from autotax.cli.tune import tune_all, verdict_documents

    usual = what.op is None and how.shapes is None and not how.misses and of.model is None
    if usual:
        what.only_world_size("without an operator")
    asked = how.settings()
    hardware = where.hardware()
    settings = replace(asked, conditions=deployed.conditions(hardware))
    layers: dict[Problem, str] = {}
    notes: tuple[str, ...] = ()
    if of.model is not None:
        model, layers = of.problems(what, how, hardware)
        notes = model.notes
        jobs = jobs_of(list(layers), settings, hardware)
    elif how.misses:
        jobs = missed(what, deployed, how, where, hardware, settings)
        if not jobs:
            return _nothing_missed(where)
    else:
        problems = usual_pair(what, hardware) if usual else problems_of(what, how.shapes, hardware)
        jobs = jobs_of(problems, settings, hardware)
    if usual and how.trials is None:
        few = GPU_PAIR_TRIALS if hardware.on_gpu else CPU_PAIR_TRIALS
        jobs = [(problem, replace(own, trials=few)) for problem, own in jobs]
    if of.dry_run:
        return _planned(jobs, layers, notes, hardware, where)
    for note in notes:
        say(f"notice: {of.model}: {note}")
    with where.store(create=True) as store:
        verdicts = tune_all(jobs, hardware, store, where, then_compare=usual)
        ok = len(verdicts) == len(jobs) and all(verdict.winner for verdict in verdicts)
        where.document(lambda: verdict_documents(verdicts, [problem for problem, _ in jobs], store.url), ok=ok)
    return 0 if ok else 1


def _planned(
    jobs: Sequence[Job], layers: dict[Problem, str], notes: Sequence[str], hardware: Hardware, where: MachineOptions
) -> int:
    from autotax.cli import plan
    from autotax.report import tables

    found = plan.plan(jobs, layers, hardware, where)
    where.show(lambda: tables.planned(found, hardware, notes))
    about = {"expected_s": round(sum(each.expected_s for each in found), 1), "notes": list(notes)}
    where.document(lambda: [plan.document(each) for each in found], about=about)
    return 0


def _nothing_missed(where: MachineOptions) -> int:
    where.document(list)
    saved = "programs save failed look-ups by autotax.save_misses(), or with AUTOTAX_MISSES=1"
    return say(f"nothing to tune: the database holds no failed look-ups that this machine can tune; {saved}")


def compare(what: ProblemOptions, which: CompareOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Measure the tuned config, BSP and the alternatives, interleaved in one run."""
    from autotax.cli.compare import compare_and_show

    def table(comparison: Comparison) -> RenderableType:
        from autotax.report import tables

        return tables.comparison(comparison)

    compared, done = compare_and_show(what, which, deployed, where, table, lambda _: which.every_variant)
    from autotax.report import documents, tables

    if which.shapes is not None:
        where.show(lambda: tables.means(compared))
    where.document(lambda: [documents.of_comparison(comparison) for comparison in compared], ok=done)
    return 0 if done else 1


def taxes(what: ProblemOptions, of: ShapesOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Show where the time of bulk-synchronous calls goes, and how much of it the tuned config wins back."""
    from autotax.cli.compare import compare_and_show

    def table(comparison: Comparison) -> RenderableType:
        from autotax.report import tables

        return tables.taxes(comparison)

    compared, done = compare_and_show(what, of, deployed, where, table, lambda problem: bool(operator_of(problem).ladder))
    from autotax.report import documents

    where.document(lambda: [documents.of_taxes(comparison) for comparison in compared], ok=done)
    return 0 if done else 1


def refresh(of: OperatorsOptions, which: RefreshOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Prove winners again after an upgrade: verified and measured against BSP, seconds for each problem.

    Candidates are your winners and the shipped ones that were measured on devices like these with other software.
    """
    from autotax.cli.refresh import refresh_all

    return refresh_all(of, which, deployed, where)


def lookup(what: ProblemOptions, deployed: DeployOptions, how: LookupOptions, where: MachineOptions) -> int:
    """Show the config that the run-time library would use here, and why."""
    what.require()
    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    from autotax.db.lookup import lookup as look_up
    from autotax.report import documents, tables

    answer = look_up(problem, hardware=hardware, db=where.db, conditions=conditions, allow_stale=how.allow_stale)
    if how.pin:
        where.plain(documents.pinned(answer))
    else:
        where.show(lambda: tables.answer(problem, hardware, answer))
    where.document(lambda: [documents.of_answer(problem, answer)])
    return 0


def winners(of: OperatorsOptions, form: ListOptions, where: MachineOptions) -> int:
    """List the winners in the database, one line each, and whether each holds here."""
    from autotax.cli.lists import list_winners

    return list_winners(of, form, where)


def trials(what: ProblemOptions, which: TrialOptions, where: MachineOptions) -> int:
    """List the trials of a problem, or of all problems; failed ones with the reason."""
    from autotax.cli.lists import list_trials

    return list_trials(what, which, where)


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
        found = [trial for trial in store.trials() if trial.run and trial.run.hardware.backend in backends]
        if not (found or comparisons):
            raise UsageError(f"database {shown(store.url)} holds no trials: tune some, give another --db, or name comparisons")
        from autotax.report.page import page  # and Altair

        write_whole(onto.output, page(named(store.url), datetime.now(UTC), winners, found, comparisons))
    where.show(lambda: tables.reported(onto.output, len(winners), len(found), len(comparisons)))
    where.document(lambda: [documents.of_report(onto.output, len(winners), len(found), len(comparisons))])
    return 0


def trace(what: ProblemOptions, which: TraceOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Write a timeline of one call, rank by rank, for Perfetto or chrome://tracing."""
    what.require()
    from autotax.cli.trace import trace_call

    return trace_call(what, which, deployed, where)


def export(to: ExportOptions, where: MachineOptions) -> int:
    """Write winners to a JSON file, with where, when, by whom and with which software each was tuned."""
    from autotax.db.file_format import write
    from autotax.db.url import shown
    from autotax.report import documents, tables

    ops, path, backends = to.operators, to.file, where.backends()
    with where.store(create=False) as store:
        entries = store.entries(ops, backends)
        if not entries:
            raise UsageError(f"database {shown(store.url)} holds no winners of {', '.join(ops)}: tune some, or give another --db")
    write(path, entries, anonymous=to.anonymous)
    where.show(lambda: tables.exported(path, entries))
    where.document(lambda: documents.of_entries(entries), about={"file": str(path)})
    return 0


def import_(source: ImportOptions, where: MachineOptions) -> int:
    """Merge the winners of an exported file into the database. On conflict the better proven winner stays."""
    from autotax.db.file_format import read
    from autotax.report import documents, tables

    backends = where.backends()
    entries = [entry for entry in read(source.path) if entry.winner.hardware.backend in backends]
    with where.store(create=True) as store:
        outcomes = store.merge(entries, source.path.name)
    where.show(lambda: tables.imported(source.path, outcomes))
    where.document(lambda: documents.of_import(outcomes), about={"file": str(source.path)})
    return 0


def compile_(what: ProblemOptions, aim: TargetOptions, form: OutputOptions) -> int:
    """Compile configs for a GPU that is not here: resources, spills and failures of each."""
    what.require()
    from autotax.cli.compile import compile_all, configs_of
    from autotax.report import documents, tables

    hardware = aim.hardware()
    problem = what.problem(hardware)
    surveyed = compile_all(problem, configs_of(problem, hardware, aim.settings()), hardware)
    form.show(lambda: tables.surveyed(problem, hardware, surveyed))
    ok = all(each.status == "ok" for each in surveyed)
    about = {"problem": problem.to_dict(), "target": hardware.target}
    form.document(lambda: documents.of_survey(surveyed), ok=ok, about=about)
    return 0 if ok else 1


def doctor(where: MachineOptions) -> int:
    """Check this machine: what it has, what it lacks, and the next step for each."""
    from autotax.doctor import examine, usable
    from autotax.report import documents, tables

    checks = examine(where.backend, where.db)
    where.show(lambda: tables.checks(checks))
    where.document(lambda: documents.of_checks(checks), ok=usable(checks))
    return 0 if usable(checks) else 1


TUNING, RESULTS, SHARING, CHECKING = "Tune and measure", "Look at results", "Share results", "Check"
COMMANDS: dict[str, Command] = {
    "tune": Command(tune, TUNING, [
            "tune PROBLEM",
            "tune --shapes shapes.toml --trials 100",
            "tune --model config.json --tp 8 --tokens 1,16,64...8192 --dry-run",
        ]),
    "compare": Command(compare, TUNING, ["compare PROBLEM", "compare --shapes shapes.toml --json > compare.json"]),
    "taxes": Command(taxes, TUNING, ["taxes PROBLEM"]),
    "refresh": Command(refresh, TUNING, ["refresh", "refresh all-gather-gemm --all"]),
    "fleet tune": Command(fleet.tune, TUNING, ["fleet tune --on slurm --hosts 4 --shapes shapes.toml --db URL"]),
    "lookup": Command(lookup, RESULTS, ["lookup PROBLEM", "lookup PROBLEM --pin"]),
    "winners": Command(winners, RESULTS, ["winners", "winners flash-decode --csv > winners.csv"]),
    "trials": Command(trials, RESULTS, ["trials PROBLEM --top 5", "trials --status wrong_result"]),
    "report": Command(report, RESULTS, ["report compare.json --output report.html"]),
    "trace": Command(trace, RESULTS, ["trace PROBLEM --file trace.json"]),
    "export": Command(export, SHARING, ["export --output winners.json"]),
    "import": Command(import_, SHARING, ["import winners.json"]),
    "compile": Command(compile_, CHECKING, ["compile PROBLEM --target hip:gfx942"]),
    "doctor": Command(doctor, CHECKING, ["doctor"]),
    "replay": Command(replay, CHECKING, ["replay landscapes.json.gz --op flash-decode"]),
    "record": Command(record, CHECKING, ["record PROBLEM --file landscapes.json.gz"]),
}
ABOUT = "Finds, proves and remembers the fastest fine-grained distributed kernels for your GPUs."


# The way in, and the way out when something is wrong


INTERRUPTED = 130
"""What Typer from 0.29 on makes of KeyboardInterrupt; no command of ours ends so."""


def heed_signals() -> None:
    """Makes SIGTERM and SIGHUP (a batch system's time limit, a closed terminal) end the command as Ctrl-C does.

    The trial in flight is then not blamed. Ignored signals stay ignored, as under nohup.
    """
    for asked in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asked) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(asked, signal.default_int_handler)


def make(given: Sequence[str]) -> typer.Typer:
    """The commands for a command line: the help of one that names an operator lists that operator's options alone."""
    about = {"name": "autotax", "help": ABOUT, "pretty_exceptions_enable": False}
    typed = os.environ.get("COMP_WORDS", "").split()  # of a shell that completes
    return make_app(COMMANDS, {"fleet": fleet.ABOUT}, __version__, operator_named([*given, *typed]), **about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed or interrupted, 2 bad input."""
    heed_signals()
    hold_the_first_three()
    with forgiving_stderr():
        try:
            return _checked(list(sys.argv[1:] if arguments is None else arguments))
        except KeyboardInterrupt:
            return say("interrupted", 1)


def _checked(given: list[str]) -> int:
    """Runs one command after checking that stdout is open and the working directory exists."""
    if sys.stdout is None:
        return say(CLOSED, 1)
    try:
        Path.cwd()
    except OSError as error:
        return say(f"the working directory is not there any more ({error.strerror}): change to another one", 1)
    try:
        code = _run(given)
        deliver()
        return code
    except OSError as error:
        if error.errno not in LOST:
            raise
        drain(sys.stdout)
        return say(LOST[error.errno], 1)


def _run(given: list[str]) -> int:
    options.command = next((argument for argument in given if not argument.startswith("-")), "")

    def end(message: str, code: int) -> int:
        if "--json" in given:
            options.print_document({"ok": False, "about": {}, "results": [], "error": {"code": code, "message": message}})
        return say(message, code)

    try:
        for name in loads_in(given):
            load(name)
        code = typer.main.get_command(make(given)).main(args=given, prog_name="autotax", standalone_mode=False) or 0
        return end("interrupted", 1) if code == INTERRUPTED else code
    except UsageError as error:
        return end(str(error), 2)
    except (Failed, MachineError) as error:
        return end(str(error), 1)
    except typer.Abort:
        return end("interrupted", 1)
    except SystemExit as ended:  # so the parser ends where nobody reads, without a word
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        raise
    except OSError:
        raise
    except Exception as error:
        # Typer's own errors. Some versions of Typer bring their own click: only the method tells them apart.
        if type(error).__module__.partition(".")[0] in ("optuna", "sqlalchemy"):
            return end(f"the database failed ({type(error).__name__}: {error}): run the same command again to go on", 1)
        if not hasattr(error, "format_message"):
            raise
        return end(explained(error), 2)
