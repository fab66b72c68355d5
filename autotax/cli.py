"""The commands. Each reads its options, makes one call and prints a table, or one JSON document with `--json`.

Bad input ends a command with exit code 2 and one line on stderr before a rank is started or a database is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from autotax.config import Config
from autotax.errors import MachineError, UsageError
from autotax.options import As, From, How, Strictness, To, What, Where, flags, read_shapes
from autotax.problem import OPERATORS, AllGatherGemm, FlashDecode, Problem, with_world_size

# What needs torch, a database or a table is imported by the command that needs it: `--help` comes at once.
if TYPE_CHECKING:
    from autotax.conditions import Conditions
    from autotax.db import Store
    from autotax.db.lookup import Answer
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner import Settings, Verdict

    Job = tuple[Problem, Settings]

GPU_PAIR = (AllGatherGemm(512, 7168, 8192), FlashDecode(1, 64, 8, 128, 32768))
CPU_PAIR = (AllGatherGemm(64, 96, 64, "fp32"), FlashDecode(2, 8, 2, 32, 128, "fp32"))
GPU_PAIR_TRIALS, CPU_PAIR_TRIALS = 60, 10

app = typer.Typer(
    name="autotax",
    help="Finds, proves and remembers the fastest fine-grained All-Gather + GEMM and Flash Decode for your GPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Failed(Exception):
    """The command could not do its work, though its input was good; exit code 1. The message is one line."""


def _command(function: Callable[..., int]) -> Callable[..., int]:
    """Makes a command of a function that takes groups of options; Typer is shown the options themselves."""
    groups = {name: group for name, group in get_type_hints(function).items() if name != "return"}
    hints: dict[str, Any] = {}
    for group in groups.values():
        hints |= get_type_hints(group, include_extras=True)
    defaults = {field.name: field.default for group in groups.values() for field in fields(group)}

    def run(**given: Any) -> int:
        filled = {name: group(**{field.name: given[field.name] for field in fields(group)}) for name, group in groups.items()}
        try:
            return function(**filled)
        except KeyboardInterrupt:
            raise Failed("interrupted; what was under way is not kept") from None

    run.__doc__ = function.__doc__
    run.__annotations__ = hints
    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name]) for name in hints]
    )
    app.command(function.__name__.rstrip("_"))(run)
    return function


# The commands


@_command
def tune(what: What, deployed: As, how: How, where: Where) -> int:
    """Find and prove the fastest config, and keep it. Without an operator: the usual pair of this machine, compared."""
    hardware = where.hardware()
    settings = replace(how.settings(), conditions=deployed.conditions(hardware))
    if how.misses:
        jobs = _missed(what, deployed, how, where, hardware, settings)
        if not jobs:
            return _nothing_missed(where)
    else:
        jobs = [(problem, settings) for problem in _problems(what, how, hardware)]
        _check([problem for problem, _ in jobs], hardware, settings.variants)
    usual = what.op is None and how.shapes is None and not how.misses
    if usual and how.trials is None:
        few = GPU_PAIR_TRIALS if hardware.on_gpu else CPU_PAIR_TRIALS
        jobs = [(problem, replace(settings, trials=few)) for problem, _ in jobs]
    with where.store(create=True) as store:
        verdicts = _tune_all(jobs, hardware, store, where, then_compare=usual)
        problems = [problem for problem, _ in jobs]
        where.document(lambda: _documents(verdicts, problems, store.url, alone=what.op is not None))
    return 0 if len(verdicts) == len(jobs) and all(verdict.winner for verdict in verdicts) else 1


@_command
def compare(what: What, deployed: As, where: Where) -> int:
    """Measure the tuned config, BSP and torch's own operator in one interleaved run."""
    from autotax.db.lookup import lookup
    from autotax.report import documents, tables
    from autotax.tuner import compare as measure

    hardware = where.hardware()
    conditions = deployed.conditions(hardware)
    problem = what.problem(hardware)
    _check([problem], hardware)
    answer = lookup(problem, hardware=hardware, db=where.db, conditions=conditions)
    if answer.match == "fallback":
        _say(f"nothing tuned to compare, BSP stands in for it: {answer.reason}")
    config, baseline = _plain(answer), _baseline(problem, hardware, answer, conditions, where)
    with _ranks(hardware, problem.world_size) as runner:
        rows = measure(problem, hardware=hardware, runner=runner, config=config, baseline=baseline, conditions=conditions)
    for notice in dict.fromkeys(notice for row in rows for notice in row.measurement.notices):
        _say(f"notice: {notice}")
    where.show(lambda: tables.comparison(problem, hardware, rows, conditions))
    where.document(lambda: documents.of_comparison(problem, hardware, answer, rows, conditions))
    return 0 if any(row.measurement.verified for row in rows) else 1


@_command
def lookup(what: What, deployed: As, strictness: Strictness, where: Where) -> int:
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


@_command
def trials(what: What, where: Where) -> int:
    """List the trials of a problem, or of all, failed ones with their reason."""
    from autotax.db.url import shown
    from autotax.report import documents, tables

    if what.op is None and what.given:
        raise UsageError(f"{flags(what.given)} given, but no operator; allowed are {', '.join(OPERATORS)}: name one")
    hardware = where.hardware() if what.op or where.backend else None
    problem = what.problem(hardware) if what.op and hardware else None
    with where.store(create=False) as store:
        if not store.exists:
            _say(f"there is no database {shown(store.url)} yet; run `autotax tune`")
        found = store.trials(problem)
    if where.backend:
        found = [trial for trial in found if trial.run and trial.run.hardware.backend == where.backend]
    where.show(lambda: tables.trials(problem, found))
    where.document(lambda: documents.of_trials(problem, found))
    return 0


@_command
def export(to: To, where: Where) -> int:
    """Write winners to a JSON file, with where, when, by whom and with what each was tuned."""
    from autotax.db.exchange import write
    from autotax.db.url import shown
    from autotax.report import documents, tables

    ops, path, backends = to.operators or list(OPERATORS), to.file, where.backends()
    with where.store(create=False) as store:
        entries = store.entries(ops, backends)
        if not entries:
            raise UsageError(f"database {shown(store.url)} holds no winners of {', '.join(ops)}: tune some, or give another --db")
    write(path, entries, anonymous=to.anonymous)
    where.show(lambda: tables.exported(path, entries))
    where.document(lambda: documents.of_export(path, entries))
    return 0


@_command
def import_(source: From, where: Where) -> int:
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


@_command
def doctor(where: Where) -> int:
    """Tell what this machine has and lacks, each with the next step."""
    from autotax.doctor import examine, usable
    from autotax.report import documents, tables

    checks = examine(where.backend, where.db)
    where.show(lambda: tables.checks(checks))
    where.document(lambda: documents.of_checks(checks))
    return 0 if usable(checks) else 1


# Tuning


def _tune_all(
    jobs: Sequence[Job], hardware: Hardware, store: Store, where: Where, *, then_compare: bool
) -> list[Verdict]:
    """One pool of ranks for all problems of a world size. Ends early when interrupted."""
    verdicts: list[Verdict] = []
    for world_size in dict.fromkeys(problem.world_size for problem, _ in jobs):
        with _ranks(hardware, world_size, jobs[0][1].seed) as runner:
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
        _say(f"interrupted; what was measured is kept in {shown(store.url)}: {again} to go on from there")
    elif verdict.winner is None:
        _say(f"nothing could be verified for {problem}: `autotax trials {problem.op} ...` tells why each trial failed")
    return verdict


def _compare_verdict(verdict: Verdict, runner: LiveRunner, where: Where) -> None:
    from autotax import tuner
    from autotax.report import tables

    if verdict.winner is None or verdict.baseline is None:
        return
    problem, hardware = verdict.problem, verdict.hardware
    config, baseline = verdict.winner.measurement.config, verdict.baseline.config
    conditions = verdict.conditions
    rows = tuner.compare(
        problem, hardware=hardware, runner=runner, config=config, baseline=baseline, conditions=conditions
    )
    where.show(lambda: tables.comparison(problem, hardware, rows, conditions))


def _documents(verdicts: Sequence[Verdict], problems: Sequence[Problem], url: str, *, alone: bool) -> Any:
    """One document for an operator that was named, a list in the order asked for a file or the usual pair."""
    from sqlalchemy import make_url

    from autotax.report import documents

    db = make_url(url).render_as_string(hide_password=True)
    found = [documents.of_verdict(verdict, db) for verdict in sorted(verdicts, key=lambda v: problems.index(v.problem))]
    return found[0] if alone else found


@contextmanager
def _ranks(hardware: Hardware, world_size: int, seed: int = 0) -> Iterator[LiveRunner]:
    """Ranks that start when first used and are gone at the end."""
    from autotax.runner import LiveRunner
    from autotax.runner.pool import GroupLost

    runner = LiveRunner(hardware, world_size, seed=seed)
    try:
        yield runner
    except GroupLost as loss:
        raise Failed(f"{world_size} ranks on {hardware} do not start ({loss}): run `autotax doctor`") from loss
    finally:
        runner.close()


def _plain(answer: Answer) -> Config:
    """The config alone: what is sent to the ranks need not say how it was found."""
    return Config(answer.variant, answer.params)


def _baseline(problem: Problem, hardware: Hardware, answer: Answer, conditions: Conditions, where: Where) -> Config:
    """The best BSP config of the round that a tuned answer won, else the default one."""
    from autotax.spaces import space_for

    space = space_for(problem, hardware)
    with where.store(create=False) as store:
        winners = store.winners(with_samples=False) if answer.from_problem else []
    alike = [w for w in winners if w.problem.key == answer.from_problem and w.conditions == conditions]
    tuned = [w.baseline for w in alike if w.config == answer]
    return next((config for config in reversed(tuned) if config in space), space.default("bsp"))


# What is asked for


def _problems(what: What, how: How, hardware: Hardware) -> list[Problem]:
    """The problem that was named, those of the file, or the usual pair of the machine."""
    world_size = what.world_size if what.world_size is not None else hardware.default_world_size
    if how.shapes is not None:
        what.only_world_size("with --shapes")
        return read_shapes(how.shapes, world_size)
    if what.op is None:
        what.only_world_size("without an operator")
        return [with_world_size(problem, world_size) for problem in (GPU_PAIR if hardware.on_gpu else CPU_PAIR)]
    return [what.problem(hardware)]


def _missed(what: What, deployed: As, how: How, where: Where, hardware: Hardware, settings: Settings) -> list[Job]:
    """What programs on this hardware asked for in vain and it can tune, each as it was asked for, most often first."""
    given = {"op": what.op, "shapes": how.shapes, **what.given}
    given |= {"mode": deployed.mode, "l2": deployed.l2, "skew": deployed.skew}
    if named := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{flags(named)} given with --misses, which bring their own: take the others out")
    with where.store(create=False) as store:
        misses = store.misses(hardware)
    jobs = []
    for miss in misses:
        try:
            _check([miss.problem], hardware, settings.variants)
        except UsageError as error:
            _say(f"{miss.problem} was asked for {miss.count} times and is left out: {error}")
        else:
            jobs.append((miss.problem, replace(settings, conditions=miss.conditions)))
    return jobs


def _nothing_missed(where: Where) -> int:
    where.document(list)
    saved = "programs save what they ask for in vain by autotax.save_misses(), or with AUTOTAX_MISSES=1"
    return _say(f"nothing to tune: the database holds no misses that this machine can tune; {saved}")


def _check(problems: Sequence[Problem], hardware: Hardware, variants: Sequence[str] | None = None) -> None:
    """Raises UsageError for what the machine or the spaces cannot do, before anything is started or written."""
    from autotax.hardware import check_memory, check_world_size
    from autotax.spaces import space_for

    for problem in problems:
        check_world_size(hardware, problem.world_size)
        check_memory(hardware, problem)
        if variants:
            space_for(problem, hardware).only(variants)


# The way in, and the way out when something is wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 bad input."""
    try:
        return typer.main.get_command(app).main(args=arguments, prog_name="autotax", standalone_mode=False) or 0
    except UsageError as error:
        return _say(str(error), 2)
    except (Failed, MachineError) as error:
        return _say(str(error), 1)
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted", 1)
    except Exception as error:
        # Typer's own complaints. Some versions of Typer bring their own click: only the method tells them apart.
        if type(error).__module__.partition(".")[0] in ("optuna", "sqlalchemy"):
            return _say(f"the database failed ({type(error).__name__}: {error}): run the same command again to go on", 1)
        if not hasattr(error, "format_message"):
            raise
        return _say(_explained(error), 2)


def _say(message: str, code: int = 0) -> int:
    """One line on stderr, whatever the message holds."""
    print(f"autotax: {' '.join(message.split())}", file=sys.stderr)
    return code


def _explained(error: Any) -> str:
    """A complaint of the parser, with what it would have taken and what to do."""
    message = error.format_message().partition(" Did you mean")[0].rstrip(".")
    context = getattr(error, "ctx", None)
    allowed = ""
    if context is not None and hasattr(context.command, "commands"):
        allowed = f"; allowed are {', '.join(context.command.commands)}"
    elif context is not None and hasattr(error, "option_name"):
        options = [option for parameter in context.command.params for option in parameter.opts if option[:1] == "-"]
        allowed = f"; allowed are {', '.join(options)}"
    path = context.command_path if context is not None else "autotax"
    return f"{message[:1].lower()}{message[1:]}{allowed}: see `{path} --help`"
