"""`autotax tune`: search for the fastest config of each problem, prove it and store it."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from autotax.cli.messages import INTERRUPTED, closing, public_url, say
from autotax.cli.options import (
    DeployOptions,
    MachineOptions,
    ProblemOptions,
    SearchOptions,
    flag,
    flags,
    number,
    one_of,
    spelled,
    word,
)
from autotax.cli.problem_selection import (
    CPU_PAIR_TRIALS,
    GPU_PAIR_TRIALS,
    expected_on_cpu,
    jobs_of,
    missed,
    problems_of,
    usual_pair,
    warn_of_slow_ranks,
)
from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.core.problem import MAX_WORLD_SIZE, Problem
from autotax.engines.architectures import ASKED, Architecture, asked_by, read_architecture, tokens_of
from autotax.hardware import absent
from autotax.operators import of as operator_of
from autotax.operators.scaled import SCALES_OF

if TYPE_CHECKING:
    from rich.table import Table

    from autotax.cli.problem_selection import Job
    from autotax.db import Store
    from autotax.hardware import Hardware
    from autotax.runner import LiveRunner
    from autotax.tuner import Verdict

USUAL_TOKENS = "1,16,64...8192"
PACES = Path(__file__).parents[1] / "templates/paces.json"
"""Seconds for a trial by device and operator, finals included, from all recorded runs: made by results/paces.py."""
TRIAL_S = 0.5
"""Seconds for a trial of an operator without recorded runs."""
HERE, CPU, GUESS = "the runs recorded in the database", "a laptop's CPU ranks", f"a guess of {TRIAL_S} s a trial"


@dataclass(frozen=True)
class ModelOptions:
    """A model whose problems are tuned, and whether they are only listed."""

    PANEL: ClassVar[str] = "Model"
    BESIDE: ClassVar[tuple[str, ...]] = ("dtype", "kv_len", "quantize")
    """Options of problems that may also be given with a model."""

    model: Annotated[
        Path | None,
        word("Tune what the model of this Hugging Face config needs at --tp ranks.", metavar="CONFIG.json"),
    ] = None
    tp: Annotated[int | None, number("Ranks that share each layer of --model. Default: the GPUs present.")] = None
    tokens: Annotated[
        str | None, word("Numbers of tokens for --model. Default: 1,16,64...8192, that is 64, 256 and so on.", metavar="M,M...M")
    ] = None
    train: Annotated[bool, flag("--train", "Add the products of the backward of --model.")] = False
    split: Annotated[bool, flag("--split", "Q, K and V, and gate and up, of --model are products of their own.")] = False
    engine: Annotated[
        str | None,
        typer.Option("--for", help="Only what the plugin of vllm, sglang or torch asks for. Needs --model.", metavar="NAME"),
    ] = None
    dry_run: Annotated[bool, flag("--dry-run", "Print the plan and the expected time, and tune nothing.")] = False
    hardware: Annotated[
        str | None, word("Plan for a machine that is not here, as h100x8. Needs --dry-run.", metavar="NAME")
    ] = None

    def check(self) -> None:
        values = {"tp": self.tp, "tokens": self.tokens, "train": self.train or None, "split": self.split or None}
        values["for"] = self.engine
        if self.model is None and (names := [name for name, value in values.items() if value is not None]):
            raise UsageError(f"{flags(names)} given without --model: name a config.json, or take the others out")
        one_of("for", self.engine, ASKED, guess=False)
        if self.hardware is not None:
            if not self.dry_run:
                raise UsageError("--hardware given without --dry-run; another machine can only be planned for: add --dry-run")
            absent(self.hardware)
        if self.model is not None:
            self.architecture(self.tp or 1)
            self.numbers_of_tokens()

    def numbers_of_tokens(self) -> tuple[int, ...]:
        return tokens_of(USUAL_TOKENS if self.tokens is None else self.tokens)

    def architecture(self, ranks: int, quantize: str | None = None) -> Architecture:
        if not 1 <= ranks <= MAX_WORLD_SIZE:
            raise UsageError(f"tp is {ranks}; it must be a whole number from 1 to {MAX_WORLD_SIZE}: give another --tp")
        assert self.model is not None
        return read_architecture(self.model, ranks, split=self.split, train=self.train, quantize=quantize)

    def problems(self, what: ProblemOptions, how: SearchOptions, hardware: Hardware) -> tuple[Architecture, dict[Problem, str]]:
        """The architecture, and its problems with the layers that need them. Raises UsageError if others are given, too."""
        conflicting = {"shapes": how.shapes, "misses": how.misses or None, **what.given}
        others = [flags([name]) for name, value in conflicting.items() if value is not None and name not in self.BESIDE]
        if what.op is not None:
            others.insert(0, f"operator {what.op}")
        if others:
            raise UsageError(f"{', '.join(others)} given with --model, which has its own problems: take the others out")
        dtype, kv_len, quantize = (what.given.get(name) for name in self.BESIDE)
        one_of("quantize", quantize, SCALES_OF, "give --dtype bf16 for weights that are not FP8")
        if quantize and dtype not in (None, "e4m3"):
            raise UsageError(f"--quantize given with --dtype {dtype}; only e4m3 takes it: take one of the two out")
        architecture = self.architecture(self.tp if self.tp is not None else hardware.default_world_size, quantize)
        if dtype == "e4m3" and not architecture.quantize:
            lacks = f"--dtype e4m3 given with {self.model}, which states no FP8 weights that plugins take"
            raise UsageError(f"{lacks}: add --quantize row, as vLLM does with --quantization fp8, or --quantize block or static")
        dtype = None if dtype == "e4m3" else dtype
        problems = architecture.problems(self.numbers_of_tokens(), train=self.train, dtype=dtype, kv_len=kv_len)
        return architecture, asked_by(self.engine, problems) if self.engine else problems


def tune(what: ProblemOptions, of: ModelOptions, deployed: DeployOptions, how: SearchOptions, where: MachineOptions) -> int:
    """Find the fastest config, prove it and store it.

    Without an operator: tune and compare one example problem of each operator, sized for this machine.
    """
    examples = what.op is None and how.shapes is None and not how.misses and of.model is None
    if examples:
        what.only_world_size("without an operator")
    requested = how.settings()
    hardware = absent(of.hardware) if of.hardware else where.hardware()
    settings = replace(requested, conditions=deployed.conditions(hardware))
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
        problems = usual_pair(what, hardware) if examples else problems_of(what, how.shapes, hardware)
        jobs = jobs_of(problems, settings, hardware)
    if examples and how.trials is None:
        few = GPU_PAIR_TRIALS if hardware.on_gpu else CPU_PAIR_TRIALS
        jobs = [(problem, replace(own, trials=few)) for problem, own in jobs]
    if of.dry_run:
        return _planned(jobs, layers, notes, hardware, where)
    for note in notes:
        say(f"notice: {of.model}: {note}")
    with where.store(create=True) as store:
        verdicts = tune_all(jobs, hardware, store, where, then_compare=examples)
        variants = jobs[0][1].variants or () if jobs else ()
        ok = len(verdicts) == len(jobs) and all(verdict.winner and not _must_work(verdict, variants) for verdict in verdicts)
        where.document(lambda: verdict_documents(verdicts, [problem for problem, _ in jobs], store.url), ok=ok)
    return INTERRUPTED if verdicts and verdicts[-1].interrupted else 0 if ok else 1


def _nothing_missed(where: MachineOptions) -> int:
    where.document(list)
    saved = "programs save failed look-ups by autotax.save_misses(), or with AUTOTAX_MISSES=1"
    return say(f"nothing to tune: the database holds no failed look-ups that this machine can tune; {saved}")


def tune_all(
    jobs: Sequence[Job], hardware: Hardware, store: Store, where: MachineOptions, *, then_compare: bool
) -> list[Verdict]:
    """Tunes all jobs, shows each verdict and a summary at the end. An interrupt ends it early."""
    from autotax.api import tune_jobs
    from autotax.report import tables
    from autotax.report.progress_display import TuningScreen

    settings_of = dict(jobs)
    for problem, settings in jobs:
        warn_of_slow_ranks(problem, hardware, settings.trials)

    def show(verdict: Verdict, runner: LiveRunner) -> None:
        settings = settings_of[verdict.problem]
        _show(verdict, store, where, settings.resume)
        if then_compare and not where.as_json and not verdict.interrupted and settings.timeout_s is None:
            _compare_verdict(verdict, runner, where)

    watch = TuningScreen(len(jobs), soak=jobs[0][1].soak if jobs else None)
    verdicts = list(tune_jobs(jobs, hardware, store, watch, show))
    if not where.as_json and verdicts and not verdicts[-1].interrupted:
        if len(jobs) > 1:
            where.show(lambda: tables.summary(verdicts))
        proven = [verdict for verdict in verdicts if verdict.winner]
        if len(jobs) == 1 and proven:
            (verdict,) = proven
            arguments = command_line(verdict.problem) + flags_of(verdict.conditions, hardware)
            closing(store.url, f"autotax lookup {arguments}{where.again} --pin")
        elif any(verdict.trials for verdict in verdicts):
            closing(store.url, f"autotax {'winners' if proven else 'trials'}{where.again}")
    return verdicts


def flags_of(conditions: Conditions, hardware: Hardware) -> str:
    """The conditions that differ from the usual ones, as command-line options: ` --mode eager`."""
    defaults = Conditions.usual(hardware.on_gpu).to_dict()
    other = {name.removesuffix("_us"): value for name, value in conditions.to_dict().items() if value != defaults[name]}
    return "".join(f" --{name} {value}" for name, value in other.items())


def command_line(problem: Problem) -> str:
    return spelled(problem.op, {name: value for name, value in problem.to_dict().items() if name != "op"})


def _show(verdict: Verdict, store: Store, where: MachineOptions, resumed: bool) -> None:
    from autotax.core.errors import summary
    from autotax.db.url import shown
    from autotax.report import tables

    if verdict.winner is not None:
        where.show(lambda: tables.finalists(verdict))
    elif not verdict.interrupted:
        where.plain(f"{tables.title(verdict.problem)}: {tables.outcome(verdict)}")
    listed = f"autotax trials {command_line(verdict.problem)}{where.again}"
    for failed in verdict.failed:
        count = f"all {failed.trials} trials" if failed.trials > 1 else "its only trial"
        rest = f"`{listed} --variant {failed.variant} --errors` shows the tracebacks"
        say(f"{failed.variant} failed in {count}, first: {failed.status}: {summary(failed.error)}; {rest}")
    if verdict.interrupted:
        again = "run the same command again" if resumed else "run the same command with --resume"
        say(f"interrupted; the finished trials are stored in {shown(store.url)}: {again} to go on from there")
    elif verdict.late:
        stored = f"the finished trials are stored in {shown(store.url)}" if verdict.trials else "no trial had ended"
        say(f"the time limit came before the verdict; {stored}")
    elif verdict.winner is None:
        if set(verdict.trials) <= {"ok"}:
            say(f"no winner for {verdict.problem}: BSP's figure is within noise of zero; `{listed}` shows all trials")
        else:
            say(f"nothing could be verified for {verdict.problem}: `{listed}` shows why each trial failed")


def _must_work(verdict: Verdict, variants: Sequence[str]) -> list[str]:
    """The variants that failed in all trials, if they come from outside the package or were named."""
    declared = operator_of(verdict.problem).variants
    failed = [failed.variant for failed in verdict.failed if failed.variant in declared]
    return [name for name in failed if name in variants or not declared[name].module.startswith("autotax.")]


def _compare_verdict(verdict: Verdict, runner: LiveRunner, where: MachineOptions) -> None:
    from autotax import tuner
    from autotax.report import tables
    from autotax.tuner.comparison import Choice

    if verdict.winner is None or verdict.baseline is None:
        return
    comparison = tuner.compare(
        verdict.problem,
        hardware=verdict.hardware,
        runner=runner,
        tuned=Choice(verdict.winner.measurement.config, "the winner of this run"),
        baseline=Choice(verdict.baseline.config, "the baseline of this run"),
        conditions=verdict.conditions,
    )
    where.show(lambda: tables.comparison(comparison))


def verdict_documents(verdicts: Sequence[Verdict], problems: Sequence[Problem], url: str) -> list[Any]:
    """A document for each verdict, in the order of `problems`."""
    from autotax.report import documents

    ordered = sorted(verdicts, key=lambda verdict: problems.index(verdict.problem))
    return [documents.of_verdict(verdict, public_url(url)) for verdict in ordered]


# The plan that --dry-run prints.

def plan(jobs: Sequence[Job], layers: Mapping[Problem, str], hardware: Hardware, where: MachineOptions) -> list[dict[str, Any]]:
    """The document of each job: the layers that need it, today's look-up and the expected time. Measures nothing."""
    from autotax.db.lookup import peek

    recorded = _recorded(where, hardware)
    planned = []
    for problem, settings in jobs:
        seconds, basis = _expected(problem, settings.trials, hardware, recorded)
        seconds = seconds if settings.timeout_s is None else min(seconds, settings.timeout_s)
        answer = peek(problem, hardware=hardware, db=where.db, conditions=settings.conditions)
        planned.append({
            "problem": problem.to_dict(), "layers": layers.get(problem, ""), "trials": settings.trials, "match": answer.match,
            "variant": answer.variant, "expected_s": seconds, "basis": basis,
        })  # fmt: skip
    return planned


def _expected(problem: Problem, trials: int, hardware: Hardware, recorded: Mapping[str, float]) -> tuple[float, str]:
    """Estimated seconds for a problem, and the source of the estimate."""
    if not hardware.on_gpu:
        return expected_on_cpu(problem, trials), CPU
    if problem.op in recorded:  # independent of the sizes: a trial on GPUs is mostly compilation and host work
        return trials * recorded[problem.op], HERE
    paces: dict[str, dict[str, float]] = json.loads(PACES.read_text())
    for device, seconds in sorted(paces.items(), key=lambda item: item[0] != hardware.device):
        if problem.op in seconds:
            return trials * seconds[problem.op], f"the runs recorded on {device}"
    return trials * TRIAL_S, GUESS


def _recorded(where: MachineOptions, hardware: Hardware) -> dict[str, float]:
    """Seconds for a trial, by operator: the median over the runs on this hardware that ended."""
    with where.store(create=False) as store:
        runs = [trial.run for trial in store.trials(hardware=hardware) if trial.run is not None]
    counts, rates = Counter(run.id for run in runs), defaultdict[str, list[float]](list)
    for run in {run.id: run for run in runs}.values():
        if run.ended_at is not None:
            rates[run.problem.op].append((run.ended_at - run.started_at).total_seconds() / counts[run.id])
    return {op: statistics.median(seconds) for op, seconds in rates.items()}


def _planned(
    jobs: Sequence[Job], layers: dict[Problem, str], notes: Sequence[str], hardware: Hardware, where: MachineOptions
) -> int:
    planned = plan(jobs, layers, hardware, where)
    problems = [problem for problem, _ in jobs]
    about = {"expected_s": round(sum(row["expected_s"] for row in planned), 1), "notes": list(notes)}
    rounded = [row | {"expected_s": round(row["expected_s"], 1)} for row in planned]
    return where.answer(lambda: _plan_table(problems, planned, hardware, notes), lambda: rounded, about=about)


def _plan_table(
    problems: Sequence[Problem], planned: Sequence[dict[str, Any]], hardware: Hardware, notes: Sequence[str]
) -> Table:
    """The problems of a plan, one line each, with today's look-up and the expected time."""
    from autotax.report.formatting import columns, duration, grid, number, place

    basis = dict.fromkeys(row["basis"] for row in planned)
    expected = duration(sum(row["expected_s"] for row in planned))
    whole = f"expected: {expected} for {number(len(planned), 'problem')}, by {' and '.join(basis)}"
    table = grid("plan", place(hardware), whole, *notes)
    asking = any(row["layers"] for row in planned)
    columns(table, "problem", *(["layers"] if asking else []), "trials>", "look-up today", "expected>")
    for problem, row in zip(problems, planned, strict=True):
        layers = [row["layers"]] if asking else []
        today = f"{row['match']}: {row['variant']}"
        several = f", {problem.world_size} ranks" if len({other.world_size for other in problems}) > 1 else ""
        table.add_row(f"{problem.op} {problem.brief()}{several}", *layers, str(row["trials"]), today, duration(row["expected_s"]))
    return table
