"""The tables of the commands. Each table labels figures of CPU ranks as such."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autotax.core.errors import summary as summary_of
from autotax.core.problem import Problem
from autotax.db.records import same_kernel
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.report import documents
from autotax.report import taxes as bounds
from autotax.report.formatting import (
    Fitting,
    accounts,
    columns,
    config_text,
    counts,
    faster,
    grid,
    interval,
    labelled,
    listing,
    microseconds,
    number,
    outcome,
    parameters,
    place,
    scatter_of,
    share,
    status_text,
    times,
    title,
    unusual,
    won,
)  # fmt: skip
from autotax.tuner.comparison import TUNED
from autotax.tuner.finalists import median_interval
from autotax.tuner.progress import Verdict
from autotax.tuner.run_recorder import FINALISTS

if TYPE_CHECKING:
    from autotax.db import RunRecord, TrialRecord, WinnerRecord
    from autotax.db.answers import Answer
    from autotax.db.records import Entry
    from autotax.db.store import MergeOutcome
    from autotax.runner.measurement import Measurement
    from autotax.runner.precompile import Surveyed
    from autotax.runner.trace import Timeline
    from autotax.tuner import Comparison, Standing
    from autotax.tuner.progress import Refreshed

WINNER_STYLE = "bold green"
REFRESHED_STYLES = {"kept": "green", "replaced": "green", "bsp": "yellow"}


WIDE, NARROW, NARROWEST = ALL = "wide", "narrow", "narrowest"
Column = tuple[str, Sequence[str | Text], Sequence[str]]
"""A name, its cells, and the screens that have room for it."""


def finalists(verdict: Verdict) -> Fitting:
    """The finalists of a run against bulk-synchronous (BSP), the fastest first."""
    noise, standings = scatter_of(verdict), verdict.standings
    rows = [standing.measurement for standing in standings]
    last: list[Column] = [
        ("vs BSP [95 %]>", ["-" if noise else _ratio(verdict, standing) for standing in standings], (WIDE, NARROW)),
        ("vs BSP>", ["-" if noise else times(standing.speedup) for standing in standings], (NARROWEST,)),
        ("verified|", ["yes" if row.verified else "no" for row in rows], (WIDE,)),
        ("verdict|", [_mark(verdict, standing) for standing in standings], ALL),
    ]
    names, bounds = [str(rank) for rank in range(1, len(rows) + 1)], [_bound_us(verdict, row) for row in rows]
    caption = title(verdict.problem), outcome(verdict), noise, *_background(verdict)
    winner = next((at for at, standing in enumerate(standings) if standing == verdict.winner), None)
    return _measured(verdict, caption, names, rows, bounds, [""] * len(rows), last, winner)


def _measured(
    shown: Verdict | Comparison, caption: Sequence[str], names: Sequence[str], rows: Sequence[Measurement],
    bounds: Sequence[float | None], sources: Sequence[str], last: Sequence[Column], best: int | None,
) -> Fitting:  # fmt: skip
    """A table of measurements. On narrow screens sources, parameters, rates and errors are below it."""
    rates = _rates(shown, rows, bounds)
    columns_: list[Column] = [
        ("|", names, ALL),
        ("config", [config_text(row.config) for row in rows], (WIDE,)),
        ("variant|", [Text(row.config.variant) for row in rows], (NARROW, NARROWEST)),
        *([("chosen as", [Text(source) for source in sources], (WIDE,))] if any(sources) else []),
        *_latencies(rows), *((name, cells, (WIDE,)) for name, cells in rates.items()), *last,
    ]  # fmt: skip

    def table(screen: str) -> Table:
        made = grid(*caption)
        here = [(name, cells) for name, cells, screens in columns_ if screen in screens]
        columns(made, *(name for name, _ in here))
        for at in range(len(rows)):
            made.add_row(*(cells[at] for _, cells in here), style=WINNER_STYLE if at == best else "")
        return made

    below = labelled()
    for at, (name, row) in enumerate(zip(names, rows, strict=True)):
        spelled = ", ".join(f"{cells[at]} {rate.rstrip('>')}" for rate, cells in rates.items() if cells[at] != "-")
        facts = sources[at], spelled, summary_of(row.error or ""), parameters(row.config) if row.config.params else ""
        if any(facts):
            below.add_row(name, Text("; ".join(filter(None, facts)), "dim"))
    return Fitting((table(WIDE), *(Group(table(screen), below) for screen in (NARROW, NARROWEST))))


def _latencies(rows: Sequence[Measurement]) -> list[Column]:
    """The columns of latencies. In place: with intervals, and with the figure back to back, for which narrow tables have no room.
    Eager calls have no figure in place.
    """
    plain = [microseconds(row.latency_us) for row in rows]
    if not any(row.candidate.conditions.in_place for row in rows):
        return [("median us>", plain, ALL)]
    wide, narrow, narrowest, beside = list[str](), list[str](), list[str](), list[str]()
    for us, row in zip(plain, rows, strict=True):
        if row.candidate.conditions.in_place:
            placed = us + (f" [{', '.join(map(microseconds, median_interval(row.rounds)))}]" if row.samples else "")
            cells = placed, placed, us, microseconds(row.back_to_back_us)
        else:
            eager = f"{us} ({row.candidate.conditions.mode})" if row.samples else "-"
            cells = "-", eager, eager, eager
        for column, cell in zip((wide, narrow, narrowest, beside), cells, strict=True):
            column.append(cell)
    name = "in place us [95 %]>"
    return [
        (name, wide, (WIDE,)), (name, narrow, (NARROW,)), ("us>", narrowest, (NARROWEST,)),
        ("back to back us>", beside, (WIDE,)),
    ]  # fmt: skip


def _rates(shown: Verdict | Comparison, rows: Sequence[Measurement], bounds: Sequence[float | None]) -> dict[str, list[str]]:
    """Columns of rates of one rank, on GPUs: TFLOP/s of products, GB/s of all else, and the share of the bound up to 100 %."""
    if not shown.hardware.on_gpu:
        return {}
    timed = [us if (us := row.latency_us) and us > 0.0 else None for row in rows]
    flops, nbytes = shown.problem.flops, shown.problem.nbytes
    name, of_us = ("TFLOP/s>", flops / 1e6) if flops else ("GB/s>", nbytes / 1e3)
    rates = {name: [f"{of_us / us:.0f}" if us else "-" for us in timed]}
    if registry.of(shown.problem).bounds:
        pairs = zip(timed, bounds, strict=True)
        rates["of bound>"] = [share(bound / us) if us and bound and bound <= us else "-" for us, bound in pairs]
    return rates


def _ratio(verdict: Verdict, standing: Standing) -> str:
    return times(standing.speedup) + ("" if _is_baseline(verdict, standing) else f" {interval(standing.interval)}")


def _bound_us(verdict: Verdict, measurement: Measurement) -> float | None:
    bounds = registry.of(verdict.problem).bounds_us(verdict.problem, verdict.hardware, measurement.conditions)
    return max(bounds.values(), default=None)


def summary(verdicts: Sequence[Verdict]) -> Group:
    """The outcome of many problems, one line each."""
    noise = {verdict.problem: scatter_of(verdict) for verdict in verdicts}
    table = grid("summary", max(noise.values(), default=""), *dict.fromkeys(place(verdict.hardware) for verdict in verdicts))
    columns(table, "problem", "winner|", "median us>", "vs BSP>")
    for verdict in verdicts:
        winner = verdict.winner
        table.add_row(
            f"{verdict.problem.op} {verdict.problem.brief()}",
            winner.measurement.config.variant if winner else Text("nothing verified", "red"),
            microseconds(winner.measurement.latency_us if winner else None),
            times(winner.speedup if winner and not noise[verdict.problem] else None),
        )
    # Of CPU ranks one problem's overhead can outweigh all others, so they have no mean.
    clear = [v for v in verdicts if v.hardware.on_gpu and not noise[v.problem]]
    mean = bounds.geometric_mean(v.winner.speedup for v in clear if v.winner)
    return Group(table, Text(f"geometric mean: {faster(mean)}" if mean else ""))


def refreshed(outcomes: Sequence[Refreshed], hardware: Hardware) -> Table:
    """Former winners with their former and their new figures, one line each."""
    noise = [scatter_of(result.verdict) for result in outcomes]
    table = grid("refreshed", max(noise, default=""), place(hardware))
    columns(table, "problem", "former winner|", "was>", "is>", "outcome|")
    for result, scatters in zip(outcomes, noise, strict=True):
        former, winner = result.stale.winners[0], result.verdict.winner
        table.add_row(
            f"{title(former.problem)} ({former.conditions.key})",
            Text(former.config.variant),
            times(former.speedup),
            times(winner.speedup if winner and not scatters else None),
            Text(result.outcome + ", a tie" * result.verdict.tie, REFRESHED_STYLES.get(result.outcome, "red")),
        )
    return table


def refreshed_outcome(outcome: Refreshed) -> str:
    """`push is 1.31x faster than BSP`"""
    winner = outcome.verdict.winner
    if winner is None:
        ends = {"interrupted": "interrupted", "late": "the time limit came first"}
        return ends.get(outcome.outcome, "nothing could be verified")
    if winner.measurement.config.variant == "bsp":
        return "differences are within noise; BSP is kept" if outcome.verdict.tie else "BSP wins: no former winner is faster here"
    return f"{winner.measurement.config.variant} is {faster(winner.speedup)}"


def winners(records: Sequence[WinnerRecord], why: Sequence[str], of: str = "") -> Fitting | Text:
    """A table of winners. `why` says for each why it does not hold here; empty if it holds. `of` names their operators."""
    if not records:
        return Text(f"the database holds no winners{' of' * bool(of)} {of}".rstrip() + ": run `autotax tune`")
    rows = []
    for winner, stale in zip(records, why, strict=True):
        problem, config, margin = _of_winner(winner)
        holds = Text("yes", "green") if not stale else Text(f"no: {stale}", "yellow")
        rows.append((problem, config, microseconds(winner.latency_us), margin, holds))
    places = list(dict.fromkeys(place(winner.hardware) for winner in records))
    names = "problem", "config", "median us>", "vs BSP [95 %]>", "holds here"
    return listing(number(len(records), "winner"), places, names, rows)


def comparison(compared: Comparison) -> Fitting | Text:
    """The rows of a comparison, measured in one interleaved run, or why there are none."""
    if compared.error and not compared.rows:
        return _failed(compared)
    rows, hardware, noise = compared.rows, compared.hardware, scatter_of(compared)
    notes = [noise, _distance(compared), "" if noise else _against_peer(compared)]
    notes += [unusual(compared.conditions, hardware), place(hardware)]
    bound, operator = bounds.bound_of(compared), registry.of(compared.problem)
    part = operator.part.row if operator.part else None
    timed = [at for at, row in enumerate(rows) if row.speedup is not None and row.name != part]
    measured = [row.measurement for row in rows]
    last: list[Column] = [
        ("vs BSP>", ["-" if noise else times(row.speedup) for row in rows], ALL),
        ("verified|", ["yes" if row.verified else "no" for row in measured], (WIDE,)),
        ("status", [status_text(row.status, row.error) for row in measured], (WIDE,)),
        ("status|", [status_text(row.status, None) for row in measured], (NARROW, NARROWEST)),
    ]
    return _measured(
        compared, (f"{title(compared.problem)}: compared", *notes), [row.name for row in rows], measured,
        [bound.us if bound else None] * len(rows), [row.source or "" for row in rows], last,
        min(timed, key=lambda at: measured[at].latency_us or 0.0, default=None),
    )  # fmt: skip


def _failed(compared: Comparison) -> Text:
    return Text(f"{title(compared.problem)}: it could not be compared: {compared.error}")


def taxes(compared: Comparison) -> Table | Text:
    """Where the time of bulk-synchronous calls goes."""
    if compared.error and not compared.rows:
        return _failed(compared)
    rows = documents.of_taxes(compared)
    bsp, tuned, back = rows["bsp_us"], rows["tuned_us"], rows["won_back"]
    outcome = f"BSP takes {microseconds(bsp)} us, {TUNED} {microseconds(tuned)} us"
    outcome += f"; of what BSP takes beyond the work {won(back)} is won back" if back is not None else ""
    caption = outcome, unusual(compared.conditions, compared.hardware), place(compared.hardware)
    table = grid(f"{title(compared.problem)}: taxes", *caption)
    columns(table, "part", "us>", "of BSP>", "what it is")
    for tax in rows["taxes"]:
        table.add_row(tax["name"], microseconds(tax["us"]), share(tax["us"] / bsp), Text(tax["description"], "dim"))
    return table


def means(compared: Sequence[Comparison]) -> Table | Text:
    """Geometric means over many problems, an operator a line."""
    noise = max(map(scatter_of, compared), default="")
    if not (compared := [c for c in compared if not scatter_of(c)]):
        return Text(noise or "nothing was compared")
    table = grid("geometric means", noise, *dict.fromkeys(place(c.hardware) for c in compared))
    columns(table, "operator", "problems>", "vs BSP>", "vs best alternative>", "failed>")
    for op in dict.fromkeys(c.problem.op for c in compared):
        count, over_bsp, over_peer = bounds.means(compared, op)
        failed = sum(c.problem.op == op and not c.ok for c in compared)
        table.add_row(op, str(count), times(over_bsp), times(over_peer), str(failed))
    return table


def _distance(compared: Comparison) -> str:
    bound, us, part = bounds.bound_of(compared), bounds.tuned_us(compared), registry.of(compared.problem).part
    if bound is None:
        return f"{part.row} is {part.part}: a bound" if part and compared.row(part.row) else ""
    parts = " and ".join(f"{name} ({microseconds(part_us)} us)" for name, part_us in bound.parts.items())
    text = f"{part.row} is {part.part}; " if part else ""
    text += f"bound {microseconds(bound.us)} us: {'the larger of ' * (len(bound.parts) > 1)}{parts}"
    return f"{text}; {TUNED} takes {times(us / bound.us)} the bound, {microseconds(us - bound.us)} us more" if us else text


def _against_peer(compared: Comparison) -> str:
    peer = compared.peer
    if peer is None or compared.over_peer is None:
        return ""
    us = microseconds(peer.measurement.latency_us)
    return f"best alternative: {peer.name}, {us} us; {TUNED} is {faster(compared.over_peer, peer.name)}"


def trials(problem: Problem | None, records: Sequence[TrialRecord]) -> Group:
    """Trials in the order given, a table for each run."""
    if not records:
        return Group(Text(f"no trials of {title(problem)}" if problem else "no trials"))
    by_run = groupby(sorted(records, key=_stage), key=_stage)
    tables = [part for _, run in by_run for part in (_trials_of_run(list(run)), Text())]
    return Group(*tables, Text(f"{number(len(records), 'trial')}: {counts(Counter(record.status for record in records))}"))


def _stage(record: TrialRecord) -> tuple[int, bool]:
    """The run and the stage. Figures of the search and of the finals were not taken together, so each stage has its table."""
    return record.run_id or 0, record.conditions.get("stage") != FINALISTS


def _trials_of_run(records: Sequence[TrialRecord]) -> Table:
    run = records[0].run
    final = records[0].conditions.get("stage") == FINALISTS
    stage = "finals, measured in turn" if final else "search, one after the other"
    table = grid(f"run {run.id}: {title(run.problem)}: {stage}", *_circumstances(records[0], run)) if run else grid("no run")
    columns(table, "trial>", "config", "median us>", "status and reason")
    for record in records:
        table.add_row(
            "final" if final else str(record.number),
            config_text(record.config),
            microseconds(record.latency_us),
            status_text(record.status, record.error),
        )
    return table


def _circumstances(record: TrialRecord, run: RunRecord) -> list[str]:
    notices = [f"notice: {text}" for text in run.notices]
    return [unusual(record.deployed, run.hardware), place(run.hardware), *notices]


def timeline(traced: Timeline) -> Table:
    """Where the time of one call went, rank by rank."""
    if traced.shipped_us:
        return _stamped(traced)
    on_gpu = traced.hardware.on_gpu
    shown = "kernels and copies, device's clock" if on_gpu else "device functions, known by their names, wall clock"
    table = grid(f"{title(traced.problem)}: {traced.config.variant}", f"one eager call; {shown}", place(traced.hardware))
    kinds = ["kernel", "send"] if on_gpu else ["program", "send", "wait"]
    parts = [] if on_gpu else ["send", "wait"]
    columns(table, "rank>", "call us>", *(f"{kind} us>" for kind in kinds), *(f"{part}>" for part in parts))
    for rank in range(len(traced.ranks)):
        figures = [traced.call_us(rank), *(traced.us(rank, kind) for kind in kinds)]
        shares = (share(traced.share(rank, part)) if traced.us(rank, "program") else "-" for part in parts)
        table.add_row(str(rank), *map(microseconds, figures), *shares)
    return table


def _stamped(traced: Timeline) -> Table:
    """Where the time of programs and of the roles of their warps went."""
    about = (
        "one eager call of stamped kernels, device's clock; a role: programs of a kernel, or warps in them",
        "microseconds; us: of one on average; ends: of the last, in the call; for: what it waits for longest",
        str(traced.config),
    )
    table = grid(f"{title(traced.problem)}: {traced.config.variant}", *about, place(traced.hardware))
    columns(table, "rank>", "shipped>", "stamped>", "role", "us>", "ends>", "send>", "wait>", "for")
    for rank, shipped in enumerate(traced.shipped_us):
        of_call = str(rank), microseconds(shipped), microseconds(traced.call_us(rank))
        of_roles = [
            (role.name, *map(microseconds, (role.us, role.end_us)), *map(share, (role.send, role.wait)), _cause(role.longest))
            for role in traced.roles(rank)
        ]
        first, *others = of_roles or [("none of Triton's",)]
        table.add_row(*of_call, *first)
        for row in others:
            table.add_row("", "", "", *row)
    return table


def _cause(wait: str) -> str:
    """The name of a wait without the word wait: `drained` of `wait for drained`, `rows` of `wait_rows`."""
    return wait.removeprefix("wait for ").removeprefix("wait_")


def answer(problem: Problem, hardware: Hardware, answer_: Answer) -> Table:
    table = grid(title(problem), place(hardware), header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("match", answer_.match, style="yellow" if answer_.match in ("fallback", "stale") else "green")
    table.add_row("variant", answer_.variant)
    table.add_row("parameters", Text(parameters(answer_)))
    table.add_row("tuned for", Text(answer_.from_problem or "-"))
    table.add_row("reason", Text(answer_.reason))
    return table


def exported(path: Path, entries: Sequence[Entry]) -> Fitting:
    """The winners that were written to a file. Stale ones are marked."""
    stale = [not same_kernel(entry.winner) for entry in entries]
    rows = [
        (*_of_winner(entry.winner), place(entry.winner.hardware), Text("stale" if is_stale else "", "yellow"))
        for entry, is_stale in zip(entries, stale, strict=True)
    ]
    notes = ["stale: measured with other kernel sources"] if any(stale) else []
    names = "problem", "config", "vs BSP [95 %]>", "tuned on", "kernel"
    return listing(f"{number(len(entries), 'winner')} in {path}", notes, names, rows)


def imported(path: Path, outcomes: Sequence[MergeOutcome]) -> Fitting:
    """The outcome of the import for each winner of a file."""
    rows = []
    for merged in outcomes:
        problem, config, margin = _of_winner(merged.entry.winner)
        what = Text(merged.what, "dim" if merged.what == "kept" else "green")
        rows.append((problem, what, config, margin, Text(merged.entry.by or "-"), Text(merged.reason)))
    summary = counts(Counter(outcome.what for outcome in outcomes))
    names = "problem", "outcome", "config", "vs BSP [95 %]>", "tuned by", "reason"
    return listing(f"{number(len(outcomes), 'winner')} in {path}: {summary}", [], names, rows)


def _of_winner(winner: WinnerRecord) -> tuple[Text, Text, str]:
    margin = f"{times(winner.speedup)} {interval((winner.interval_low, winner.interval_high))}"
    return Text(f"{title(winner.problem)} ({winner.conditions.key})"), config_text(winner.config), margin


def surveyed(problem: Problem, hardware: Hardware, configs: Sequence[Surveyed]) -> Table:
    """How configs compile for a target. Each resource is the maximum over the kernels of the config."""
    local = sum(any(kernel.local for kernel in config.kernels) for config in configs)
    summary = f"{number(len(configs), 'config')}: {counts(Counter(config.status for config in configs))}"
    summary += f"; {local} take local memory, where spilled registers go"
    limit = f"of shared memory there are {_bytes(hardware.shared_memory)} for a program"
    table = grid(f"{title(problem)}: compiled for {hardware.target}", summary, limit)
    columns(table, "config", "kernels>", "shared>", "registers>", "local>", "status")
    for config in configs:
        kernels = config.kernels
        table.add_row(
            config_text(config.config),
            str(len(kernels)),
            _bytes(_most(kernel.shared for kernel in kernels)),
            str(_most(kernel.registers for kernel in kernels) or "-"),
            _bytes(_most(kernel.local for kernel in kernels)),
            status_text(config.status, config.error),
        )
    return table


def _most(figures: Iterable[int | None]) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _bytes(count: int | None) -> str:
    """`-`, `48 B`, `176.0 KiB`"""
    return "-" if count is None else f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB"


def _background(verdict: Verdict) -> list[str]:
    """Further facts of a run: soak, time, conditions, hardware, notices."""
    spent = accounts(verdict.accounts, verdict.hardware) if verdict.accounts else ""
    under = unusual(verdict.conditions, verdict.hardware)
    return [_soaked(verdict), spent, under, place(verdict.hardware), *(f"notice: {text}" for text in verdict.notices)]


def _soaked(verdict: Verdict) -> str:
    if verdict.winner is None:
        return ""
    return f"all finalists passed a soak of {number(verdict.soak, 'replay')}" if verdict.soak else "not soaked"


def _is_baseline(verdict: Verdict, standing: Standing) -> bool:
    return verdict.baseline is not None and standing.measurement.candidate == verdict.baseline.candidate


def _mark(verdict: Verdict, standing: Standing) -> str:
    if standing == verdict.winner:
        return "winner"
    if _is_baseline(verdict, standing):
        return "BSP"
    return "tie" if standing.interval[0] <= 1.0 <= standing.interval[1] else ""
