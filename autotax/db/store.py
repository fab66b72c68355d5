"""The store: every trial of every run, and the winners. Records in, records out."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Self

from sqlalchemy import Engine, Select, func, select
from sqlalchemy.orm import Session, contains_eager, defer

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import ENDINGS
from autotax.db import merge as merging
from autotax.db import row_mapping
from autotax.db.connection import empty_engine, open_engine, writing
from autotax.db.errors import failing, opening
from autotax.db.index import IndexedWinner
from autotax.db.merge import MergeOutcome
from autotax.db.records import Entry, MissRecord, RunRecord, TrialRecord, WinnerRecord
from autotax.db.row_mapping import known_winners
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

    def __init__(self, url: str, engine: Engine, *, exists: bool, writable: bool) -> None:
        self.url = url
        """The URL for Optuna's RDBStorage, which keeps its studies in the same database."""
        self.exists = exists
        """False if there is no such database; then this store is empty."""
        self.engine = engine
        self._writable = writable

    @classmethod
    def open(cls, url: str | os.PathLike[str] | None = None, *, create: bool = True) -> Self:
        """The database at a URL or path, or the default one. Raises UsageError, of one line, if it cannot be used.

        `create=True`, for writers, creates missing parts and checks that the database is writable. `create=False`, for readers,
        writes nothing; a missing database gives an empty store whose `exists` is False.
        """
        url = resolve_url(url)
        engine = open_engine(url, create=create)
        if engine is None:
            return cls(url, empty_engine(), exists=False, writable=False)
        return cls(url, engine, exists=True, writable=create)

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Runs

    def begin_run(
        self, problem: Problem, hardware: Hardware, environment: Environment, settings: Mapping[str, Any]
    ) -> int:
        """Stores a run with its problem, hardware, software and settings. Returns the run's id."""
        with self._writing() as session:
            session.merge(row_mapping.problem_row(problem))
            session.merge(row_mapping.hardware_row(hardware))
            session.merge(row_mapping.environment_row(environment))
            session.flush()
            run = RunRow(
                problem_key=problem.key,
                hardware_digest=hardware.digest,
                environment_digest=environment.digest,
                settings=dict(settings),
            )
            session.add(run)
            session.flush()
            return run.id

    def add_notice(self, run_id: int, text: str) -> None:
        """Stores a notice of a run, the same text once."""
        text = row_mapping.storable(text)
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
            return [row_mapping.run_of(row) for row in session.scalars(query)]

    # Trials

    def add_trial(self, run_id: int, trial: TrialRecord) -> int:
        """Stores one trial, failed or not. Returns its id."""
        with self._writing(alone=False) as session:
            op = session.scalar(select(ProblemRow.op).join(RunRow).where(RunRow.id == run_id)) or ""
            row = row_mapping.trial_row(run_id, trial, trial.kernel_digest or variant_digest(op, trial.config.variant))
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
            records = {run_id: row_mapping.run_of(run) for run_id, run in runs.items()}
            return [row_mapping.trial_of(row, records[row.run_id]) for row in rows]

    # Winners

    def set_winner(self, winner: WinnerRecord, met: Collection[str] | None = None) -> Config | None:
        """Stores the only winner of its problem in its place: it replaces the winner with its key and those of all variants with
        current sources. If another process has stored a better proven winner that is not in `met`, nothing is stored and the
        config of that winner is returned. `met` are digests of configs; None means all. Raises ValueError unless it and the trial
        it names are verified.
        """
        if not winner.verified:
            raise ValueError(f"{winner.config} is not verified; only a config with a verified output can be a winner")
        with self._writing() as session:
            if not merging.proves(session.get(TrialRow, winner.trial_id), winner):
                raise ValueError(
                    f"trial {winner.trial_id} is not a verified one of {winner.config} for {winner.problem} here"
                )
            return merging.crown(session, winner, met)

    def withdraw_winner(self, winner: WinnerRecord) -> None:
        """Deletes a winner that was found to be wrong; its trials stay."""
        with self._writing() as session:
            if row := session.get(WinnerRow, winner.key):
                session.delete(row)

    def winners(self, *, with_samples: bool = True) -> list[WinnerRecord]:
        """All winners, stale ones too, the oldest first. Without their samples they are quick to load."""
        query = (
            select(WinnerRow).join(WinnerRow.problem).where(ProblemRow.op.in_(list(operators()))).order_by(WinnerRow.created_at)
        )
        if not with_samples:
            query = query.options(defer(WinnerRow.samples))
        with self._reading() as session:
            return [row_mapping.winner_of(row, with_samples) for row in session.scalars(query)]

    def known_winners(self) -> list[IndexedWinner]:
        """All winners, stale ones too, as far as look-ups need them."""
        with self._reading() as session:
            return known_winners(session)

    def entries(self, ops: Sequence[str], backends: Sequence[str]) -> list[Entry]:
        """The winners of these operators and backends, the oldest first. Imported winners have their author."""
        query = (
            select(WinnerRow, RunRow.settings)
            .join(WinnerRow.problem)
            .join(WinnerRow.hardware)
            .join(TrialRow, WinnerRow.trial_id == TrialRow.id)
            .join(TrialRow.run)
            .where(ProblemRow.op.in_(ops), HardwareRow.backend.in_(backends))
            .order_by(WinnerRow.created_at, WinnerRow.trial_id)
        )
        with self._reading() as session:
            return [merging.entry_of(row, settings) for row, settings in session.execute(query)]

    def merge(self, entries: Sequence[Entry], source: str) -> list[MergeOutcome]:
        """Imports winners that were tuned elsewhere, all or none. Of two winners with the same key the better proven one stays.
        Returns the outcome for each entry, in order. `source` names where they come from.
        """
        with self._writing() as session:
            return [merging.take_in(session, entry, source) for entry in entries]

    # Misses

    def add_misses(self, misses: Sequence[MissRecord]) -> None:
        """Adds to the counts of misses."""
        with self._writing() as session:
            for miss in misses:
                session.merge(row_mapping.problem_row(miss.problem))
                session.merge(row_mapping.hardware_row(miss.hardware))
                session.flush()
                key = (miss.problem.key, miss.hardware.digest, miss.conditions.key)
                if row := session.get(MissRow, key):
                    kept = row_mapping.miss_of(row)
                    row.count = min(kept.count + miss.count, 2**63 - 1)  # the largest integer of a column
                    row.last_asked = max(kept.last_asked, miss.last_asked)
                else:
                    session.add(row_mapping.miss_row(miss))

    def misses(self, hardware: Hardware) -> list[MissRecord]:
        """The misses on this hardware, most frequent first."""
        query = (
            select(MissRow)
            .join(MissRow.problem)
            .where(MissRow.hardware_digest == hardware.digest, ProblemRow.op.in_(list(operators())))
            .order_by(MissRow.count.desc(), MissRow.last_asked.desc(), MissRow.problem_key, MissRow.conditions)
        )
        with self._reading() as session:
            return [row_mapping.miss_of(row) for row in session.scalars(query)]

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
            return {
                name: session.scalar(select(func.count()).select_from(table)) or 0 for name, table in tables.items()
            }

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
