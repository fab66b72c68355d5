"""The options of the commands, each defined once, and what they ask for: a problem, settings, a machine, a database.

Everything here that is wrong is a UsageError: one line that says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotax.conditions import Conditions
from autotax.errors import UsageError
from autotax.problem import OPERATORS, AllGatherGemm, FlashDecode, Problem, problem_from_dict

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
    output: Annotated[
        str | None, _word("replicated, or head_scatter: each rank its own heads; replicated unless given", FlashDecode.op)
    ] = None
    page: Annotated[int | None, _number("tokens of a page, 16 or 64; a contiguous cache unless given", FlashDecode.op)] = None
    dtype: Annotated[str | None, _word("bf16, fp16 or fp32; bf16 unless given")] = None
    world_size: Annotated[int | None, _number("ranks; unless given the GPUs present, 8 of a --target, or 2 CPU ranks")] = None

    @property
    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "op"}
        return {name: value for name, value in values.items() if value is not None}

    def problem(self, hardware: Hardware) -> Problem:
        if self.op is None:
            raise UsageError(f"no operator given; allowed are {', '.join(OPERATORS)}: name one, with its sizes")
        required = [f.name for f in fields(OPERATORS[self.op]) if f.default is MISSING] if self.op in OPERATORS else []
        if lacking := [name for name in required if name not in self.given]:
            raise UsageError(f"{self.op} lacks {flags(lacking)}; it needs {flags(required)}: give them all")
        return problem_from_dict({"op": self.op, "world_size": hardware.default_world_size} | self.given)

    def only_world_size(self, because: str) -> None:
        """Raises UsageError if anything but --world-size is given, which makes no sense `because`."""
        given = [f"operator {self.op}"] if self.op else []
        if given := given + [flags([name]) for name in self.given if name != "world_size"]:
            raise UsageError(f"{', '.join(given)} given {because}; allowed is --world-size: take the others out")


@dataclass(frozen=True)
class As:
    """As what the calls are deployed: the conditions of Conditions, usual ones unless given."""

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
class Of:
    """Of what: a file of problems, if none is named."""

    shapes: Shapes = None


@dataclass(frozen=True)
class Which(Of):
    """What is compared."""

    every_variant: Annotated[
        bool, typer.Option("--variants", help="a row for the best known config of every variant; on GPUs Flash Decode has them")
    ] = False


@dataclass(frozen=True)
class How:
    """How to search."""

    shapes: Shapes = None
    variants: Annotated[str | None, _word("search these alone, for instance pull,push; each problem those that it has")] = None
    trials: Annotated[int | None, _number("configs to measure for each problem; 60 unless given")] = None
    timeout: Annotated[str | None, _word("time for each problem: 90, 90s, 10m, 2h")] = None
    sampler: Annotated[str, typer.Option(help="tpe, random or gp")] = "tpe"
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
            "timeout_s": _seconds(self.timeout),
            "variants": _names(self.variants),
            "soak": self.soak,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        return Settings(sampler=self.sampler, resume=self.resume, **chosen)


@dataclass(frozen=True)
class Aim:
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
class Strictness:
    """What may answer a look-up."""

    allow_stale: Annotated[
        bool, typer.Option("--allow-stale", help="a winner measured elsewhere or with other software may answer")
    ] = False


@dataclass(frozen=True)
class To:
    """What is exported, and to where."""

    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", show_default=False)] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the JSON file to write", show_default=False)] = None
    anonymous: Annotated[bool, typer.Option("--anonymous", help="do not say who tuned it")] = False

    @property
    def operators(self) -> list[str]:
        if unknown := [op for op in self.ops or [] if op not in OPERATORS]:
            raise UsageError(f"operator is {unknown[0]!r}; allowed are {', '.join(OPERATORS)}: name these, or none for all")
        return list(dict.fromkeys(self.ops or []))

    @property
    def file(self) -> Path:
        if self.output is None:
            raise UsageError("no file given; a path is needed: give one as --output")
        return self.output


@dataclass(frozen=True)
class Onto:
    """What is shown on a page beside the database, and where the page goes."""

    compared: Annotated[list[Path] | None, typer.Argument(metavar="[COMPARE.json]...", show_default=False)] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write")] = Path("autotax-report.html")


@dataclass(frozen=True)
class From:
    """What is imported."""

    file: Annotated[Path | None, typer.Argument(metavar="FILE.json", show_default=False)] = None

    @property
    def path(self) -> Path:
        if self.file is None:
            raise UsageError("no file given; a file of `autotax export` is needed: name one")
        return self.file


@dataclass(frozen=True)
class Form:
    """The form of the answer: the same for every command."""

    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, nothing else")] = False

    def show(self, table: Callable[[], RenderableType]) -> None:
        """Prints a table, unless a document is wanted."""
        if not self.as_json:
            from rich.console import Console

            Console(width=None if sys.stdout.isatty() else LOG_WIDTH).print(table())

    def document(self, make: Callable[[], Any]) -> None:
        """Prints the document, if one is wanted."""
        if self.as_json:
            print(_on_one_line(json.dumps(make(), indent=2, allow_nan=False)))


@dataclass(frozen=True)
class Where(Form):
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


def _seconds(text: str | None) -> float | None:
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
