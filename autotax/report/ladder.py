"""The speed-up of each step of an operator's ladder, per shape, from the output of `autotax compare --json`:

    python -m autotax.report.ladder compare.json -o DIR        writes DIR/ladder.md and DIR/ladder.svg, prints the table

A step's ratio is the time of the step before it over its own: the median of the ratios within each round of the samples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotax.core.errors import MachineError, UsageError
from autotax.core.files import write_whole
from autotax.core.terminal import printable
from autotax.operators.registry import named, problem_from_dict
from autotax.report import taxes as compared
from autotax.report.formatting import microseconds, times
from autotax.report.taxes import Document, geometric_mean


@dataclass(frozen=True)
class Rung:
    """`us` is the latency of a variant. `ratio` is its speed-up over the step before it; None for the first."""

    variant: str
    us: float
    ratio: float | None


@dataclass(frozen=True)
class Ladder:
    """The verified steps of one shape, the first of which is bulk-synchronous."""

    shape: str
    steps: tuple[Rung, ...]
    rungs: tuple[str, ...]
    """All variants of the operator's ladder."""

    def step(self, variant: str) -> Rung | None:
        return next((step for step in self.steps if step.variant == variant), None)

    @property
    def whole(self) -> float:
        return self.steps[0].us / self.steps[-1].us


def read(path: Path) -> list[Ladder]:
    """The ladders of a file. Raises UsageError if it holds none."""
    if ladders := of(compared.read(path)):
        return ladders
    raise UsageError(f"file {path} holds no verified steps of a ladder: run `autotax compare --variants --json`")


def of(documents: Sequence[Document]) -> list[Ladder]:
    ladders = [_ladder(document) for document in documents]
    return [ladder for ladder in ladders if len(ladder.steps) > 1]


def _ladder(document: Document) -> Ladder:
    rows = {row["name"]: row for row in document["rows"] if row["verified"] and (row["latency_us"] or 0.0) > 0.0}
    rungs = [variant.name for variant in named(document["problem"]["op"]).ladder]
    present = [rows[variant] for variant in rungs if variant in rows]
    befores = [None, *present][: len(present)]
    steps = tuple(Rung(row["name"], row["latency_us"], _ratio(before, row)) for before, row in zip(befores, present, strict=True))
    whole = steps if steps and steps[0].variant == rungs[0] else ()
    return Ladder(problem_from_dict(document["problem"]).brief(), whole, tuple(rungs))


def _ratio(before: dict[str, Any] | None, row: dict[str, Any]) -> float | None:
    if before is None:
        return None
    ratios = [b / r for b, r in zip(before["rounds_us"], row["rounds_us"], strict=False) if b > 0 and r > 0]
    return statistics.median(ratios) if ratios else None


def _rungs(ladders: Sequence[Ladder]) -> list[str]:
    return list(dict.fromkeys(rung for ladder in ladders for rung in ladder.rungs))


def table(ladders: Sequence[Ladder]) -> list[list[str]]:
    """Lines of cells: the names; per shape the microseconds and the speed-up of each step; the geometric means."""
    variants = [variant for variant in _rungs(ladders) if any(ladder.step(variant) for ladder in ladders)]
    lines = [["shape", *variants, "all steps"]]
    for ladder in ladders:
        lines.append([ladder.shape, *(_cell(ladder.step(variant)) for variant in variants), times(ladder.whole)])
    steps = {variant: [step for ladder in ladders if (step := ladder.step(variant))] for variant in variants}
    means = [times(geometric_mean(step.ratio for step in steps[variant])) for variant in variants]
    lines.append(["geometric mean", *means, times(geometric_mean(ladder.whole for ladder in ladders))])
    return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head of the table; all columns but the first are figures."""
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], rule, *lines[1:]]) + "\n"


def _cell(step: Rung | None) -> str:
    if step is None:
        return "-"
    return microseconds(step.us) + (f" ({times(step.ratio)})" if step.ratio is not None else "")


def plot(ladders: Sequence[Ladder], background: str | None = None) -> str:
    """SVG: a row for each shape, on it a dot for each step at its time relative to bulk-synchronous."""
    from autotax.report import charts  # which imports Altair

    steps = [
        {
            "place": place, "relative": step.us / ladder.steps[0].us, "variant": step.variant,
            "description": f"{ladder.shape}, {step.variant}: {microseconds(step.us)} us",
        }
        for place, ladder in enumerate(ladders) for step in ladder.steps
    ]  # fmt: skip
    return charts.ladders([ladder.shape for ladder in ladders], steps, background)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a file that holds no ladder."""
    parser = argparse.ArgumentParser(prog="python -m autotax.report.ladder", description="what each step of a ladder won")
    parser.add_argument("file", type=Path, help="what `autotax compare --json` printed, of one problem or of many")
    parser.add_argument("-o", "--output", type=Path, default=Path(), help="folder for ladder.md and ladder.svg; made if missing")
    options = parser.parse_args(arguments)
    try:
        ladders = read(options.file)
        options.output.mkdir(parents=True, exist_ok=True)
        write_whole(options.output / "ladder.md", markdown(table(ladders)))
        write_whole(options.output / "ladder.svg", plot(ladders, "white"))
    except (UsageError, MachineError, OSError) as error:
        print(f"autotax: {printable(str(error))}", file=sys.stderr)
        return 2
    print(printable(markdown(table(ladders))), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
