"""The cost of look-ups with many winners loaded: `python results/lookup/bench.py [WINNERS]`. Needs no GPU; writes nothing but a
temporary database.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from sqlalchemy import insert

from autotax import AllGatherGemm, lookup
from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.db import Store, formats
from autotax.db.lookup import reload
from autotax.db.records import TrialRecord, WinnerRecord
from autotax.db.schema import ProblemRow, WinnerRow
from autotax.hardware import detect
from autotax.operators.registry import variant_digest
from autotax.software import environment
from autotax.spaces import space_for

FIRST = AllGatherGemm(512, 7168, 8192, world_size=2)
HERE = detect()
USUAL = Conditions.usual(HERE.on_gpu)
LOOKS, ROUNDS = 1000, 51


def fill(path: Path, count: int) -> None:
    """`count` winners: ten sizes of m for each n. Rows at once, for one transaction each would take minutes."""
    software, config, bsp = environment(HERE.backend), space_for(FIRST, HERE).default("push"), Config("bsp")
    problems = [replace(FIRST, m=64 * (1 + i % 10), n=128 * (1 + i // 10), k=4096) for i in range(count)]
    problems[0] = FIRST
    samples = {side.digest: [[100.0 + i for i in range(100)]] * 4 for side in (config, bsp)}
    with Store.open(path) as store:
        run = store.begin_run(FIRST, HERE, software, {})
        trial = TrialRecord(0, config, "ok", 100.0, None, verified=True, conditions=USUAL.to_dict())
        trial_id = store.add_trial(run, trial)
        store.end_run(run, "done")
        figures = (100.0, 120.0, bsp, 1.2, 1.19, 1.21, False, True)
        sources = variant_digest(FIRST.op, config.variant)
        won = (FIRST, HERE, software, trial_id, config, *figures, samples, USUAL, datetime.now(UTC))
        winner = WinnerRecord(*won, kernel_digest=sources)
        winners = [replace(winner, problem=problem) for problem in problems]
        with store.engine.begin() as connection:
            rows = [{"key": p.key, "op": p.op, "fields": p.to_dict()} for p in problems if p != FIRST]
            connection.execute(insert(ProblemRow), rows)
            connection.execute(insert(WinnerRow), [_values(formats.winner_row(winner)) for winner in winners])


def _values(row: WinnerRow) -> dict[str, object]:
    return {column.key: getattr(row, column.key) for column in WinnerRow.__table__.columns}


def microseconds(problem: AllGatherGemm, **asked: object) -> str:
    """One look-up of a problem that was asked for before, made anew as a program does; the problem itself is not timed."""
    costs = []
    for _ in range(ROUNDS):
        fresh = [replace(problem) for _ in range(LOOKS)]
        start = time.perf_counter()
        for copy in fresh:
            lookup(copy, **asked)
        costs.append((time.perf_counter() - start) / LOOKS * 1e6)
    return f"{median(costs):.2f} us"


def once(problem: AllGatherGemm) -> tuple[str, float]:
    """The match, and the milliseconds of a look-up of what was not asked for before."""
    start = time.perf_counter()
    answer = lookup(problem)
    return answer.match, (time.perf_counter() - start) * 1e3


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "autotax.db"
        os.environ["AUTOTAX_DB"] = str(db)
        lookup(FIRST)  # imports, and hashing the kernel sources, are not the database's
        fill(db, count)
        near, none = replace(FIRST, m=500), replace(FIRST, n=7, k=8)
        print(f"{count} winners, {db.stat().st_size / 2**20:.0f} MiB; Python {platform.python_version()}, {platform.machine()}")
        for problem in (FIRST, near):
            loads = []
            for _ in range(15):
                reload()
                match, milliseconds = once(problem)
                loads.append(milliseconds)
            ends = f"{min(loads):.0f} to {max(loads):.0f}"
            print(f"{match:9} {median(loads):.0f} ms ({ends}) for the first look-up, which loads all")
        for problem in (FIRST, near, none):
            match, _ = once(problem)
            alone = microseconds(problem)
            full = microseconds(problem, hardware=HERE, db=str(db), conditions=USUAL)
            print(f"{match:9} {alone} a look-up; {full} with hardware, database and conditions given")
        for problem in (near, none):
            match, milliseconds = once(replace(problem, m=499))
            print(f"{match:9} {milliseconds:.1f} ms for a size that was not asked for before")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
