"""The commands. Each reads its options, makes one call and prints a table, or one JSON document with `--json`.

Bad input ends a command with exit code 2 and one line on stderr before a rank is started or a database is touched.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import typer

from autotax.commands import fleet_tune
from autotax.commands.asked import CPU_PAIR_TRIALS, GPU_PAIR_TRIALS, jobs_of, missed, problems_of, usual_pair
from autotax.commands.parsing import Command, explained, loads_in, make_app
from autotax.commands.replaying import record, replay
from autotax.commands.saying import Failed, say
from autotax.errors import MachineError, UsageError
from autotax.operators import load, operators
from autotax.operators import of as operator_of
from autotax.options import (
    CompareOptions,
    DeployOptions,
    ExportOptions,
    ImportOptions,
    MachineOptions,
    OutputOptions,
    ProblemOptions,
    ReportOptions,
    SearchOptions,
    ShapesOptions,
    StaleOptions,
    TargetOptions,
    flags,
)

# What needs torch, a database or a table is imported by the command that needs it: `--help` comes at once.

# The commands

def tune(what: ProblemOptions, deployed: DeployOptions, how: SearchOptions, where: MachineOptions) -> int:
    """Find and prove the fastest config, and keep it. Without an operator: the usual pair of this machine, compared."""
    from autotax.commands.tuning import tune_all, verdict_documents

    hardware = where.hardware()
    settings = replace(how.settings(), conditions=deployed.conditions(hardware))
    usual = what.op is None and how.shapes is None and not how.misses
    if how.misses:
        jobs = missed(what, deployed, how, where, hardware, settings)
        if not jobs:
            return _nothing_missed(where)
    else:
        problems = usual_pair(what, hardware) if usual else problems_of(what, how.shapes, hardware)
        jobs = jobs_of(problems, settings, hardware)
    if usual and how.trials is None:
        few = GPU_PAIR_TRIALS if hardware.on_gpu else CPU_PAIR_TRIALS
        jobs = [(problem, replace(own, trials=few)) for problem, own in jobs]
    with where.store(create=True) as store:
        verdicts = tune_all(jobs, hardware, store, where, then_compare=usual)
        problems = [problem for problem, _ in jobs]
        where.document(lambda: verdict_documents(verdicts, problems, store.url, alone=what.op is not None))
    return 0 if len(verdicts) == len(jobs) and all(verdict.winner for verdict in verdicts) else 1


def _nothing_missed(where: MachineOptions) -> int:
    where.document(list)
    saved = "programs save what they ask for in vain by autotax.save_misses(), or with AUTOTAX_MISSES=1"
    return say(f"nothing to tune: the database holds no misses that this machine can tune; {saved}")


def compare(what: ProblemOptions, which: CompareOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Measure the tuned config, BSP and torch's own operator in one interleaved run, of one problem or of a file of them."""
    from autotax.commands.comparisons import compare_and_show
    from autotax.report import documents, tables

    compared, done = compare_and_show(what, which, deployed, where, tables.comparison, lambda _: which.every_variant)
    told = [documents.of_comparison(comparison) for comparison in compared]
    if which.shapes is not None:
        where.show(lambda: tables.means(compared))
    where.document(lambda: told if which.shapes is not None else told[0])
    return 0 if done else 1


def taxes(what: ProblemOptions, of: ShapesOptions, deployed: DeployOptions, where: MachineOptions) -> int:
    """Tell where the time of bulk-synchronous calls goes, and how much of it the tuned config wins back."""
    from autotax.commands.comparisons import compare_and_show
    from autotax.report import documents, tables

    compared, done = compare_and_show(what, of, deployed, where, tables.taxes, lambda problem: bool(operator_of(problem).ladder))
    told = [documents.of_taxes(comparison) for comparison in compared]
    where.document(lambda: told if of.shapes is not None else told[0])
    return 0 if done else 1


def lookup(what: ProblemOptions, deployed: DeployOptions, strictness: StaleOptions, where: MachineOptions) -> int:
    """Tell what the run-time library would use here, and why."""
    from autotax.db.lookup import lookup as look_up
    from autotax.report import documents, tables

    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    answer = look_up(problem, hardware=hardware, db=where.db, conditions=conditions, allow_stale=strictness.allow_stale)
    where.show(lambda: tables.answer(problem, hardware, answer))
    where.document(lambda: documents.of_answer(problem, answer))
    return 0


def trials(what: ProblemOptions, where: MachineOptions) -> int:
    """List the trials of a problem, or of all, failed ones with their reason."""
    from autotax.db.url import shown
    from autotax.report import documents, tables

    if what.op is None and what.given:
        raise UsageError(f"{flags(what.given)} given, but no operator; allowed are {', '.join(operators())}: name one")
    hardware = where.hardware() if what.op or where.backend else None
    problem = what.problem(hardware) if what.op and hardware else None
    with where.store(create=False) as store:
        if not store.exists:
            say(f"there is no database {shown(store.url)} yet; run `autotax tune`")
        found = store.trials(problem)
    if where.backend:
        found = [trial for trial in found if trial.run and trial.run.hardware.backend == where.backend]
    where.show(lambda: tables.trials(problem, found))
    where.document(lambda: documents.of_trials(problem, found))
    return 0


def report(onto: ReportOptions, where: MachineOptions) -> int:
    """Write tables and plots of all winners and trials, and of what `compare --json` printed, on one self-contained page."""
    from autotax.db.url import named, shown
    from autotax.files import write_whole
    from autotax.report import comparison_files as compared
    from autotax.report import documents, tables
    from autotax.report.page import page

    backends = where.backends()
    comparisons = [document for path in onto.compared or [] for document in compared.read(path)]
    with where.store(create=False) as store:
        winners = [winner for winner in store.winners(with_samples=False) if winner.hardware.backend in backends]
        found = [trial for trial in store.trials() if trial.run and trial.run.hardware.backend in backends]
        if not (found or comparisons):
            raise UsageError(f"database {shown(store.url)} holds no trials: tune some, give another --db, or name comparisons")
        write_whole(onto.output, page(named(store.url), datetime.now(UTC), winners, found, comparisons))
    where.show(lambda: tables.reported(onto.output, len(winners), len(found), len(comparisons)))
    where.document(lambda: documents.of_report(onto.output, len(winners), len(found), len(comparisons)))
    return 0


def export(to: ExportOptions, where: MachineOptions) -> int:
    """Write winners to a JSON file, with where, when, by whom and with what each was tuned."""
    from autotax.db.exchange import write
    from autotax.db.url import shown
    from autotax.report import documents, tables

    ops, path, backends = to.operators or list(operators()), to.file, where.backends()
    with where.store(create=False) as store:
        entries = store.entries(ops, backends)
        if not entries:
            raise UsageError(f"database {shown(store.url)} holds no winners of {', '.join(ops)}: tune some, or give another --db")
    write(path, entries, anonymous=to.anonymous)
    where.show(lambda: tables.exported(path, entries))
    where.document(lambda: documents.of_export(path, entries))
    return 0


def import_(source: ImportOptions, where: MachineOptions) -> int:
    """Take in the winners of such a file; of two of one problem the better proven stays."""
    from autotax.db.exchange import read
    from autotax.report import documents, tables

    backends = where.backends()
    entries = [entry for entry in read(source.path) if entry.winner.hardware.backend in backends]
    with where.store(create=True) as store:
        outcomes = store.merge(entries, source.path.name)
    where.show(lambda: tables.imported(source.path, outcomes))
    where.document(lambda: documents.of_import(source.path, outcomes))
    return 0


def compile_(what: ProblemOptions, aim: TargetOptions, form: OutputOptions) -> int:
    """Compile configs for a GPU that is not here, and tell what they would take of it and which fail."""
    from autotax.commands.compiling import compile_all, configs_of
    from autotax.report import documents, tables

    hardware = aim.hardware()
    problem = what.problem(hardware)
    surveyed = compile_all(problem, configs_of(problem, hardware, aim.settings()), hardware)
    form.show(lambda: tables.surveyed(problem, hardware, surveyed))
    form.document(lambda: documents.of_survey(problem, hardware, surveyed))
    return 0 if all(each.status == "ok" for each in surveyed) else 1


def doctor(where: MachineOptions) -> int:
    """Tell what this machine has and lacks, each with the next step."""
    from autotax.doctor import examine, usable
    from autotax.report import documents, tables

    checks = examine(where.backend, where.db)
    where.show(lambda: tables.checks(checks))
    where.document(lambda: documents.of_checks(checks))
    return 0 if usable(checks) else 1


COMMANDS: dict[str, Command] = {
    "tune": tune,
    "compare": compare,
    "taxes": taxes,
    "lookup": lookup,
    "trials": trials,
    "report": report,
    "export": export,
    "import": import_,
    "compile": compile_,
    "doctor": doctor,
    "replay": replay,
    "record": record,
    "fleet tune": fleet_tune.tune,
}
ABOUT = "Finds, proves and remembers the fastest fine-grained distributed kernels for your GPUs."


# The way in, and the way out when something is wrong


def heed_signals() -> None:
    """Who is asked to end (a batch system's time is up, a terminal is closed) ends as after Ctrl-C: what a tuner was measuring
    is not to blame. What is ignored, as under nohup, stays so.
    """
    for asked in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(asked) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(asked, signal.default_int_handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 bad input."""
    heed_signals()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for name in loads_in(given):
            load(name)
        about = {"name": "autotax", "help": ABOUT, "add_completion": False, "pretty_exceptions_enable": False}
        app = make_app(COMMANDS, {"fleet": fleet_tune.ABOUT}, **about)
        return typer.main.get_command(app).main(args=given, prog_name="autotax", standalone_mode=False) or 0
    except UsageError as error:
        return say(str(error), 2)
    except (Failed, MachineError) as error:
        return say(str(error), 1)
    except (typer.Abort, KeyboardInterrupt):
        return say("interrupted", 1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return say("no space is left where the answer goes: make room, or send it elsewhere", 1)
    except Exception as error:
        # Typer's own complaints. Some versions of Typer bring their own click: only the method tells them apart.
        if type(error).__module__.partition(".")[0] in ("optuna", "sqlalchemy"):
            return say(f"the database failed ({type(error).__name__}: {error}): run the same command again to go on", 1)
        if not hasattr(error, "format_message"):
            raise
        return say(explained(error), 2)
