"""`replay` searches on recorded landscapes, and `record` makes one. `--help` lists their options.

    python -m results.search record OP ... --file landscapes.json.gz
    python -m results.search replay landscapes.json.gz
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotax.cli import app
from autotax.cli.app import Command
from autotax.cli.messages import say
from autotax.cli.options import DeployOptions, MachineOptions, OutputOptions, ProblemOptions, whole
from autotax.core.errors import UsageError
from autotax.core.files import refuse_unwritable
from autotax.operators import operators

if TYPE_CHECKING:
    from rich.table import Table

    from results.search.landscapes import Landscapes
    from results.search.replay import Landscape, Summary

MOST = 10_000


def _count(meaning: str) -> Any:
    return typer.Option(help=meaning, parser=whole, metavar="INT")


def _checked(name: str, value: int) -> int:
    if not 1 <= value <= MOST:
        raise UsageError(f"{name} is {value}; it must be from 1 to {MOST}: give another --{name}")
    return value


@dataclass(frozen=True)
class ReplayOptions:
    """Landscapes, seeds and budgets of a replay."""

    files: Annotated[list[Path] | None, typer.Argument(metavar="[LANDSCAPES.json.gz]...", show_default=False)] = None
    op: Annotated[str | None, typer.Option(help="Replay only problems of this operator.", show_default=False)] = None
    models: Annotated[
        Path | None,
        typer.Option(help="A folder that results/search/train.py made: held-out priors, surrogates.", show_default=False),
    ] = None
    landscape: Annotated[str, typer.Option(help="recorded points, or a surrogate of --models: boosted or forest.")] = "recorded"
    trials: Annotated[int, _count("Trials of each search.")] = 60
    seeds: Annotated[int, _count("Searches of each problem.")] = 3
    ahead: Annotated[int, _count("Configs asked for in advance.")] = 8


def replay(of: ReplayOptions, form: OutputOptions) -> int:
    """Search again on recorded trials, by the tuner's search and by others; nothing is measured."""
    trials, seeds, ahead = (_checked(name, getattr(of, name)) for name in ("trials", "seeds", "ahead"))
    if not of.files:
        raise UsageError("no file given; a file of landscapes is needed, such as `record` makes: name one")
    if of.op is not None and of.op not in operators():
        raise UsageError(f"operator is {of.op!r}; allowed are {', '.join(operators())}: give one of these as --op")
    from results.search import landscapes
    from results.search import replay as replays
    from results.search.held_out_priors import held_out

    grounds = [ground for path in of.files for ground in _grounds(landscapes.read(path), of)]
    if not grounds:
        raise UsageError(f"the files hold no problem with {replays.FEWEST} recorded configs and a baseline: record more")
    if of.models is None:
        say("no --models given: searches have no prior, since the shipped ones have seen such problems")
    summaries = []
    for name, strategy in replays.STRATEGIES.items():
        played = [
            replays.play(
                on, strategy, trials, seed, ahead, held_out(of.models, on.problem, on.hardware) if of.models else None
            )
            for on in grounds
            for seed in range(seeds)
        ]
        summaries.append(replays.Summary.of(name, played, trials))
    form.show(lambda: _table(summaries, len(grounds), of.landscape))
    form.document(lambda: _documents(summaries), about=_about(grounds, of))
    return 0


def _grounds(file: Landscapes, what: ReplayOptions) -> Iterator[Landscape]:
    from results.search import replay as replays
    from results.search.held_out_priors import trees_of

    allowed = (replays.RECORDED, "boosted", "forest")
    if what.landscape not in allowed:
        raise UsageError(f"landscape is {what.landscape!r}; allowed are {', '.join(allowed)}: give one of these as --landscape")
    for key in file.measured():
        op = key.partition("/")[0]
        if what.op is None or op == what.op:
            if what.landscape == replays.RECORDED:
                made = replays.recorded(file, key)
            elif what.models is None:
                raise UsageError("a surrogate needs --models, a folder that results/search/train.py made: give one")
            else:
                made = replays.surrogate(file, key, what.landscape, trees_of(what.models, op, what.landscape))
            if made:
                yield made


def _table(summaries: list[Summary], problems: int, kind: str) -> Table:
    from rich.table import Table

    first = summaries[0]
    table = Table(title=f"{problems} problems, {kind}; {first.searches} searches of {first.trials} trials; median / 95 %")
    for column in ("search", "trials to 1 %", "trials to 3 %", "loss after 12", "loss after 16"):
        table.add_column(column)
    for summary in summaries:
        counts = (" / ".join(f"{x:g}" if x < math.inf else f">{summary.trials}" for x in ends)
                  for ends in (summary.to_1_percent, summary.to_3_percent))  # fmt: skip
        losses = (" / ".join(f"{x:.1%}" for x in ends) for ends in (summary.loss_after_12, summary.loss_after_16))
        table.add_row(summary.strategy, *counts, *losses)
    return table


def _documents(summaries: list[Summary]) -> list[dict[str, Any]]:
    def finite(summary: Summary) -> dict[str, Any]:
        document = asdict(summary)
        return {k: [None if x == math.inf else x for x in v] if isinstance(v, tuple) else v for k, v in document.items()}

    return [finite(summary) for summary in summaries]


def _about(grounds: list[Landscape], what: ReplayOptions) -> dict[str, Any]:
    """Describes the landscapes. The error of a surrogate is its error of log latencies on held-out configs."""
    errors = {on.problem.op: on.error for on in grounds if on.error}
    problems = [on.problem.to_dict() for on in grounds]
    how = {"landscape": what.landscape, "ahead": what.ahead, "seeds": what.seeds}
    return how | {"surrogate_error": errors, "problems": problems}


@dataclass(frozen=True)
class RecordOptions:
    """The number of recorded configs, and the file."""

    trials: Annotated[int, _count("Configs to measure: seeds, then valid ones at random.")] = 300
    seed: Annotated[int, _count("Seed of the configs at random.")] = 0
    file: Annotated[Path | None, typer.Option("--file", "-o", help="The file to write.", show_default=False)] = None


def record(what: ProblemOptions, deployed: DeployOptions, how: RecordOptions, where: MachineOptions) -> int:
    """Measure a dense sample of one problem's configs, and write it as a landscape for `replay`."""
    what.require()
    if how.file is None:
        raise UsageError("no file given; a path is needed, such as landscapes.json.gz: give one as --file")
    refuse_unwritable(how.file)
    trials = _checked("trials", how.trials)
    from autotax.api import ranks
    from autotax.hardware import check_problems
    from results.search.record import record as make

    hardware = where.hardware()
    problem = what.problem(hardware)
    check_problems([problem], hardware)
    with ranks(hardware, problem.world_size, how.seed) as runner:
        counts = make(problem, hardware, runner, runner.environment, deployed.conditions(hardware), trials, how.seed, how.file)
    tally = ", ".join(f"{count} {status}" for status, count in counts.items())
    ok = bool(counts.get("ok"))
    where.plain(f"{how.file}: {sum(counts.values())} configs of {problem} ({tally})")
    where.document(lambda: [{"file": str(how.file), "problem": problem.to_dict(), "statuses": counts}], ok=ok)
    return 0 if ok else 1


COMMANDS = {
    "replay": Command(replay, app.CHECKING, ["replay landscapes.json.gz --op flash-decode"]),
    "record": Command(record, app.CHECKING, ["record PROBLEM --file landscapes.json.gz"]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the two commands and returns its exit code, as those of `autotax` do."""
    return app.main(arguments, COMMANDS, "python -m results.search")


if __name__ == "__main__":
    sys.exit(main())
