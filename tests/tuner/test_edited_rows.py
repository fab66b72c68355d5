"""A database that somebody edited, tuned once more: every row of every table, Optuna's too, in one place."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from autotax.core.errors import MachineError, UsageError
from autotax.db import Store
from tests.tuner.shared import gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("optunas_tables", "without_syncing")
SAMPLE, VOLUME = 8, 150
TEXTS = ["", "x", "\x1b[31m", "[]", "{}", "[1]", "null", '"x"', '{"name": "x"}', "1e999", b"\xff\x00"]
WRONG = [None, 0, -1, 2, 2**40, 1e300, 0.5, *TEXTS]


def places(db: Path) -> list[tuple[str, str]]:
    """Each column of each table that holds something."""
    with sqlite3.connect(db) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        full = [table for table in tables if connection.execute(f"SELECT 1 FROM {table}").fetchone()]
        return [(table, row[1]) for table in full for row in connection.execute(f"PRAGMA table_info({table})")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("amount", [SAMPLE, pytest.param(VOLUME, marks=pytest.mark.volume)])
def test_an_edited_row_costs_a_run_at_most_and_one_line(tmp_path: Path, amount: int) -> None:
    good, draw = tmp_path / "good.db", random.Random(amount)
    with Store.open(tmp_path / "first.db") as store:
        run(store, SyntheticRunner(gemm_landscape), trials=4)
    with sqlite3.connect(tmp_path / "first.db") as connection:  # with what is in its log, which Optuna has open
        connection.execute("VACUUM INTO ?", [str(good)])
    connection.close()
    outcomes, wrong, tables = Counter[str](), [], Counter[str]()
    while outcomes.total() < amount:
        (table, column), value = draw.choice(places(good)), draw.choice(WRONG)
        db = tmp_path / f"{outcomes.total()}.db"  # Optuna may still have the one before open
        shutil.copy(good, db)
        with sqlite3.connect(db) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            try:
                connection.execute(f"UPDATE {table} SET {column} = ?", [value])
            except (sqlite3.IntegrityError, OverflowError):  # NULL where none may be, two of one key
                continue
        connection.close()
        try:
            with Store.open(db) as store:
                verdict = run(store, SyntheticRunner(gemm_landscape), trials=6)
            outcomes["tuned"] += verdict.winner is not None
        except (UsageError, MachineError) as error:
            outcomes["refused"] += 1
            if "\n" in str(error) or not str(error).isprintable():
                wrong.append(f"{table}.{column} = {value!r}: {error}")
        except Exception as error:
            outcomes["raised"] += 1
            wrong.append(f"{table}.{column} = {value!r}: {type(error).__name__}: {str(error)[:200]}")
        tables[table] += 1
    assert not wrong, f"{len(wrong)} of {amount}:\n" + "\n".join(wrong)
    assert outcomes["tuned"] and outcomes["refused"]
    assert {"trials", "autotax_trial"} <= set(tables) or amount == SAMPLE
