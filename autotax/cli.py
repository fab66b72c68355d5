"""The commands. Each reads its options, makes one call and prints a table, or one JSON document with `--json`.

Bad input ends a command with exit code 2 and one line on stderr before a rank is started or a database is touched.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from autotax.config import Config
from autotax.errors import UsageError
from autotax.problem import OPERATORS, AllGatherGemm, FlashDecode, Problem, problem_from_dict, with_world_size

# What needs torch, a database or a table is imported by the command that needs it: `--help` comes at once.
if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.db import Store
    from autotax.db.lookup import Answer
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner import Settings, Verdict

GPU_PAIR = (AllGatherGemm(512, 7168, 8192), FlashDecode(1, 64, 8, 128, 32768))
CPU_PAIR = (AllGatherGemm(64, 96, 64, "fp32"), FlashDecode(2, 8, 2, 32, 128, "fp32"))
GPU_PAIR_TRIALS, CPU_PAIR_TRIALS = 60, 10

MAX_SEED = 2**32 - 1
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
LOG_WIDTH = 150
"""Columns of a table that goes to a file."""

app = typer.Typer(
    name="autotax",
    help="Finds, proves and remembers the fastest fine-grained All-Gather + GEMM and Flash Decode for your GPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Failed(Exception):
    """The command could not do its work, though its input was good; exit code 1. The message is one line."""


# The options, each defined once


def _whole(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(meaning: str, panel: str | None = None) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel, parser=_whole, metavar="INT")


def _word(meaning: str, panel: str | None = None) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel)


@dataclass(frozen=True)
class What:
    """The operator and its problem. Names are those of the problem's fields; what is not given is None."""

    op: Annotated[str | None, typer.Argument(metavar="|".join(OPERATORS), show_default=False)] = None
    m: Annotated[int | None, _number("rows of A over all ranks", AllGatherGemm.op)] = None
    n: Annotated[int | None, _number("columns of B on each rank", AllGatherGemm.op)] = None
    k: Annotated[int | None, _number("the dimension that is summed over", AllGatherGemm.op)] = None
    shard: Annotated[str | None, _word("m or k: how A is sharded; m unless given", AllGatherGemm.op)] = None
    batch: Annotated[int | None, _number("sequences", FlashDecode.op)] = None
    q_heads: Annotated[int | None, _number("query heads", FlashDecode.op)] = None
    kv_heads: Annotated[int | None, _number("KV heads", FlashDecode.op)] = None
    head_dim: Annotated[int | None, _number("elements of a head", FlashDecode.op)] = None
    kv_len: Annotated[int | None, _number("greatest length over all ranks", FlashDecode.op)] = None
    dtype: Annotated[str | None, _word("bf16, fp16 or fp32; bf16 unless given")] = None
    world_size: Annotated[int | None, _number("ranks; the GPUs present, or 2 CPU ranks, unless given")] = None

    @property
    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "op"}
        return {name: value for name, value in values.items() if value is not None}

    def problem(self, hardware: Hardware) -> Problem:
        if self.op is None:
            raise UsageError(f"no operator given; allowed are {', '.join(OPERATORS)}: name one, with its sizes")
        required = [f.name for f in fields(OPERATORS[self.op]) if f.default is MISSING] if self.op in OPERATORS else []
        if lacking := [name for name in required if name not in self.given]:
            raise UsageError(f"{self.op} lacks {_flags(lacking)}; it needs {_flags(required)}: give them all")
        return problem_from_dict({"op": self.op, "world_size": hardware.default_world_size} | self.given)

    def only_world_size(self, because: str) -> None:
        """Raises UsageError if anything but --world-size is given, which makes no sense `because`."""
        given = [f"operator {self.op}"] if self.op else []
        if given := given + [_flags([name]) for name in self.given if name != "world_size"]:
            raise UsageError(f"{', '.join(given)} given {because}; allowed is --world-size: take the others out")


@dataclass(frozen=True)
class How:
    """How to search."""

    shapes: Annotated[Path | None, _word("TOML file of many problems: an array of tables for each operator")] = None
    variants: Annotated[str | None, _word("search these alone, for instance pull,push")] = None
    trials: Annotated[int | None, _number("configs to measure for each problem; 60 unless given")] = None
    timeout: Annotated[str | None, _word("time for each problem: 90, 90s, 10m, 2h")] = None
    sampler: Annotated[str, typer.Option(help="tpe, random or gp")] = "tpe"
    seed: Annotated[int | None, _number("of the sampler; 0 unless given")] = None
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="go on from the trials kept, or anew")] = True

    def settings(self) -> Settings:
        from autotax.tuner.progress import Settings

        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}: give another --seed")
        if self.sampler == "gp" and find_spec("scipy") is None:
            raise UsageError("sampler gp needs the package scipy, which is not installed: install it, or --sampler tpe")
        given: dict[str, Any] = {
            "trials": self.trials,
            "seed": self.seed,
            "timeout_s": _seconds(self.timeout),
            "variants": _names(self.variants),
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return Settings(sampler=self.sampler, resume=self.resume, **chosen)


@dataclass(frozen=True)
class Where:
    """The machine, the database, and the form of the answer: the same for every command."""

    backend: Annotated[str | None, _word("cuda, rocm or cpu; found by itself unless given")] = None
    db: Annotated[str | None, _word("path or SQLAlchemy URL; $AUTOTAX_DB or a file of yours unless given")] = None
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, nothing else")] = False

    def hardware(self) -> Hardware:
        from autotax.hardware import detect

        return detect(self.backend)

    def store(self, *, create: bool) -> Store:
        from autotax.db import Store

        return Store.open(self.db, create=create)

    def show(self, table: Callable[[], RenderableType]) -> None:
        """Prints a table, unless a document is wanted."""
        if not self.as_json:
            from rich.console import Console

            Console(width=None if sys.stdout.isatty() else LOG_WIDTH).print(table())

    def document(self, make: Callable[[], Any]) -> None:
        """Prints the document, if one is wanted."""
        if self.as_json:
            print(json.dumps(make(), indent=2, allow_nan=False))


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
    app.command(function.__name__)(run)
    return function


# The commands


@_command
def tune(what: What, how: How, where: Where) -> int:
    """Find and prove the fastest config, and keep it. Without an operator: the usual pair of this machine, compared."""
    settings, hardware = how.settings(), where.hardware()
    usual = what.op is None and how.shapes is None
    problems = _problems(what, how, hardware)
    if usual and how.trials is None:
        settings = replace(settings, trials=GPU_PAIR_TRIALS if hardware.on_gpu else CPU_PAIR_TRIALS)
    _check(problems, hardware, settings.variants)
    with where.store(create=True) as store:
        verdicts = _tune_all(problems, settings, hardware, store, where, then_compare=usual)
        where.document(lambda: _documents(verdicts, problems, store.url, alone=what.op is not None))
    return 0 if len(verdicts) == len(problems) and all(verdict.winner for verdict in verdicts) else 1


@_command
def compare(what: What, where: Where) -> int:
    """Measure the tuned config, BSP and torch's own operator in one interleaved run."""
    from autotax.db.lookup import lookup
    from autotax.report import documents, tables
    from autotax.tuner import compare as measure

    hardware = where.hardware()
    problem = what.problem(hardware)
    _check([problem], hardware)
    answer = lookup(problem, hardware=hardware, db=where.db)
    if answer.match == "fallback":
        _say(f"nothing tuned to compare, BSP stands in for it: {answer.reason}")
    baseline = _baseline(problem, hardware, answer, where)
    with _ranks(hardware, _world_size(problem)) as runner:
        rows = measure(problem, hardware=hardware, runner=runner, config=_plain(answer), baseline=baseline)
    where.show(lambda: tables.comparison(problem, hardware, rows))
    where.document(lambda: documents.of_comparison(problem, hardware, answer, rows))
    return 0 if any(row.measurement.verified for row in rows) else 1


@_command
def lookup(what: What, where: Where) -> int:
    """Tell what the run-time library would use here, and why."""
    from autotax.db.lookup import lookup as look_up
    from autotax.report import documents, tables

    hardware = where.hardware()
    problem = what.problem(hardware)
    answer = look_up(problem, hardware=hardware, db=where.db)
    where.show(lambda: tables.answer(problem, hardware, answer))
    where.document(lambda: documents.of_answer(problem, answer))
    return 0


@_command
def trials(what: What, where: Where) -> int:
    """List the trials of a problem, or of all, failed ones with their reason."""
    from autotax.db.url import shown
    from autotax.report import documents, tables

    if what.op is None and what.given:
        raise UsageError(f"{_flags(what.given)} given, but no operator; allowed are {', '.join(OPERATORS)}: name one")
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
    problems: Sequence[Problem],
    settings: Settings,
    hardware: Hardware,
    store: Store,
    where: Where,
    *,
    then_compare: bool,
) -> list[Verdict]:
    """One pool of ranks for all problems of a world size. Ends early when interrupted."""
    verdicts: list[Verdict] = []
    for world_size in dict.fromkeys(map(_world_size, problems)):
        with _ranks(hardware, world_size) as runner:
            for problem in (problem for problem in problems if _world_size(problem) == world_size):
                verdict = _tune_one(problem, settings, hardware, runner, store, where)
                verdicts.append(verdict)
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
    rows = tuner.compare(problem, hardware=hardware, runner=runner, config=config, baseline=baseline)
    where.show(lambda: tables.comparison(problem, hardware, rows))


def _documents(verdicts: Sequence[Verdict], problems: Sequence[Problem], url: str, *, alone: bool) -> Any:
    """One document for an operator that was named, a list in the order asked for a file or the usual pair."""
    from sqlalchemy import make_url

    from autotax.report import documents

    db = make_url(url).render_as_string(hide_password=True)
    found = [documents.of_verdict(verdict, db) for verdict in sorted(verdicts, key=lambda v: problems.index(v.problem))]
    return found[0] if alone else found


@contextmanager
def _ranks(hardware: Hardware, world_size: int) -> Iterator[LiveRunner]:
    """Ranks that start when first used and are gone at the end."""
    from autotax.runner import LiveRunner
    from autotax.runner.pool import GroupLost

    runner = LiveRunner(hardware, world_size)
    try:
        yield runner
    except GroupLost as loss:
        raise Failed(f"{world_size} ranks on {hardware} do not start ({loss}): run `autotax doctor`") from loss
    finally:
        runner.close()


def _plain(answer: Answer) -> Config:
    """The config alone: what is sent to the ranks need not say how it was found."""
    return Config(answer.variant, answer.params)


def _baseline(problem: Problem, hardware: Hardware, answer: Answer, where: Where) -> Config:
    """The best BSP config of the round that a tuned answer won, else the default one."""
    from autotax.spaces import space_for

    space = space_for(problem, hardware)
    with where.store(create=False) as store:
        winners = store.winners(with_samples=False) if answer.from_problem else []
    tuned = [w.baseline for w in winners if w.problem.key == answer.from_problem and w.config == answer]
    return next((config for config in reversed(tuned) if config in space), space.default("bsp"))


# What is asked for


def _problems(what: What, how: How, hardware: Hardware) -> list[Problem]:
    """The problem that was named, those of the file, or the usual pair of the machine."""
    world_size = what.world_size if what.world_size is not None else hardware.default_world_size
    if how.shapes is not None:
        what.only_world_size("with --shapes")
        return _read_shapes(how.shapes, world_size)
    if what.op is None:
        what.only_world_size("without an operator")
        return [with_world_size(problem, world_size) for problem in (GPU_PAIR if hardware.on_gpu else CPU_PAIR)]
    return [what.problem(hardware)]


def _check(problems: Sequence[Problem], hardware: Hardware, variants: Sequence[str] | None = None) -> None:
    """Raises UsageError for what the machine or the spaces cannot do, before anything is started or written."""
    from autotax.hardware import check_world_size
    from autotax.spaces import space_for

    for problem in problems:
        check_world_size(hardware, _world_size(problem))
        if variants:
            space_for(problem, hardware).only(variants)


def _read_shapes(path: Path, world_size: int) -> list[Problem]:
    """The problems of a TOML file, each once; `world_size` is for those that name none."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give another --shapes") from None
    except ValueError as error:
        raise UsageError(f"file {path} is not TOML ({error}): mend it, or give another --shapes") from None
    problems = [
        _read_shape(f"file {path}, [[{op}]] number {number}", {"world_size": world_size} | entry | {"op": op})
        for op, entries in tables.items()
        for number, entry in enumerate(_array(path, op, entries), 1)
    ]
    if not problems:
        raise UsageError(f"file {path} holds no problems; it needs tables such as [[{AllGatherGemm.op}]]: add some")
    return list(dict.fromkeys(problems))


def _array(path: Path, op: str, entries: object) -> list[dict[str, Any]]:
    if op not in OPERATORS:
        raise UsageError(f"file {path} has {op!r}; allowed are [[{']], [['.join(OPERATORS)}]]: take it out")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"file {path} has {op!r} as something else than an array of tables: write [[{op}]]")
    return entries


def _read_shape(named: str, values: dict[str, Any]) -> Problem:
    try:
        return problem_from_dict(values)
    except UsageError as error:
        raise UsageError(f"{named}: {error}") from None


def _world_size(problem: Problem) -> int:
    return int(problem.to_dict()["world_size"])


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found:
        raise UsageError(f"timeout is {text!r}; allowed are times such as 90, 90s, 10m, 2h: give another --timeout")
    return float(found[1]) * SECONDS[found[2]]


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"variants is {text!r}; it must be names with commas between: give some as --variants")
    return names


def _flags(names: Sequence[str] | dict[str, Any]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


# The way in, and the way out when something is wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 bad input."""
    try:
        return typer.main.get_command(app).main(args=arguments, prog_name="autotax", standalone_mode=False) or 0
    except UsageError as error:
        return _say(str(error), 2)
    except Failed as error:
        return _say(str(error), 1)
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted", 1)
    except Exception as error:
        # Typer's own complaints. Some versions of Typer bring their own click: only the method tells them apart.
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
