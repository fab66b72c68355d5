"""The options that commands share: a problem, conditions, settings, a machine, a database, the form of the answer.

`check` of each group finds mistakes without access to the machine, so that a typing error is reported at once. All
errors are UsageErrors: one line with the given value, the allowed values and the remedy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO

import typer

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError, did_you_mean
from autotax.core.problem import Problem, about
from autotax.core.settings import SAMPLERS, Settings, as_deployed
from autotax.core.terminal import console
from autotax.operators import operators, problem_from_dict
from autotax.operators.problem_files import read_shapes

# Methods import torch, databases and tables themselves, so that `--help` comes at once.
if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.db import Store
    from autotax.hardware import Hardware

MAX_SEED = 2**32 - 1
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
SCHEMA_VERSION = 1
"""Version of the documents that `--json` prints. It grows when a key changes its meaning or is removed."""


def whole(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(meaning: str, *, panel: str | None = None, hidden: bool = False) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel, parser=whole, metavar="INT", hidden=hidden)


def word(meaning: str, metavar: str = "TEXT", *, panel: str | None = None, hidden: bool = False) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel, metavar=metavar, hidden=hidden)


def flag(name: str, meaning: str) -> Any:
    return typer.Option(name, help=meaning, show_default=False)


def one_of(name: str, value: str | None, allowed: Iterable[str], remedy: str = "", *, guess: bool = True) -> None:
    """Raises UsageError for a value that is not allowed. It names a similar value, or else the remedy."""
    if value is not None and value not in (allowed := list(allowed)):
        advice = (did_you_mean(value, allowed) if guess else "") or remedy or f"give one of these as --{name}"
        raise UsageError(f"{name} is {value!r}; allowed are {', '.join(allowed)}: {advice}")


def operator_named(arguments: Iterable[str]) -> str | None:
    """The operator that a command line names, if any. Its options are the ones that apply."""
    return next((argument for argument in arguments if argument in operators()), None)


class ProblemOptions:
    """The operator and its problem. Only options that were given are kept."""

    PANEL: ClassVar[str] = "Problem"

    def __init__(self, op: str | None = None, **values: Any) -> None:
        self.op = op
        self.given = {name: value for name, value in values.items() if value is not None}

    @property
    def world_size(self) -> int | None:
        return self.given.get("world_size")

    @staticmethod
    def options(op: str | None) -> dict[str, tuple[Any, Any]]:
        """The type and the default of each option by its name, for a command line that names the operator `op`.

        With an operator these are the fields of its problem. Without one they are the fields of all operators; those that not
        all operators share are hidden in the help.
        """
        declared = operators()
        meaning = f"The operator: {', '.join(declared)}."
        argument = typer.Argument(metavar="OP", help=meaning, show_default=False, autocompletion=complete_operators)
        options: dict[str, tuple[Any, Any]] = {"op": (Annotated[str | None, argument], None)}
        chosen = [declared[op]] if op else list(declared.values())
        users: dict[str, list[Field[Any]]] = {}
        for operator in chosen:
            for field in fields(operator.problem):
                users.setdefault(field.name, []).append(field)
        for name, kinds in users.items():
            meanings = max(map(_meaning, kinds), key=len)  # the most values, if the operator is not known
            panel, hidden = f"Problem: {op}" if op else "Problem", len(kinds) < len(chosen)
            kind: Any = (int, number) if all(map(_is_number, kinds)) else (str, word)
            options[name] = (Annotated[kind[0] | None, kind[1](meanings, panel=panel, hidden=hidden)], None)
        return options

    def check(self) -> None:
        if self.op is not None:
            self._problem(1)

    def problem(self, hardware: Hardware) -> Problem:
        self.require()
        return self._problem(hardware.default_world_size)

    def require(self) -> None:
        if self.op is None:
            raise UsageError(f"no operator given; allowed are {', '.join(operators())}: name one, with its sizes")

    def _problem(self, world_size: int) -> Problem:
        """The problem, on `world_size` ranks unless the command line gives another number."""
        one_of("operator", self.op, operators(), "name one of these, or --load its module")
        kind = operators()[self.op or ""].problem
        required = kind.required()
        if lacking := [name for name in required if name not in self.given]:
            more = f"; it needs {flags(required)}" if lacking != required else ""
            raise UsageError(f"{self.op} lacks {flags(lacking)}{more}: give them all")
        # An option may be a number for one operator and a word for another.
        numbers = {field.name for field in fields(kind) if _is_number(field)}
        values = {name: whole(value) if name in numbers else value for name, value in self.given.items()}
        return problem_from_dict({"op": self.op, "world_size": world_size} | values)

    def only_world_size(self, because: str) -> None:
        """Raises UsageError with the reason `because` if any option other than --world-size is given."""
        others = [f"operator {self.op}"] if self.op else []
        if others := others + [flags([name]) for name in self.given if name != "world_size"]:
            raise UsageError(f"{', '.join(others)} given {because}; allowed is --world-size: take the others out")


def complete_operators() -> list[str]:
    return list(operators())


def _is_number(of: Field[Any]) -> bool:
    return "allowed" not in of.metadata or isinstance(of.metadata["allowed"][0], int)


def _meaning(of: Field[Any]) -> str:
    """The help of an option, with its default."""
    if of.name == "world_size":
        return "Number of ranks. Default: the GPUs present, or 2 CPU ranks."
    meaning = about(of)
    if "allowed" not in of.metadata:
        meaning = meaning[:1].upper() + meaning[1:]
    return f"{meaning}. " + ("Required." if of.default is MISSING else f"Default: {of.default}.")


@dataclass(frozen=True)
class DeployOptions:
    """Conditions to tune for; defaults depend on the hardware."""

    PANEL: ClassVar[str] = "Conditions of calls"

    mode: Annotated[
        str | None, word(
            "How calls are launched and measured: in-place (in a CUDA graph, between other work), graph (call behind call) or "
            "eager. Default: in-place on GPUs (graph with --skew), eager on CPU ranks."
        ),
    ] = None
    l2: Annotated[str | None, word("Whether calls find their inputs in the L2: cold or warm. Default: cold on GPUs.")] = None
    skew: Annotated[
        str | None, word("Ranks arrive at random times, up to US microseconds apart. Default: 0.", metavar="US")
    ] = None

    def check(self) -> None:
        self._asked(Conditions())

    @property
    def given(self) -> bool:
        return (self.mode, self.l2, self.skew) != (None, None, None)

    def conditions(self, hardware: Hardware) -> Conditions:
        return as_deployed(self._asked(Conditions.usual(hardware.on_gpu)), hardware)

    def _asked(self, defaults: Conditions) -> Conditions:
        values: dict[str, Any] = {"mode": self.mode, "l2": self.l2, "skew_us": _microseconds(self.skew)}
        if self.mode is None and values["skew_us"]:
            defaults = defaults.searched
        return replace(defaults, **{name: value for name, value in values.items() if value is not None})


Shapes = Annotated[
    Path | None, word("A TOML file of many problems, with an array of tables for each operator.", metavar="FILE.toml")
]


@dataclass(frozen=True)
class ShapesOptions:
    """A file of problems, if none is named."""

    PANEL: ClassVar[str] = "Problems"

    shapes: Shapes = None

    def check(self) -> None:
        if self.shapes is not None:
            read_shapes(self.shapes, 1)


@dataclass(frozen=True)
class LimitedOptions(ShapesOptions):
    """A file of problems, and a time limit for all of them."""

    timeout: Annotated[
        str | None, word("Time limit for all problems together: 90, 90s, 10m, 2h. Default: none.", metavar="TIME")
    ] = None

    def check(self) -> None:
        super().check()
        Settings(timeout_s=seconds_of(self.timeout))


def check_variants(names: Sequence[str] | None, remedy: str = "give some of these as --variants") -> None:
    """Raises UsageError for a variant that the named operator lacks, or that no operator has. The machine decides which variants
    a problem has.
    """
    declared = [operators()[op]] if op and op in operators() else operators().values()
    variants = dict.fromkeys(name for operator in declared for name in operator.variants)
    for name in names or ():
        one_of("variant", name, variants, remedy)


@dataclass(frozen=True)
class SearchOptions(ShapesOptions):
    """How to search."""

    PANEL: ClassVar[str] = "Search"

    variants: Annotated[
        str | None,
        word("Search only these variants. Variants that an operator lacks are ignored. Default: all.", metavar="A,B,..."),
    ] = None
    trials: Annotated[int | None, number("Configs to measure for each problem. Default: 60.")] = None
    effort: Annotated[
        str | None,
        word("quick, normal, full: at most 24, 60, 300 trials; --sampler gp may end the first two early.", metavar="NAME"),
    ] = None
    timeout: Annotated[
        str | None,
        word(
            "Time limit for each problem: 90, 90s, 10m, 2h. That of a single one includes the start of the ranks; of several it "
            "counts from the end of a problem's first trial. Default: none.",
            metavar="TIME",
        ),
    ] = None
    sampler: Annotated[
        str | None,
        word("The sampler: gp, tpe or random. Default: gp where a prior was learnt (H200), else tpe.", metavar="NAME"),
    ] = None
    seed: Annotated[int | None, number("Seed of the sampler. Default: 0.")] = None
    paired: Annotated[
        bool, flag("--paired", "Measure each trial in turn with the best so far: finer figures, fewer trials a minute.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on from the trials in the database, or search anew.")
    ] = True
    soak: Annotated[
        int | None,
        number("Replays that each finalist must pass with delayed ranks. 0: none. Default: 2000 on GPUs, 20 on CPU ranks."),
    ] = None
    misses: Annotated[
        bool, flag("--misses", "Tune the problems that programs looked up without success, most frequent first.")
    ] = False

    def check(self) -> None:
        if not self.misses:  # the command refuses both together, whatever the file contains
            super().check()
        self.settings()
        check_variants(names_of(self.variants))

    def settings(self) -> Settings:
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}: give another --seed")
        one_of("sampler", self.sampler, SAMPLERS)
        values: dict[str, Any] = {
            "seed": self.seed,
            "timeout_s": seconds_of(self.timeout),
            "variants": names_of(self.variants),
            "soak": self.soak,
        }
        chosen = {name: value for name, value in values.items() if value is not None}
        chosen |= {"sampler": self.sampler, "resume": self.resume, "paired": self.paired}
        return Settings.of_effort(self.effort, self.trials, **chosen)


@dataclass(frozen=True)
class ListOptions:
    """The form of a list."""

    PANEL: ClassVar[str] = "List"

    csv: Annotated[bool, flag("--csv", "Print comma-separated values, with a line of column names first.")] = False


@dataclass(frozen=True)
class OperatorsOptions:
    """Operators, for commands that list or export records by operator."""

    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP...", help="Operators. Default: all.", show_default=False, autocompletion=complete_operators),
    ] = None

    def check(self) -> None:
        for op in self.ops or []:
            one_of("operator", op, operators(), "name these, none for all, or --load its module")

    @property
    def operators(self) -> list[str]:
        return list(dict.fromkeys(self.ops or operators()))


@dataclass(frozen=True)
class OutputOptions:
    """The form of the answer: the same for every command."""

    PANEL: ClassVar[str] = "Output"

    as_json: Annotated[bool, flag("--json", "Print one JSON document on stdout and nothing else.")] = False
    load: Annotated[
        list[str] | None,
        typer.Option("--load", metavar="MODULE", help="A module or .py file with operators or variants.", show_default=False),
    ] = None  # loaded before the options exist: see cli.app.loads_in

    def show(self, table: Callable[[], RenderableType]) -> None:
        """Prints a table, unless `--json` is given. In a pipe or a file its width is COLUMNS, or that of its content."""
        if self.as_json:
            return
        shown, columns = table(), os.environ.get("COLUMNS", "")
        if not sys.stdout.isatty():
            from autotax.report.formatting import natural_width

            pipe = console(width=int(columns) if columns.isdecimal() and int(columns) else natural_width(shown))
            with pipe.capture() as captured:
                pipe.print(shown)
            print("\n".join(line.rstrip() for line in captured.get().splitlines()))
        else:
            console().print(shown)

    def plain(self, text: str) -> None:
        """Prints text unchanged, unless `--json` is given."""
        if not self.as_json:
            print(text)

    def answer(
        self, table: Callable[[], RenderableType] | str | None, make: Callable[[], Iterable[Any]], *, ok: bool = True,
        about: Mapping[str, Any] | None = None,
    ) -> int:  # fmt: skip
        """Prints a table or a text if there is one, or with `--json` the document, and returns the exit code."""
        if isinstance(table, str):
            self.plain(table)
        elif table is not None:
            self.show(table)
        self.document(make, ok=ok, about=about)
        return 0 if ok else 1

    def document(
        self, make: Callable[[], Iterable[Any]], *, ok: bool = True, about: Mapping[str, Any] | None = None
    ) -> None:
        """Prints the document if `--json` is given: `make` returns its results, `about` their common properties."""
        if self.as_json:
            print_document({"ok": ok, "about": dict(about or {}), "results": list(make()), "error": None})


@dataclass(frozen=True)
class MachineOptions(OutputOptions):
    """The machine and the database: the same options for every command that uses either."""

    PANEL: ClassVar[str] = "Machine and output"

    backend: Annotated[str | None, word("The kind of ranks: cuda, rocm or cpu. Default: what this machine has.")] = None
    heap: Annotated[
        str | None,
        word("The library of symmetric memory on GPUs: torch or iris. Default: $AUTOTAX_HEAP, else torch on cuda, iris on rocm."),
    ] = None
    db: Annotated[
        str | None,
        word("The database: a path or an SQLAlchemy URL. Default: $AUTOTAX_DB, else a file in your data folder.", metavar="DB"),
    ] = None

    def check(self) -> None:
        from autotax.hardware import HEAP_VARIABLE, HEAPS

        self.backends()
        one_of("heap", self.heap, HEAPS, guess=False)
        if self.heap:
            os.environ[HEAP_VARIABLE] = self.heap  # ranks inherit it
        if self.db is not None:
            from autotax.db.url import resolve_url

            resolve_url(self.db)

    def hardware(self) -> Hardware:
        from autotax.hardware import detect

        return detect(self.backend)

    def backends(self) -> list[str]:
        """The backends to include: the named one, or all. This machine need not have them."""
        from autotax.hardware import BACKENDS

        one_of("backend", self.backend, BACKENDS, guess=False)
        return [self.backend] if self.backend else list(BACKENDS)

    @property
    def again(self) -> str:
        """The options for another command: ` --backend cpu --db winners.db --load operator.py`, without a password."""
        from autotax.db.url import resolve_url, shown

        db = [] if self.db is None else [shown(resolve_url(self.db))]
        options = {"--backend": [self.backend] if self.backend else [], "--db": db, "--load": self.load or []}
        return "".join(f" {flag} {shlex.quote(value)}" for flag, values in options.items() for value in values)

    def store(self, *, create: bool) -> Store:
        from autotax.db import Store

        return Store.open(self.db, create=create)


command = ""
"""The current command, for its document; see `cli.app`."""
answers: TextIO | None = None
"""The stream of the document, while what modules from outside print goes to stderr."""
op: str | None = None
"""The operator that the command line names, if any; see `cli.app`."""


def print_document(content: dict[str, Any]) -> None:
    """Prints one JSON document on stdout. All commands have the same keys: schema_version, command, ok, about, results, error."""
    whole = {"schema_version": SCHEMA_VERSION, "command": command} | content
    print(_on_one_line(json.dumps(whole, indent=2, allow_nan=False)), file=answers or sys.stdout)


def _on_one_line(document: str) -> str:
    """Puts each list of numbers of the JSON on one line: samples would take thousands. JSON strings hold no line breaks."""
    return re.sub(r"\[\n\s*([\s\d.,eE+-]+?)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", document)


def seconds_of(text: str | None, option: str = "timeout") -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match:
        raise UsageError(f"{option} is {text!r}; allowed are times such as 90, 90s, 10m, 2h: give another --{option}")
    return float(match[1]) * SECONDS[match[2]]


def _microseconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise UsageError(f"skew is {text!r}; it must be a number of microseconds: give another --skew") from None


def names_of(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"variants is {text!r}; it must be names with commas between: give some as --variants")
    return names


def spelled(op: str, values: Mapping[str, Any]) -> str:
    """An operator and options: `all-gather-gemm --m 512 ...`."""
    return " ".join([op, *(f"{flags([name])} {value}" for name, value in values.items())])


def flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def require_readable(path: Path, advice: str) -> None:
    try:
        if not stat.S_ISFIFO(path.stat().st_mode):  # a pipe that is opened and closed is lost
            with path.open("rb"):
                pass
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): {advice}") from None
