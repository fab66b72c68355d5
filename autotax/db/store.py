"""The store: every trial of every run, and the winners. Records in, records out."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

import msgspec
from sqlalchemy import Engine, Select, delete, func, select
from sqlalchemy.orm import Session, contains_eager, defer

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.decoding import ConfigShape, Malformed, Name
from autotax.core.problem import Problem
from autotax.core.settings import ENDINGS
from autotax.db import formats
from autotax.db.connection import empty_engine, failing, open_engine, opening, writing
from autotax.db.formats import indexed_winners
from autotax.db.index import IndexedWinner
from autotax.db.records import Entry, MissRecord, RunRecord, TrialRecord, WinnerRecord, same_kernel, verdict
from autotax.db.schema import EnvironmentRow, HardwareRow, MissRow, ProblemRow, RunRow, TrialRow, WinnerRow
from autotax.db.url import resolve_url
from autotax.hardware import Hardware
from autotax.operators.registry import operators, variant_digest
from autotax.software import Environment


class Store:
    """One open database. Safe to share between threads; a process opens its own.

    Each method is one transaction, committed when it returns. So a killed process loses only the transaction in progress. Methods
    of a store opened for writing may raise MachineError, or DatabaseBusy if the same call may succeed later. Then nothing of the
    call is stored, and the store works again as soon as the database does.
    """

    def __init__(self, url: str, engine: Engine | None, *, writable: bool) -> None:
        self.url = url
        """The URL for Optuna's RDBStorage, which keeps its studies in the same database."""
        self.exists = engine is not None
        """False if there is no such database; then this store is empty."""
        self._engine = engine
        self._writable = writable

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = empty_engine()
        return self._engine

    @classmethod
    def open(cls, url: str | os.PathLike[str] | None = None, *, create: bool = True) -> Self:
        """The database at a URL or path, or the default one. Raises UsageError, of one line, if it cannot be used.

        `create=True`, for writers, creates missing parts and checks that the database is writable. `create=False`, for readers,
        writes nothing; a missing database gives an empty store whose `exists` is False.
        """
        url = resolve_url(url)
        engine = open_engine(url, create=create)
        return cls(url, engine, writable=create and engine is not None)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Runs

    def begin_run(self, problem: Problem, hardware: Hardware, environment: Environment, settings: Mapping[str, Any]) -> int:
        """Stores a run with its problem, hardware, software and settings. Returns the run's id."""
        with self._writing() as session:
            return _new_run(session, problem, hardware, environment, settings=dict(settings))

    def add_notice(self, run_id: int, text: str) -> None:
        """Stores a notice of a run, the same text once."""
        text = formats.storable(text)
        with self._writing(alone=False) as session:
            run = session.get_one(RunRow, run_id)
            if text not in (kept := run.notices or []):
                run.notices = [*kept, text]

    def end_run(self, run_id: int, status: str, accounts: Mapping[str, float] | None = None) -> None:
        """Stores the end of a run (done, interrupted or failed) and the figures of the run itself."""
        if status not in ENDINGS:
            raise ValueError(f"run status is {status!r}; allowed are {', '.join(ENDINGS)}")
        with self._writing(alone=False) as session:
            run = session.get_one(RunRow, run_id)
            run.status, run.ended_at = status, datetime.now(UTC)
            run.accounts = dict(accounts) if accounts else None

    def runs(self, problem: Problem | None = None) -> list[RunRecord]:
        """All runs, or those of one problem, the oldest first."""
        query = select(RunRow).join(RunRow.problem).where(ProblemRow.op.in_(list(operators()))).order_by(RunRow.id)
        if problem is not None:
            query = query.where(RunRow.problem_key == problem.key)
        with self._reading() as session:
            return [formats.run_of(row) for row in session.scalars(query)]

    # Trials

    def add_trial(self, run_id: int, trial: TrialRecord) -> int:
        """Stores one trial, failed or not. Returns its id."""
        with self._writing(alone=False) as session:
            op = session.scalar(select(ProblemRow.op).join(RunRow).where(RunRow.id == run_id)) or ""
            row = formats.trial_row(run_id, trial, trial.kernel_digest or variant_digest(op, trial.config.variant))
            session.add(row)
            session.flush()
            return row.id

    def trials(
        self,
        problem: Problem | None = None,
        hardware: Hardware | None = None,
        *,
        environment: Environment | None = None,
        run_id: int | None = None,
        status: str | None = None,
    ) -> list[TrialRecord]:
        """The trials that match all given arguments, in the order of insertion, each with its run. The digest of all kernel
        sources in `environment` is ignored, because each trial has the digest of its variant's sources.
        """
        software = {name: value for name, value in (environment.to_dict() if environment else {}).items() if name != "kernels"}
        required = {
            RunRow.problem_key: problem and problem.key,
            RunRow.hardware_digest: hardware and hardware.digest,
            TrialRow.run_id: run_id,
            TrialRow.status: status,
        } | {getattr(EnvironmentRow, name): value for name, value in software.items()}
        query = _trials_with_runs().where(*(column == value for column, value in required.items() if value is not None))
        with self._reading() as session:
            rows = session.scalars(query).all()
            runs = {row.run_id: row.run for row in rows}
            records = {run_id: formats.run_of(run) for run_id, run in runs.items()}
            return [formats.trial_of(row, records[row.run_id]) for row in rows]

    # Winners

    def set_winner(self, winner: WinnerRecord, met: Collection[str] | None = None) -> Config | None:
        """Stores the only winner of its problem in its place: it replaces the winner with its key and those of all variants with
        current sources. If another process has stored a better proven winner that is not in `met`, nothing is stored and the
        config of that winner is returned. `met` are digests of configs; None means all. Raises ValueError unless `winner` and
        its trial are verified.
        """
        if not winner.verified:
            raise ValueError(f"{winner.config} is not verified; only a config with a verified output can be a winner")
        with self._writing() as session:
            if not proves(session.get(TrialRow, winner.trial_id), winner):
                raise ValueError(f"trial {winner.trial_id} is not a verified one of {winner.config} for {winner.problem} here")
            return crown(session, winner, met)

    def withdraw_winner(self, winner: WinnerRecord) -> None:
        """Deletes a winner that was found to be wrong; its trials stay."""
        with self._writing() as session:
            if row := session.get(WinnerRow, winner.key):
                session.delete(row)

    def winners(self, *, with_samples: bool = True) -> list[WinnerRecord]:
        """All winners, stale ones too, the oldest first. Without their samples they are quick to load."""
        query = (
            select(WinnerRow, TrialRow.conditions)
            .join(WinnerRow.problem)
            .outerjoin(TrialRow, WinnerRow.trial_id == TrialRow.id)
            .where(ProblemRow.op.in_(list(operators())))
            .order_by(WinnerRow.created_at)
        )
        if not with_samples:
            query = query.options(defer(WinnerRow.samples))
        with self._reading() as session:
            return [formats.winner_of(row, with_samples, measured) for row, measured in session.execute(query)]

    def known_winners(self) -> list[IndexedWinner]:
        """All winners, stale ones too, as far as look-ups need them."""
        with self._reading() as session:
            return indexed_winners(session)

    def entries(self, ops: Sequence[str], backends: Sequence[str]) -> list[Entry]:
        """The winners of these operators and backends, the oldest first. Imported winners have their author."""
        query = (
            select(WinnerRow, TrialRow.conditions, RunRow.settings)
            .join(WinnerRow.problem)
            .join(WinnerRow.hardware)
            .join(TrialRow, WinnerRow.trial_id == TrialRow.id)
            .join(TrialRow.run)
            .where(ProblemRow.op.in_(ops), HardwareRow.backend.in_(backends))
            .order_by(WinnerRow.created_at, WinnerRow.trial_id)
        )
        with self._reading() as session:
            return [entry_of(*row) for row in session.execute(query)]

    def merge(self, entries: Sequence[Entry], source: str) -> list[MergeOutcome]:
        """Imports winners that were tuned elsewhere, all or none. Of two winners with the same key the better proven one stays.
        Returns the outcome for each entry, in order. `source` names where they come from.
        """
        with self._writing() as session:
            return [take_in(session, entry, source) for entry in entries]

    # Misses

    def add_misses(self, misses: Sequence[MissRecord]) -> None:
        """Adds to the counts of misses."""
        with self._writing() as session:
            for miss in misses:
                session.merge(formats.problem_row(miss.problem))
                session.merge(formats.hardware_row(miss.hardware))
                session.flush()
                key = (miss.problem.key, miss.hardware.digest, miss.conditions.key)
                if row := session.get(MissRow, key):
                    kept = formats.miss_of(row)
                    row.count = min(kept.count + miss.count, 2**63 - 1)  # the largest integer of a column
                    row.last_asked = max(kept.last_asked, miss.last_asked)
                else:
                    session.add(formats.miss_row(miss))

    def misses(self, hardware: Hardware) -> list[MissRecord]:
        """The misses on this hardware, most frequent first."""
        query = (
            select(MissRow)
            .join(MissRow.problem)
            .where(MissRow.hardware_digest == hardware.digest, ProblemRow.op.in_(list(operators())))
            .order_by(MissRow.count.desc(), MissRow.last_asked.desc(), MissRow.problem_key, MissRow.conditions)
        )
        with self._reading() as session:
            return [formats.miss_of(row) for row in session.scalars(query)]

    def forget_miss(self, problem: Problem, hardware: Hardware, conditions: Conditions) -> None:
        """Deletes the record of a miss."""
        with self._writing() as session:
            if row := session.get(MissRow, (problem.key, hardware.digest, conditions.key)):
                session.delete(row)

    # The whole

    def counts(self) -> dict[str, int]:
        """How many `runs`, `trials` and `winners` are kept."""
        tables = {"runs": RunRow, "trials": TrialRow, "winners": WinnerRow}
        with self._reading() as session:
            return {name: session.scalar(select(func.count()).select_from(table)) or 0 for name, table in tables.items()}

    def counts_by_operator(self, kind: str) -> dict[str, int]:
        """How many `trials` or `winners` each operator has, operators included that are not loaded."""
        per_op = select(ProblemRow.op, func.count()).group_by(ProblemRow.op).order_by(ProblemRow.op)
        rows = per_op.join(WinnerRow.problem) if kind == "winners" else per_op.join_from(TrialRow, RunRow).join(RunRow.problem)
        with self._reading() as session:
            return {row[0]: row[1] for row in session.execute(rows)}

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        # A reader has no unsaved results, so every failure is reported like a failure to open.
        trouble = failing if self._writable else opening
        with trouble(self.url), Session(self.engine) as session:
            yield session

    @contextmanager
    def _writing(self, *, alone: bool = True) -> Iterator[Session]:
        if not self._writable:
            raise RuntimeError("this store was opened to read: open it with create=True to write")
        with failing(self.url), Session(writing(self.engine, alone=alone)) as session, session.begin():
            yield session


def _new_run(session: Session, problem: Problem, hardware: Hardware, environment: Environment, **values: Any) -> int:
    """Stores a run with its problem, hardware and software. Returns its id."""
    rows = formats.problem_row(problem), formats.hardware_row(hardware), formats.environment_row(environment)
    for row in rows:
        session.merge(row)
    session.flush()
    digests = {"hardware_digest": hardware.digest, "environment_digest": environment.digest}
    session.add(run := RunRow(problem_key=problem.key, **digests, **values))
    session.flush()
    return run.id


def _trials_with_runs() -> Select[TrialRow]:
    # Operators of later versions of autotax are left out, because this version does not know them.
    return (
        select(TrialRow)
        .join(TrialRow.run)
        .join(RunRow.problem)
        .join(RunRow.hardware)
        .join(RunRow.environment)
        .where(ProblemRow.op.in_(list(operators())))
        .options(
            contains_eager(TrialRow.run).options(
                contains_eager(RunRow.problem), contains_eager(RunRow.hardware), contains_eager(RunRow.environment)
            )
        )
        .order_by(TrialRow.id)
    )


# Imports of winners that were tuned elsewhere. An import also stores the winner's run and trial, which prove it.

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


def entry_of(row: WinnerRow, measured: Mapping[str, Any], settings: Mapping[str, Any]) -> Entry:
    """The entry for a stored winner, the conditions of its trial, and the settings of the run that found it."""
    origin = formats.decoded(settings, _Settings).imported_from
    return Entry(formats.winner_of(row, True, measured), origin.by if origin else None)


def take_in(session: Session, entry: Entry, source: str) -> MergeOutcome:
    """Imports a winner. Of two winners with the same key the better proven one stays. Winners of other variants also stay,
    because they may answer where sources differ. Here the best proven of all answers.
    """
    rivals = {row.kernel_digest: _with_origin(session, row) for row in _rivals(session, entry.winner)}
    own = rivals.get(entry.winner.kernel_digest)
    if own and own.digest == entry.digest:
        return MergeOutcome(entry, "kept", "it is the same")
    if own is None or own.strength < entry.strength:
        _import(session, entry, source)
    if not rivals:
        return MergeOutcome(entry, "added")
    best = max(rivals.values(), key=lambda rival: rival.strength)
    if best.strength >= entry.strength:
        return MergeOutcome(entry, "kept", f"of the one that is here: {verdict(best, entry)}")
    return MergeOutcome(entry, "replaced", verdict(entry, best))


def _with_origin(session: Session, row: WinnerRow) -> Entry:
    if (trial := session.get(TrialRow, row.trial_id)) and trial.run:
        return entry_of(row, trial.conditions, trial.run.settings)
    raise Malformed(f"the winner of {row.problem_key!r} names no trial")


def crown(session: Session, winner: WinnerRecord, met: Collection[str] | None) -> Config | None:
    """Stores a winner in the place of its rivals, which it has just beaten. Another tuner may have stored a rival that the winner
    has not been measured against. If such a rival is better proven, nothing is stored and the rival's config is returned. `met`:
    digests of the configs that the winner was measured against; None: all.
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
    row = formats.winner_row(winner)
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
        variant = formats.decoded(row.config, ConfigShape).variant
        return here and row.kernel_digest == variant_digest(op, variant)

    return [row for row in alike if rivals(row)]


def proves(trial: TrialRow | None, winner: WinnerRecord) -> bool:
    """Whether the trial verified exactly this winner's config and sources, for its problem, place and conditions."""
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


def _import(session: Session, entry: Entry, source: str) -> None:
    winner = entry.winner
    tuned_at = winner.created_at.isoformat() if winner.created_at else None
    settings = {IMPORTED: {"by": entry.by, "at": tuned_at, "source": source}}
    place = winner.problem, winner.hardware, winner.environment
    run_id = _new_run(session, *place, settings=settings, status="done", ended_at=datetime.now(UTC))
    trial = formats.trial_row(run_id, _trial(winner), winner.kernel_digest)
    session.add(trial)
    session.flush()
    proven = replace(winner, trial_id=trial.id)
    if not (winner.verified and proves(trial, proven)):
        raise ValueError(f"{winner.config} is not verified; only a config with a verified output can be a winner")
    _put(session, proven)
    session.flush()


def _trial(winner: WinnerRecord) -> TrialRecord:
    """The trial of an imported winner, as one of a finalist round: a later search here measures the config itself."""
    return TrialRecord(
        number=0,
        config=winner.config,
        status="ok",
        latency_us=winner.latency_us,
        samples=(winner.samples or {}).get(winner.config.digest),
        verified=winner.verified,
        conditions=winner.conditions.to_dict() | {"stage": "finalists"} | winner.known_code,
    )
