"""Import of a winner that was tuned elsewhere. The import also stores the winner's run and trial, which prove it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.files import ConfigShape, Malformed, Name
from autotax.db import row_mapping
from autotax.db.records import Entry, TrialRecord, WinnerRecord, verdict
from autotax.db.schema import RunRow, TrialRow, WinnerRow
from autotax.db.staleness import same_kernel
from autotax.operators.registry import variant_digest

IMPORTED = "imported_from"
"""The key in a run's settings that holds the author, the time and the source of its single imported trial."""


class _Origin(msgspec.Struct):
    by: Name | None = None


class _Settings(msgspec.Struct):
    imported_from: _Origin | None = None


@dataclass(frozen=True)
class MergeOutcome:
    """The result of merging an entry: `added`, `replaced` (the former winner) or `kept` (the former winner), and the reason."""

    entry: Entry
    what: str
    reason: str = ""


def entry_of(row: WinnerRow, settings: Mapping[str, Any]) -> Entry:
    """The entry for a stored winner and the settings of the run that found it."""
    origin = row_mapping.decoded(settings, _Settings).imported_from
    return Entry(row_mapping.winner_of(row, with_samples=True), origin.by if origin else None)


def take_in(session: Session, entry: Entry, source: str) -> MergeOutcome:
    """Imports a winner. Of two winners with the same key the better proven one stays. Winners of other variants also stay,
    because they may answer where sources differ. Here the best proven of all answers.
    """
    rivals = {row.kernel_digest: _with_origin(session, row) for row in _rivals(session, entry.winner)}
    own = rivals.get(entry.winner.kernel_digest)
    if own and own.digest == entry.digest:
        return MergeOutcome(entry, "kept", "it is the same")
    if own is None or own.strength < entry.strength:
        _store(session, entry, source)
    if not rivals:
        return MergeOutcome(entry, "added")
    best = max(rivals.values(), key=lambda rival: rival.strength)
    if best.strength >= entry.strength:
        return MergeOutcome(entry, "kept", f"of the one that is here: {verdict(best, entry)}")
    return MergeOutcome(entry, "replaced", verdict(entry, best))


def _with_origin(session: Session, row: WinnerRow) -> Entry:
    if (trial := session.get(TrialRow, row.trial_id)) and trial.run:
        return entry_of(row, trial.run.settings)
    raise Malformed(f"the winner of {row.problem_key!r} names no trial")


def crown(session: Session, winner: WinnerRecord, met: Collection[str] | None) -> Config | None:
    """Stores a winner in the place of its rivals, which it has just beaten. Another tuner may have stored a rival that the winner
    has not been measured against (`met` holds the config digests it was; None means all). If such a rival is better proven,
    nothing is stored and the rival's config is returned.
    """
    rivals = _rivals(session, winner)
    stored = [_with_origin(session, row) for row in rivals]
    strangers = [entry for entry in stored if met is not None and entry.winner.config.digest not in met]
    best = max(strangers, key=lambda entry: entry.strength, default=None)
    if best and best.strength > Entry(winner).strength:
        return best.winner.config
    for row in rivals:
        if row.kernel_digest != winner.kernel_digest:
            session.delete(row)
    _put(session, winner)
    return None


def _put(session: Session, winner: WinnerRecord) -> None:
    """Stores a winner and replaces the row with its key. The ORM would not find that row if the rows it refers to are missing."""
    row = row_mapping.winner_row(winner)
    key = list(WinnerRow.__table__.primary_key)
    session.execute(delete(WinnerRow).where(*(column == getattr(row, column.name) for column in key)))
    session.add(row)


def _rivals(session: Session, winner: WinnerRecord) -> Sequence[WinnerRow]:
    """The stored winners that compete with this one. These are the winner with the same key and, if this winner's variant has the
    current sources, the winners of other variants with current sources. Winners of other sources do not compete, because they
    answer on machines with those sources.
    """
    op = winner.problem.op
    where = {
        WinnerRow.problem_key: winner.problem.key,
        WinnerRow.hardware_digest: winner.hardware.digest,
        WinnerRow.comm: winner.comm,
        WinnerRow.conditions: winner.conditions.key,
        WinnerRow.triton: winner.environment.triton,
    }
    alike = session.scalars(select(WinnerRow).where(*(column == value for column, value in where.items())))

    here = same_kernel(winner)

    def rivals(row: WinnerRow) -> bool:
        if row.kernel_digest == winner.kernel_digest:
            return True
        variant = row_mapping.decoded(row.config, ConfigShape).variant
        return here and row.kernel_digest == variant_digest(op, variant)

    return [row for row in alike if rivals(row)]


def proves(trial: TrialRow | None, winner: WinnerRecord) -> bool:
    """Whether the trial proves the winner: it verified exactly this config and these sources, with the winner's problem,
    hardware, software and conditions.
    """
    return (
        trial is not None
        and trial.verified
        and trial.config_digest == winner.config.digest
        and trial.kernel_digest == winner.kernel_digest
        and Conditions.from_dict(trial.conditions) == winner.conditions
        and trial.run.problem_key == winner.problem.key
        and trial.run.hardware_digest == winner.hardware.digest
        and trial.run.environment_digest == winner.environment.digest
    )


def _store(session: Session, entry: Entry, source: str) -> None:
    winner = entry.winner
    session.merge(row_mapping.problem_row(winner.problem))
    session.merge(row_mapping.hardware_row(winner.hardware))
    session.merge(row_mapping.environment_row(winner.environment))
    session.flush()
    tuned_at = winner.created_at.isoformat() if winner.created_at else None
    run = RunRow(
        problem_key=winner.problem.key,
        hardware_digest=winner.hardware.digest,
        environment_digest=winner.environment.digest,
        settings={IMPORTED: {"by": entry.by, "at": tuned_at, "source": source}},
        status="done",
        ended_at=datetime.now(UTC),
    )
    session.add(run)
    session.flush()
    trial = row_mapping.trial_row(run.id, _trial(winner), winner.kernel_digest)
    session.add(trial)
    session.flush()
    proven = replace(winner, trial_id=trial.id)
    if not (winner.verified and proves(trial, proven)):
        raise ValueError(f"{winner.config} is not verified; only a config with a verified output can be a winner")
    _put(session, proven)
    session.flush()


def _trial(winner: WinnerRecord) -> TrialRecord:
    """The trial of an imported winner, marked as a trial of a finalist round. So a later search here does not reuse it and
    measures the config itself.
    """
    return TrialRecord(
        number=0,
        config=winner.config,
        status="ok",
        latency_us=winner.latency_us,
        samples=(winner.samples or {}).get(winner.config.digest),
        verified=winner.verified,
        conditions=winner.conditions.to_dict() | {"stage": "finalists"},
    )
