"""The results that `--json` prints, and the rows of `--csv`: plain values only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import summary
from autotax.core.problem import Problem
from autotax.operators import registry
from autotax.report.taxes import bound_of, bsp_us, known_us, taxes, tuned_us, won_back
from autotax.runner.measurement import Measurement
from autotax.tuner.finalists import median_interval

if TYPE_CHECKING:
    from autotax.db import TrialRecord, WinnerRecord
    from autotax.db.answers import Answer
    from autotax.db.records import Entry
    from autotax.db.store import MergeOutcome
    from autotax.runner.precompile import Surveyed
    from autotax.runner.trace import Timeline
    from autotax.tuner import Comparison, Row, Standing, Verdict
    from autotax.tuner.progress import Refreshed

Document = dict[str, Any]


def of_verdict(verdict: Verdict, db: str) -> Document:
    return {
        **_where(verdict),
        "winner": _winner(verdict, verdict.winner) if verdict.winner else None,
        "trials": dict(verdict.trials),
        "seconds": round(verdict.seconds, 3),
        "soak": verdict.soak,
        "notices": list(verdict.notices),
        "accounts": {name: round(value, 4) for name, value in verdict.accounts.items()},
        "db": db,
        "interrupted": verdict.interrupted,
    }


def of_comparison(comparison: Comparison) -> Document:
    """For `bound_us` see report.bounds; every row holds its samples, from which all figures can be computed again."""
    bound, us, peer = bound_of(comparison), tuned_us(comparison), comparison.peer
    bounds = known_us(comparison) if bound else {}
    return {
        **_where(comparison),
        "match": comparison.answer.match if comparison.answer else None,
        "reason": comparison.answer.reason if comparison.answer else None,
        "error": comparison.error,
        "best_peer": peer.name if peer else None,
        "speedup_vs_best_peer": comparison.over_peer,
        "bound_us": bound.us if bound else None,
        **{f"{name}_us": bounds.get(name) for name in registry.of(comparison.problem).bounds},
        "over_bound": us / bound.us if bound and us else None,
        "above_bound_us": us - bound.us if bound and us else None,
        "rows": [_row(row) for row in comparison.rows],
    }


def of_taxes(comparison: Comparison) -> Document:
    """Parts of the time of BSP, the work itself first (see report.taxes)."""
    document = of_comparison(comparison)
    return _where(comparison) | {
        "error": comparison.error,
        "taxes": [asdict(tax) for tax in taxes(document)],
        "bsp_us": bsp_us(document),
        "tuned_us": tuned_us(comparison),
        "won_back": won_back(document),
    }


def of_answer(problem: Problem, answer: Answer) -> Document:
    document = {"problem": problem.to_dict(), "match": answer.match, **_config(answer)}
    return document | _fields(answer, "from_problem", "reason")


def pinned(answer: Answer) -> str:
    """A config as Python, for `config=` of a module."""
    arguments = ", ".join([repr(answer.variant), *(f"{name}={value!r}" for name, value in answer.params)])
    return f"autotax.Config.of({arguments})"


def of_winner(winner: WinnerRecord, stale: str) -> Document:
    """`stale` says why a winner does not hold here. In the document it is null if the winner holds."""
    return {
        **_where(winner, "problem", "hardware", "environment", "conditions"),
        **_config(winner.config),
        **_fields(winner, "latency_us", "baseline_us", "speedup"),
        "interval": [winner.interval_low, winner.interval_high],
        "tie": winner.tie,
        "tuned_at": _at(winner),
        "stale": stale or None,
    }


def flat_winner(winner: WinnerRecord, stale: str) -> Document:
    return {
        "problem": winner.problem.key,
        "device": str(winner.hardware),
        "triton": winner.environment.triton,
        "comm": winner.environment.comm,
        "conditions": winner.conditions.key,
        **_flat_config(winner.config),
        **_fields(winner, "latency_us", "baseline_us", "speedup", "interval_low", "interval_high", "tie"),
        "tuned_at": _at(winner),
        "stale": stale,
    }


def flat_trial(trial: TrialRecord) -> Document:
    conditions = Conditions.from_dict(trial.conditions)
    return {
        "run": trial.run_id,
        "problem": trial.run.problem.key if trial.run else None,
        "device": str(trial.run.hardware) if trial.run else None,
        "number": trial.number,
        "stage": trial.conditions.get("stage", "search"),
        "conditions": conditions.key,
        **_flat_config(trial.config),
        **_fields(trial, "status", "latency_us", "verified", "compile_s"),
        "error": summary(trial.error or ""),
    }


def of_refreshed(refreshed: Refreshed, db: str) -> Document:
    """The verdict, and the figures of the former winner."""
    former = refreshed.stale.winners[0]
    return of_verdict(refreshed.verdict, db) | {
        "outcome": refreshed.outcome,
        "former": {**_config(former.config), "speedup": former.speedup, "stale": refreshed.stale.why or None},
    }


def of_timeline(timeline: Timeline) -> Document:
    """Microseconds of each rank's call by kind; the slices themselves are in the file. `shipped_us` is null without stamps."""
    kinds = ("program", "kernel", "send", "wait")
    ranks = [
        {"call_us": timeline.call_us(rank), "shipped_us": shipped}
        | {f"{kind}_us": timeline.us(rank, kind) for kind in kinds}
        | {"roles": [asdict(role) for role in timeline.roles(rank)] if timeline.hardware.on_gpu else []}
        for rank, shipped in enumerate(timeline.shipped_us or [None] * len(timeline.ranks))
    ]
    return {"problem": timeline.problem.to_dict(), **_config(timeline.config), "ranks": ranks}


def of_import(outcomes: Sequence[MergeOutcome]) -> list[Document]:
    """The outcome for each winner of a file: `added`, `replaced` or `kept` (the one in the database), and why."""
    return [{"outcome": outcome.what, "reason": outcome.reason or None, **of_entry(outcome.entry)} for outcome in outcomes]


def of_survey(surveyed: Sequence[Surveyed]) -> list[Document]:
    """For each kernel: bytes of shared memory of a program, registers and bytes of local memory of a thread."""
    return [
        {**_config(config.config), "status": config.status, "error": config.error, "kernels": [asdict(k) for k in config.kernels]}
        for config in surveyed
    ]


def _winner(verdict: Verdict, winner: Standing) -> Document:
    measurement = winner.measurement
    return {
        **_config(measurement.config),
        "latency_us": measurement.latency_us,
        **_beside(measurement),
        "baseline_us": verdict.baseline.latency_us if verdict.baseline else None,
        "speedup": winner.speedup,
        "interval": list(winner.interval),
        "verified": measurement.verified,
        "tie": verdict.tie,
    }


def _beside(measurement: Measurement) -> Document:
    """The 95 % interval of the median, and the latency of the same calls back to back."""
    interval = median_interval(measurement.rounds) if measurement.samples else None
    return {"interval_us": interval and [round(end, 4) for end in interval], "back_to_back_us": measurement.back_to_back_us}


def _row(row: Row) -> Document:
    """`rounds_us` are the maxima over the ranks; the latency is their median. `samples_us` are the samples of each rank."""
    return {
        "name": row.name,
        **_config(row.measurement.config),
        "latency_us": row.measurement.latency_us,
        **_beside(row.measurement),
        "speedup_vs_bsp": row.speedup,
        **_fields(row.measurement, "verified", "status", "error"),
        "source": row.source,
        "relative_error": _finite(row.measurement.relative_error),
        "rounds_us": [round(us, 2) for us in row.measurement.rounds],
        "samples_us": [[round(us, 2) for us in samples] for samples in row.measurement.samples],
    }


def of_trial(trial: TrialRecord) -> Document:
    return {
        **({"run": trial.run.id, **_where(trial.run, "problem", "hardware")} if trial.run else {}),
        "number": trial.number,
        **_config(trial.config),
        **_fields(trial, "status", "error", "latency_us", "verified"),
        "relative_error": _finite(trial.relative_error),
        "compile_s": trial.compile_s,
        "conditions": dict(trial.conditions),
        "created_at": _at(trial),
    }


def of_entry(entry: Entry) -> Document:
    winner = entry.winner
    figures = {"speedup": winner.speedup, "interval": [winner.interval_low, winner.interval_high]}
    return {**_where(winner), **_config(winner.config), **figures, "tuned_at": _at(winner), "tuned_by": entry.by}


def _where(of: Any, *names: str) -> Document:
    """The problem, hardware and conditions of a record, or other parts of it that have a document of their own."""
    return {name: getattr(of, name).to_dict() for name in names or ("problem", "hardware", "conditions")}


def _fields(of: Any, *names: str) -> Document:
    return {name: getattr(of, name) for name in names}


def _at(record: WinnerRecord | TrialRecord) -> str | None:
    return record.created_at.isoformat() if record.created_at else None


def _config(config: Config) -> Document:
    return {"variant": config.variant, "config": dict(config.params)}


def _flat_config(config: Config) -> Document:
    return {"variant": config.variant, "config": " ".join(f"{name}={value}" for name, value in config.params)}


def _finite(value: float | None) -> float | None:
    """JSON knows neither infinity nor NaN."""
    return value if value is not None and math.isfinite(value) else None
