"""The options of the commands, each defined once: a problem, settings, a machine, a database, the form of the answer.

`check` of each group finds what is wrong without looking at the machine, so that a typing error is reported at once. All
errors are UsageErrors: one line with what was given, what is allowed and what to do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError, did_you_mean
from autotax.core.files import refuse_unwritable
from autotax.core.problem import MAX_WORLD_SIZE, Problem, about
from autotax.core.settings import SAMPLERS, Settings, as_deployed
from autotax.core.terminal import console
from autotax.engines.architectures import Architecture, read_architecture, tokens_of
from autotax.operators import operators, problem_from_dict
from autotax.operators.problem_files import read_shapes

# What needs torch, a database or a table is imported by the method that needs it: `--help` comes at once.
if TYPE_CHECKING:
    from rich.console import RenderableType

    from autotax.db import Store
    from autotax.hardware import Hardware

MAX_SEED = 2**32 - 1
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
SURVEYED = 8
"""Configs of each variant that are compiled."""
SCHEMA_VERSION = 1
"""Of the documents that `--json` prints. It grows when a key changes its meaning or goes away."""
TARGETS = ("cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950")
"""The GPUs that `autotax compile` knows: `kernels.offline.TARGETS`, which would take seconds to import."""
USUAL_TOKENS = "1,16,64...8192"
SORTS = ("number", "latency", "variant", "status")


def whole(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(meaning: str, *, panel: str | None = None, hidden: bool = False) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel, parser=whole, metavar="INT", hidden=hidden)


def _word(meaning: str, metavar: str = "TEXT", *, panel: str | None = None, hidden: bool = False) -> Any:
    return typer.Option(help=meaning, show_default=False, rich_help_panel=panel, metavar=metavar, hidden=hidden)


def _flag(name: str, meaning: str) -> Any:
    return typer.Option(name, help=meaning, show_default=False)


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
        """The number of ranks, if it was given."""
        found: int | None = self.given.get("world_size")
        return found

    @staticmethod
    def options(op: str | None) -> dict[str, tuple[Any, Any]]:
        """The type and the default of each option by its name, for a command line that names the operator `op`.

        With an operator these are the fields of its problem. Without one they are the fields of all operators; those that not
        all operators share are hidden in the help.
        """
        there = operators()
        named = typer.Argument(metavar="OP", help=f"The operator: {', '.join(there)}.", show_default=False, autocompletion=_ops)
        found: dict[str, tuple[Any, Any]] = {"op": (Annotated[str | None, named], None)}
        chosen = [there[op]] if op else list(there.values())
        users: dict[str, list[Field[Any]]] = {}
        for operator in chosen:
            for each in fields(operator.problem):
                users.setdefault(each.name, []).append(each)
        for name, kinds in users.items():
            told = "; ".join(dict.fromkeys(map(_meaning, kinds)))
            panel, hidden = f"Problem: {op}" if op else "Problem", len(kinds) < len(chosen)
            if all(map(_is_number, kinds)):
                found[name] = (Annotated[int | None, _number(told, panel=panel, hidden=hidden)], None)
            else:
                found[name] = (Annotated[str | None, _word(told, panel=panel, hidden=hidden)], None)
        return found

    def check(self) -> None:
        """Raises UsageError for an operator that is unknown, sizes that lack and values that are not allowed."""
        if self.op is not None:
            self._problem(1)

    def problem(self, hardware: Hardware) -> Problem:
        self.require()
        return self._problem(hardware.default_world_size)

    def require(self) -> None:
        """Raises UsageError if no operator was given."""
        if self.op is None:
            raise UsageError(f"no operator given; allowed are {', '.join(operators())}: name one, with its sizes")

    def _problem(self, world_size: int) -> Problem:
        """The problem; on this number of ranks unless that was given."""
        kind = self._kind()
        if kind is None:
            guess = did_you_mean(self.op or "", operators())
            raise UsageError(f"operator is {self.op!r}; allowed are {', '.join(operators())}: {guess or 'name one of these'}")
        required = kind.required()
        if lacking := [name for name in required if name not in self.given]:
            raise UsageError(f"{self.op} lacks {flags(lacking)}; it needs {flags(required)}: give them all")
        given = {name: self._typed(name, value) for name, value in self.given.items()}
        return problem_from_dict({"op": self.op, "world_size": world_size} | given)

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


def _ops() -> list[str]:
    return list(operators())


def _is_number(of: Field[Any]) -> bool:
    return "allowed" not in of.metadata or isinstance(of.metadata["allowed"][0], int)


def _meaning(of: Field[Any]) -> str:
    """What an option means, with its default."""
    if of.name == "world_size":
        return "Number of ranks. Default: the GPUs present, or 2 CPU ranks."
    told = about(of)
    if "allowed" not in of.metadata:
        told = told[:1].upper() + told[1:]
    return f"{told}. " + ("Required." if of.default is MISSING else f"Default: {of.default}.")


@dataclass(frozen=True)
class DeployOptions:
    """Conditions to tune for; defaults depend on the hardware."""

    PANEL: ClassVar[str] = "Conditions of calls"

    mode: Annotated[
        str | None, _word(
            "How calls are launched and measured: in-place (in a CUDA graph, between products), graph (call behind call) or "
            "eager. Default: in-place on GPUs (graph with --skew), eager on CPU ranks."
        ),
    ] = None
    l2: Annotated[str | None, _word("Whether calls find their inputs in the L2: cold or warm. Default: cold on GPUs.")] = None
    skew: Annotated[
        str | None, _word("Ranks arrive at random times, up to US microseconds apart. Default: 0.", metavar="US")
    ] = None

    def check(self) -> None:
        """Raises UsageError for values that no machine allows."""
        self._asked(Conditions())

    @property
    def given(self) -> bool:
        """Whether any condition was given."""
        return (self.mode, self.l2, self.skew) != (None, None, None)

    def conditions(self, hardware: Hardware) -> Conditions:
        return as_deployed(self._asked(Conditions.usual(hardware.on_gpu)), hardware)

    def _asked(self, usual: Conditions) -> Conditions:
        given: dict[str, Any] = {"mode": self.mode, "l2": self.l2, "skew_us": _microseconds(self.skew)}
        if self.mode is None and given["skew_us"]:
            usual = usual.searched
        return replace(usual, **{name: value for name, value in given.items() if value is not None})


Shapes = Annotated[
    Path | None, _word("A TOML file of many problems, with an array of tables for each operator.", metavar="FILE.toml")
]


@dataclass(frozen=True)
class ShapesOptions:
    """A file of problems, if none is named."""

    PANEL: ClassVar[str] = "Problems"

    shapes: Shapes = None

    def check(self) -> None:
        """Raises UsageError for a file that cannot be read, and for what in it is wrong on any machine."""
        if self.shapes is not None:
            read_shapes(self.shapes, 1)


@dataclass(frozen=True)
class CompareOptions(ShapesOptions):
    """What is compared."""

    every_variant: Annotated[bool, _flag("--variants", "Add a row for every variant, with its best known config.")] = False


def _check_variants(names: Sequence[str] | None) -> None:
    """Raises UsageError for a variant that no operator has. Which of them a problem has depends on the machine."""
    known = dict.fromkeys(name for operator in operators().values() for name in operator.variants)
    for name in names or ():
        if name not in known:
            guess = did_you_mean(name, known) or "give some of these as --variants"
            raise UsageError(f"variant is {name!r}; allowed are {', '.join(known)}: {guess}")


@dataclass(frozen=True)
class SearchOptions(ShapesOptions):
    """How to search."""

    PANEL: ClassVar[str] = "Search"

    variants: Annotated[
        str | None,
        _word("Search only these variants. Variants that an operator lacks are ignored. Default: all.", metavar="A,B,..."),
    ] = None
    trials: Annotated[int | None, _number("Configs to measure for each problem. Default: 60.")] = None
    effort: Annotated[
        str | None,
        _word("quick, normal, full: at most 24, 60, 300 trials; --sampler gp may end the first two early.", metavar="NAME"),
    ] = None
    timeout: Annotated[str | None, _word("Time limit for each problem: 90, 90s, 10m, 2h. Default: none.", metavar="TIME")] = None
    sampler: Annotated[
        str | None,
        _word("The sampler: gp, tpe or random. Default: gp where a prior was learnt (H200), else tpe.", metavar="NAME"),
    ] = None
    seed: Annotated[int | None, _number("Seed of the sampler. Default: 0.")] = None
    paired: Annotated[
        bool, _flag("--paired", "Measure each trial in turn with the best so far: finer figures, fewer trials a minute.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on from the trials in the database, or search anew.")
    ] = True
    soak: Annotated[
        int | None,
        _number("Replays that each finalist must pass with delayed ranks. 0: none. Default: 2000 on GPUs, 20 on CPU ranks."),
    ] = None
    misses: Annotated[
        bool, _flag("--misses", "Tune the problems that programs looked up without success, most frequent first.")
    ] = False

    def check(self) -> None:
        """Raises UsageError for settings that no problem and no machine allows."""
        if not self.misses:  # which the command refuses beside a file, whatever is in it
            super().check()
        self.settings()
        _check_variants(_names(self.variants))

    def settings(self) -> Settings:
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}: give another --seed")
        if self.sampler is not None and self.sampler not in SAMPLERS:
            guess = did_you_mean(self.sampler, SAMPLERS) or "give one of these as --sampler"
            raise UsageError(f"sampler is {self.sampler!r}; allowed are {', '.join(SAMPLERS)}: {guess}")
        given: dict[str, Any] = {
            "trials": self.trials,
            "seed": self.seed,
            "timeout_s": seconds_of(self.timeout),
            "variants": _names(self.variants),
            "soak": self.soak,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        chosen |= {"sampler": self.sampler, "resume": self.resume, "paired": self.paired}
        if self.effort is None and self.trials is not None:
            return Settings(**chosen)
        return Settings.of_effort(self.effort or "normal", **chosen)


@dataclass(frozen=True)
class ModelOptions:
    """A model whose problems are tuned, and whether they are only listed."""

    PANEL: ClassVar[str] = "Model"
    BESIDE: ClassVar[tuple[str, ...]] = ("dtype", "kv_len")
    """Options of problems that a model takes too."""

    model: Annotated[
        Path | None,
        _word("Tune what the model of this Hugging Face config needs at --tp ranks.", metavar="CONFIG.json"),
    ] = None
    tp: Annotated[int | None, _number("Ranks that share each layer of --model. Default: the GPUs present.")] = None
    tokens: Annotated[
        str | None, _word("Numbers of tokens for --model. Default: 1,16,64...8192, that is 64, 256 and so on.", metavar="M,M...M")
    ] = None
    train: Annotated[bool, _flag("--train", "Add the products of the backward of --model.")] = False
    split: Annotated[bool, _flag("--split", "Q, K and V, and gate and up, of --model are products of their own.")] = False
    dry_run: Annotated[bool, _flag("--dry-run", "Print the plan and the expected time, and tune nothing.")] = False

    def check(self) -> None:
        """Raises UsageError for a config or numbers of tokens that no machine allows."""
        given = {"tp": self.tp, "tokens": self.tokens, "train": self.train or None, "split": self.split or None}
        if self.model is None and (named := [name for name, value in given.items() if value is not None]):
            raise UsageError(f"{flags(named)} given without --model: name a config.json, or take the others out")
        if self.model is not None:
            self.architecture(self.tp or 1)
            tokens_of(self.tokens or USUAL_TOKENS)

    def architecture(self, ranks: int) -> Architecture:
        if not 1 <= ranks <= MAX_WORLD_SIZE:
            raise UsageError(f"tp is {ranks}; it must be a whole number from 1 to {MAX_WORLD_SIZE}: give another --tp")
        assert self.model is not None
        return read_architecture(self.model, ranks, split=self.split)

    def problems(self, what: ProblemOptions, how: SearchOptions, hardware: Hardware) -> tuple[Architecture, dict[Problem, str]]:
        """The architecture, and its problems with the layers that ask for them. Raises UsageError for others beside it."""
        given = {"shapes": how.shapes, "misses": how.misses or None, **what.given}
        others = [flags([name]) for name, value in given.items() if value is not None and name not in self.BESIDE]
        if what.op is not None:
            others.insert(0, f"operator {what.op}")
        if others:
            raise UsageError(f"{', '.join(others)} given with --model, which has its own problems: take the others out")
        found = self.architecture(self.tp if self.tp is not None else hardware.default_world_size)
        tokens = tokens_of(self.tokens or USUAL_TOKENS)
        own = {name: what.given.get(name) for name in self.BESIDE}
        return found, found.problems(tokens, train=self.train, **own)


@dataclass(frozen=True)
class RefreshOptions(ShapesOptions):
    """Which winners are proven again."""

    PANEL: ClassVar[str] = "Refresh"

    everything: Annotated[bool, _flag("--all", "Include winners that still hold.")] = False
    soak: Annotated[
        int | None,
        _number("Replays that each config must pass with delayed ranks. 0: none. Default: 2000 on GPUs, 20 on CPU ranks."),
    ] = None
    timeout: Annotated[
        str | None, _word("Begin no further problem after this time: 90, 90s, 10m, 2h. Default: none.", metavar="TIME")
    ] = None

    def check(self) -> None:
        """Raises UsageError for settings that no machine allows."""
        super().check()
        Settings(soak=self.soak, timeout_s=seconds_of(self.timeout))


@dataclass(frozen=True)
class TargetOptions:
    """What is compiled, and for which GPU."""

    PANEL: ClassVar[str] = "Target"

    target: Annotated[str | None, _word(f"The GPU: {', '.join(TARGETS)}. Required. --world-size is then 8 by default.")] = None
    variants: Annotated[str | None, _word("Compile only these variants. Default: all.", metavar="A,B,...")] = None
    trials: Annotated[int | None, _number(f"Configs of each variant, seeds first. Default: {SURVEYED}.")] = None

    def check(self) -> None:
        """Raises UsageError for a target or a variant that there is not."""
        if self.target not in TARGETS:
            given = "no target given" if self.target is None else f"target is {self.target!r}"
            guess = did_you_mean(self.target or "", TARGETS) or "give one of these as --target"
            raise UsageError(f"{given}; allowed are {', '.join(TARGETS)}: {guess}")
        self.settings()
        _check_variants(_names(self.variants))

    def hardware(self) -> Hardware:
        """A stand-in for the target."""
        from autotax.kernels.offline import known_hardware

        return known_hardware(self.target or "")

    def settings(self) -> Settings:
        return Settings(trials=SURVEYED if self.trials is None else self.trials, variants=_names(self.variants))


@dataclass(frozen=True)
class LookupOptions:
    """What may answer a look-up, and how the answer is written."""

    PANEL: ClassVar[str] = "Answer"

    allow_stale: Annotated[
        bool, _flag("--allow-stale", "Let a winner answer that was measured elsewhere or with other software.")
    ] = False
    pin: Annotated[bool, _flag("--pin", "Print only the config, as Python to paste into `config=`.")] = False


@dataclass(frozen=True)
class ListOptions:
    """The form of a list."""

    PANEL: ClassVar[str] = "List"

    csv: Annotated[bool, _flag("--csv", "Print comma-separated values, with a line of column names first.")] = False


@dataclass(frozen=True)
class TrialOptions(ListOptions):
    """Which trials are listed, and in which order."""

    PANEL: ClassVar[str] = "List"

    top: Annotated[int | None, _number("List only the first INT trials of each run. Default: all.")] = None
    sort: Annotated[
        str | None, _word(f"Order: {', '.join(SORTS)}. Default: latency with --top, else number.", metavar="KEY")
    ] = None
    status: Annotated[
        str | None, _word("List only trials with this status, for instance ok or wrong_result. Default: all.", metavar="NAME")
    ] = None
    variant: Annotated[str | None, _word("List only trials of this variant. Default: all.", metavar="NAME")] = None

    def check(self) -> None:
        """Raises UsageError for a number, an order, a status or a variant that there is not."""
        from autotax.core.settings import TRIAL_STATUSES

        if self.top is not None and self.top < 1:
            raise UsageError(f"top is {self.top}; it must be at least 1: give another --top")
        for name, given, allowed in (("sort", self.sort, SORTS), ("status", self.status, TRIAL_STATUSES)):
            if given is not None and given not in allowed:
                guess = did_you_mean(given, allowed) or f"give one of these as --{name}"
                raise UsageError(f"{name} is {given!r}; allowed are {', '.join(allowed)}: {guess}")
        _check_variants([self.variant] if self.variant is not None else None)


@dataclass(frozen=True)
class TraceOptions:
    """Which config is traced, and where the timeline goes."""

    PANEL: ClassVar[str] = "Trace"

    variant: Annotated[
        str | None,
        _word("Trace the best known config of this variant. Default: the config that a look-up answers.", metavar="NAME"),
    ] = None
    # Not --output, which is what some operators ask for.
    file: Annotated[Path, typer.Option("--file", "-o", help="The file to write.", metavar="FILE.json")] = Path(
        "autotax-trace.json"
    )
    kernels: Annotated[
        bool,
        _flag("--kernels", "Show kernels and copies alone. Default on NVIDIA: also where their programs wait, which slows them."),
    ] = False

    def check(self) -> None:
        """Raises UsageError for a variant that there is not, and for a file that cannot be written."""
        _check_variants([self.variant] if self.variant is not None else None)
        refuse_unwritable(self.file)


@dataclass(frozen=True)
class OperatorsOptions:
    """Operators, for commands that list or write what there is of each."""

    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP...", help="Operators. Default: all.", show_default=False, autocompletion=_ops),
    ] = None

    def check(self) -> None:
        """Raises UsageError for an operator that there is not."""
        if unknown := [op for op in self.ops or [] if op not in operators()]:
            guess = did_you_mean(unknown[0], operators()) or "name these, or none for all"
            raise UsageError(f"operator is {unknown[0]!r}; allowed are {', '.join(operators())}: {guess}")

    @property
    def operators(self) -> list[str]:
        """The operators that are named, or else all."""
        return list(dict.fromkeys(self.ops or operators()))


@dataclass(frozen=True)
class ExportOptions(OperatorsOptions):
    """What is exported, and to where."""

    PANEL: ClassVar[str] = "Export"

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. Required.", show_default=False, metavar="FILE.json"),
    ] = None
    anonymous: Annotated[bool, _flag("--anonymous", "Leave out who tuned each winner.")] = False

    def check(self) -> None:
        """Raises UsageError for an operator that there is not, or if no file is given."""
        super().check()
        if self.output is None:
            raise UsageError("no file given; a path is needed: give one as --output")

    @property
    def file(self) -> Path:
        assert self.output is not None
        return self.output


@dataclass(frozen=True)
class ReportOptions:
    """What is shown on a page beside the database, and where the page goes."""

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
            _readable(path, "give another")


@dataclass(frozen=True)
class ImportOptions:
    """What is imported."""

    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE.json", help="A file that `autotax export` wrote. Required.", show_default=False),
    ] = None

    def check(self) -> None:
        """Raises UsageError for a file that cannot be read, or if none is given."""
        if self.file is None:
            raise UsageError("no file given; a file of `autotax export` is needed: name one")
        _readable(self.file, "nothing was imported; give a file of `autotax export`")

    @property
    def path(self) -> Path:
        assert self.file is not None
        return self.file


def _readable(path: Path, advice: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): {advice}") from None


@dataclass(frozen=True)
class OutputOptions:
    """The form of the answer: the same for every command."""

    PANEL: ClassVar[str] = "Output"

    as_json: Annotated[bool, _flag("--json", "Print one JSON document on stdout and nothing else.")] = False
    load: Annotated[
        list[str] | None,
        typer.Option("--load", metavar="MODULE", help="A module or .py file with operators or variants.", show_default=False),
    ] = None  # loaded before the options are made: see cli.main

    def show(self, table: Callable[[], RenderableType]) -> None:
        """Prints a table, unless a document is wanted. In a pipe or a file it is as wide as COLUMNS says, or as its content."""
        if self.as_json:
            return
        shown, columns = table(), os.environ.get("COLUMNS", "")
        if not sys.stdout.isatty():
            from autotax.report.formatting import natural_width  # Rich is loaded only where a table is printed

            console(width=int(columns) if columns.isdecimal() and int(columns) else natural_width(shown)).print(shown)
        else:
            console().print(shown)

    def plain(self, text: str) -> None:
        """Prints text as it is, unless a document is wanted."""
        if not self.as_json:
            print(text)

    def document(
        self, make: Callable[[], Sequence[Any]], *, ok: bool = True, about: Mapping[str, Any] | None = None
    ) -> None:
        """Prints the document, if one is wanted: `make` gives its results, `about` says what they have in common."""
        if self.as_json:
            print_document({"ok": ok, "about": dict(about or {}), "results": list(make()), "error": None})


@dataclass(frozen=True)
class MachineOptions(OutputOptions):
    """The machine and the database: the same for every command that has to do with either."""

    PANEL: ClassVar[str] = "Machine and output"

    backend: Annotated[str | None, _word("The kind of ranks: cuda, rocm or cpu. Default: what this machine has.")] = None
    db: Annotated[
        str | None,
        _word("The database: a path or an SQLAlchemy URL. Default: $AUTOTAX_DB, else a file in your data folder.", metavar="DB"),
    ] = None

    def check(self) -> None:
        """Raises UsageError for a backend that there is not, and for a database that nothing can be."""
        self.backends()
        if self.db is not None:
            from autotax.db.url import resolve_url

            resolve_url(self.db)

    def hardware(self) -> Hardware:
        from autotax.hardware import detect

        return detect(self.backend)

    def backends(self) -> list[str]:
        """Backends whose winners are meant: the one that is named, else all. They need not be on this machine."""
        from autotax.hardware import BACKENDS

        if self.backend is not None and self.backend not in BACKENDS:
            raise UsageError(f"backend is {self.backend!r}; allowed are {', '.join(BACKENDS)}: give one of these as --backend")
        return [self.backend] if self.backend else list(BACKENDS)

    @property
    def again(self) -> str:
        """The same, for another command: ` --backend cpu --db winners.db --load operator.py`, with no password of a database."""
        from autotax.db.url import resolve_url, shown

        db = [] if self.db is None else [shown(resolve_url(self.db))]
        given = {"--backend": [self.backend] if self.backend else [], "--db": db, "--load": self.load or []}
        return "".join(f" {flag} {shlex.quote(value)}" for flag, values in given.items() for value in values)

    def store(self, *, create: bool) -> Store:
        from autotax.db import Store

        return Store.open(self.db, create=create)


command = ""
"""The command that is carried out, for its document; see `commands.parsing`."""


def print_document(told: dict[str, Any]) -> None:
    """Prints one JSON document on stdout. All commands have the same keys: schema_version, command, ok, about, results, error."""
    whole = {"schema_version": SCHEMA_VERSION, "command": command} | told
    print(_on_one_line(json.dumps(whole, indent=2, allow_nan=False)))


def _on_one_line(document: str) -> str:
    """The JSON with each list of numbers on one line: samples would take thousands. No text of JSON holds a line break."""
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
