"""The options of the commands, each defined once, and what they ask for: a problem, settings, a machine, a database.

Everything here that is wrong is a UsageError: one line that says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotax.conditions import Conditions
from autotax.errors import UsageError
from autotax.operators import operators, problem_from_dict
from autotax.problem import Problem, about
from autotax.terminal import console

# What needs torch, a database or a table is imported by the method that needs it: `--help` comes at once.
if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.db import Store
    from autotax.hardware import Hardware
    from autotax.tuner import Settings

MAX_SEED = 2**32 - 1
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
SURVEYED = 8
"""Configs of each variant that are compiled."""
LOG_WIDTH = 150
"""Columns of a table that goes to a file."""


def whole(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(meaning: str, panel: str | None = None) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel, parser=whole, metavar="INT")


def _word(meaning: str, panel: str | None = None) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel)


class ProblemOptions:
    """The operator and its problem. The options are the fields of all operators' problems; what is not given is left out."""

    def __init__(self, op: str | None = None, **values: Any) -> None:
        self.op = op
        self.given = {name: value for name, value in values.items() if value is not None}

    @property
    def world_size(self) -> int | None:
        """The ranks, if they are given."""
        found: int | None = self.given.get("world_size")
        return found

    @staticmethod
    def options() -> dict[str, tuple[Any, Any]]:
        """The type and the default of each option by its name: see `commands.parsing`."""
        there = operators()
        asked: dict[str, list[tuple[str, Field[Any]]]] = {}
        for operator in there.values():
            for each in fields(operator.problem):
                asked.setdefault(each.name, []).append((operator.name, each))
        argument = Annotated[str | None, typer.Argument(metavar="|".join(there), show_default=False)]
        found: dict[str, tuple[Any, Any]] = {"op": (argument, None)}
        for name, users in sorted(asked.items(), key=lambda item: len(item[1]) == len(there)):
            panel = None if len(users) == len(there) > 1 else " and ".join(op for op, _ in users)
            told = "; ".join(dict.fromkeys(_meaning(each) for _, each in users))
            numbers = all(_is_number(each) for _, each in users)
            hint: Any = Annotated[int | None, _number(told, panel)] if numbers else Annotated[str | None, _word(told, panel)]
            found[name] = (hint, None)
        return found

    def problem(self, hardware: Hardware) -> Problem:
        if self.op is None:
            raise UsageError(f"no operator given; allowed are {', '.join(operators())}: name one, with its sizes")
        kind = self._kind()
        required = kind.required() if kind else []
        if lacking := [name for name in required if name not in self.given]:
            raise UsageError(f"{self.op} lacks {flags(lacking)}; it needs {flags(required)}: give them all")
        given = {name: self._typed(name, value) for name, value in self.given.items()}
        return problem_from_dict({"op": self.op, "world_size": hardware.default_world_size} | given)

    def _kind(self) -> type[Problem] | None:
        found = operators().get(self.op or "")
        return found.problem if found else None

    def _typed(self, name: str, value: Any) -> Any:
        """A value as this operator takes it; other operators may have words where it has numbers."""
        kind = self._kind()
        own = next((each for each in fields(kind) if each.name == name), None) if kind else None
        return whole(value) if own and _is_number(own) else value

    def only_world_size(self, because: str) -> None:
        """Raises UsageError if anything but --world-size is given, which makes no sense `because`."""
        given = [f"operator {self.op}"] if self.op else []
        if given := given + [flags([name]) for name in self.given if name != "world_size"]:
            raise UsageError(f"{', '.join(given)} given {because}; allowed is --world-size: take the others out")


def _is_number(of: Field[Any]) -> bool:
    return "allowed" not in of.metadata or isinstance(of.metadata["allowed"][0], int)


def _meaning(of: Field[Any]) -> str:
    """What an option means, with its default."""
    if of.name == "world_size":
        return "ranks; unless given the GPUs present, 8 of a --target, or 2 CPU ranks"
    return about(of) + (f"; {of.default} unless given" if of.default is not MISSING else "")


@dataclass(frozen=True)
class DeployOptions:
    """Conditions to tune for; defaults depend on the hardware."""

    mode: Annotated[str | None, _word("graph or eager: how calls are launched; graph on GPUs, eager on CPU ranks")] = None
    l2: Annotated[str | None, _word("cold or warm: whether calls find their inputs in the L2; cold on GPUs")] = None
    skew: Annotated[str | None, _word("ranks arrive at random up to so many microseconds apart; 0 unless given")] = None

    def conditions(self, hardware: Hardware) -> Conditions:
        from autotax.tuner.settings import as_deployed

        given: dict[str, Any] = {"mode": self.mode, "l2": self.l2, "skew_us": _microseconds(self.skew)}
        chosen = {name: value for name, value in given.items() if value is not None}
        return as_deployed(replace(Conditions.usual(hardware.on_gpu), **chosen), hardware)


Shapes = Annotated[Path | None, _word("TOML file of many problems: an array of tables for each operator")]


@dataclass(frozen=True)
class ShapesOptions:
    """A file of problems, if none is named."""

    shapes: Shapes = None


@dataclass(frozen=True)
class CompareOptions(ShapesOptions):
    """What is compared."""

    every_variant: Annotated[
        bool, typer.Option("--variants", help="a row for the best known config of every variant, not the ladder alone")
    ] = False


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    shapes: Shapes = None
    variants: Annotated[str | None, _word("search these alone, for instance pull,push; each problem those that it has")] = None
    trials: Annotated[int | None, _number("configs to measure for each problem; all of them, unless an effort ends it")] = None
    effort: Annotated[str | None, _word("quick, normal or full: its most trials, and with --sampler gp when it ends; normal without --trials")] = None
    timeout: Annotated[str | None, _word("time for each problem: 90, 90s, 10m, 2h")] = None
    sampler: Annotated[str, typer.Option(help="tpe, gp or random")] = "tpe"
    seed: Annotated[int | None, _number("of the sampler; 0 unless given")] = None
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="go on from the trials kept, or anew")] = True
    soak: Annotated[int | None, _number("replays each finalist must pass; 2000 on GPUs, 20 on CPU ranks, 0: none")] = None
    misses: Annotated[bool, typer.Option("--misses", help="tune what programs asked for in vain, most often first")] = False

    def settings(self) -> Settings:
        from autotax.tuner.settings import Settings

        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}: give another --seed")
        given: dict[str, Any] = {
            "trials": self.trials,
            "seed": self.seed,
            "timeout_s": seconds_of(self.timeout),
            "variants": _names(self.variants),
            "soak": self.soak,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        chosen |= {"sampler": self.sampler, "resume": self.resume}
        if self.effort is None and self.trials is not None:
            return Settings(**chosen)
        return Settings.of_effort(self.effort or "normal", **chosen)


@dataclass(frozen=True)
class TargetOptions:
    """What is compiled, and for which GPU."""

    target: Annotated[str | None, _word("the GPU: cuda:90, cuda:100, hip:gfx942 or hip:gfx950")] = None
    variants: Annotated[str | None, _word("compile these alone, for instance pull,push")] = None
    trials: Annotated[int | None, _number("configs of each variant, its seeds first; 8 unless given")] = None

    def hardware(self) -> Hardware:
        """A stand-in for the target."""
        from autotax.kernels.offline import TARGETS, known_hardware

        if self.target not in TARGETS:
            given = "no target given" if self.target is None else f"target is {self.target!r}"
            raise UsageError(f"{given}; allowed are {', '.join(TARGETS)}: give one of these as --target")
        return known_hardware(self.target)

    def settings(self) -> Settings:
        from autotax.tuner.settings import Settings

        return Settings(trials=SURVEYED if self.trials is None else self.trials, variants=_names(self.variants))


@dataclass(frozen=True)
class StaleOptions:
    """What may answer a look-up."""

    allow_stale: Annotated[
        bool, typer.Option("--allow-stale", help="a winner measured elsewhere or with other software may answer")
    ] = False


@dataclass(frozen=True)
class ExportOptions:
    """What is exported, and to where."""

    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", show_default=False)] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the JSON file to write", show_default=False)] = None
    anonymous: Annotated[bool, typer.Option("--anonymous", help="do not say who tuned it")] = False

    @property
    def operators(self) -> list[str]:
        if unknown := [op for op in self.ops or [] if op not in operators()]:
            raise UsageError(f"operator is {unknown[0]!r}; allowed are {', '.join(operators())}: name these, or none for all")
        return list(dict.fromkeys(self.ops or []))

    @property
    def file(self) -> Path:
        if self.output is None:
            raise UsageError("no file given; a path is needed: give one as --output")
        return self.output


@dataclass(frozen=True)
class ReportOptions:
    """What is shown on a page beside the database, and where the page goes."""

    compared: Annotated[list[Path] | None, typer.Argument(metavar="[COMPARE.json]...", show_default=False)] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write")] = Path("autotax-report.html")


@dataclass(frozen=True)
class ImportOptions:
    """What is imported."""

    file: Annotated[Path | None, typer.Argument(metavar="FILE.json", show_default=False)] = None

    @property
    def path(self) -> Path:
        if self.file is None:
            raise UsageError("no file given; a file of `autotax export` is needed: name one")
        return self.file


@dataclass(frozen=True)
class OutputOptions:
    """The form of the answer: the same for every command."""

    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, nothing else")] = False
    load: Annotated[
        list[str] | None,
        typer.Option("--load", metavar="MODULE", help="a module or .py file with operators or variants", show_default=False),
    ] = None  # loaded before the options are made: see cli.main

    def show(self, table: Callable[[], RenderableType]) -> None:
        """Prints a table, unless a document is wanted."""
        if not self.as_json:
            console(width=None if sys.stdout.isatty() else LOG_WIDTH).print(table())

    def document(self, make: Callable[[], Any]) -> None:
        """Prints the document, if one is wanted."""
        if self.as_json:
            print(_on_one_line(json.dumps(make(), indent=2, allow_nan=False)))


@dataclass(frozen=True)
class MachineOptions(OutputOptions):
    """The machine and the database: the same for every command that has to do with either."""

    backend: Annotated[str | None, _word("cuda, rocm or cpu; found by itself unless given")] = None
    db: Annotated[str | None, _word("path or SQLAlchemy URL; $AUTOTAX_DB or a file of yours unless given")] = None

    def hardware(self) -> Hardware:
        from autotax.hardware import detect

        return detect(self.backend)

    def backends(self) -> list[str]:
        """Whose winners are meant, which need not be of this machine: those of the backend that is named, else of all."""
        from autotax.hardware import BACKENDS

        if self.backend is not None and self.backend not in BACKENDS:
            raise UsageError(f"backend is {self.backend!r}; allowed are {', '.join(BACKENDS)}: give one of these as --backend")
        return [self.backend] if self.backend else list(BACKENDS)

    def store(self, *, create: bool) -> Store:
        from autotax.db import Store

        return Store.open(self.db, create=create)


def _on_one_line(document: str) -> str:
    """The same with each list of numbers on one line: samples would take thousands. No text of JSON holds a line break."""
    return re.sub(r"\[\n\s*([\s\d.,eE+-]+?)\s*\]", lambda found: f"[{' '.join(found[1].split())}]", document)


def seconds_of(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not found:
        raise UsageError(f"timeout is {text!r}; allowed are times such as 90, 90s, 10m, 2h: give another --timeout")
    return float(found[1]) * SECONDS[found[2]]


def _microseconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(f"skew is {text!r}; it must be a number of microseconds: give another --skew") from None


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"variants is {text!r}; it must be names with commas between: give some as --variants")
    return names


def flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)
