"""Writers of every kind, killed by SIGKILL at random moments: what they said is kept, nothing is half there, and others go on.

A writer is a fork of this process that does one write after the other, and tells when each begins and when it is done.
"""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import optuna
import pytest

from autotax.core.conditions import ON_CPU
from autotax.db import Store, formats
from autotax.db.records import MissRecord
from autotax.operators import operators
from autotax.operators.problems import AllGatherGemm
from tests.db.conftest import EXAMPLES, HARDWARE, PROBLEM
from tests.db.test_exchange import an_entry

pytestmark = pytest.mark.usefixtures("without_syncing")
SAMPLE, VOLUME = 1, 25
KILLS = pytest.mark.parametrize("kills", [SAMPLE, pytest.param(VOLUME, marks=pytest.mark.volume)])
LONGEST_S = 0.1
"""The longest time from the first completed write to the kill: enough for several writes."""
FEW = 5
"""Winners in one import."""
ALL = (list(operators()), ["cuda", "rocm", "cpu"])
optuna.logging.set_verbosity(optuna.logging.ERROR)


def problem(number: int) -> AllGatherGemm:
    return replace(PROBLEM, m=number + 1)


# The work of the writer processes, and how much of it the database holds


def import_winners(folder: Path, number: int) -> None:
    with Store.open(folder / "autotax.db") as store:
        store.merge([an_entry(problem=problem(FEW * number + index)) for index in range(FEW)], "a file")


def imported(folder: Path) -> int:
    with Store.open(folder / "autotax.db", create=False) as store:
        whole, some = divmod(len(store.entries(*ALL)), FEW)
    assert not some
    return whole


def save_misses(folder: Path, number: int) -> None:
    when = datetime.fromtimestamp(number, UTC)
    with Store.open(folder / "autotax.db") as store:
        store.add_misses([MissRecord(problem(index), HARDWARE, ON_CPU, 1, when) for index in range(FEW)])


def missed(folder: Path) -> int:
    with Store.open(folder / "autotax.db", create=False) as store:
        counts = [miss.count for miss in store.misses(HARDWARE)] or [0] * FEW
    assert counts == counts[:1] * FEW
    return counts[0]


def prove_winner(folder: Path, number: int) -> None:
    with Store.open(folder / "autotax.db") as store:
        EXAMPLES.keep(store, latency_us=number + 1.0)


def proven(folder: Path) -> int:
    with Store.open(folder / "autotax.db", create=False) as store:
        winners, trials = store.winners(), store.trials()
    assert len(winners) <= 1
    assert not winners or winners[0].trial_id in range(1, len(trials) + 1)
    return int(winners[0].latency_us) if winners else 0


def write_file(folder: Path, number: int) -> None:
    formats.write(folder / "winners.json", [an_entry(by=f"writer{number + 1}", problem=problem(m)) for m in range(FEW)])


def written(folder: Path) -> int:
    entries = formats.read(folder / "winners.json")
    (by,) = {entry.by or "" for entry in entries}
    assert len(entries) == FEW
    return int(by.removeprefix("writer"))


def make_database(folder: Path, number: int) -> None:
    with Store.open(folder / f"{number}.db") as store:
        EXAMPLES.begin(store)


def made(folder: Path) -> int:
    whole = 0
    for number in range(len(list(folder.glob("*.db")))):
        with Store.open(folder / f"{number}.db", create=False) as store:
            whole += len(store.runs())
        with Store.open(folder / f"{number}.db") as store:  # a write that the kill interrupted is repeated now
            assert store.exists
    return whole


def study_of(folder: Path) -> optuna.Study:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'autotax.db'}")
    return optuna.create_study(study_name="one", storage=storage, load_if_exists=True)


def ask_and_tell(folder: Path, number: int) -> None:
    study = study_of(folder)
    trial = study.ask()
    study.tell(trial, trial.suggest_float("x", number, number + 1))


def answered(folder: Path) -> int:
    trials = study_of(folder).get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert all(trial.value == trial.params["x"] for trial in trials)
    return len(trials)


@dataclass(frozen=True)
class Writer:
    write: Callable[[Path, int], None]
    found: Callable[[Path], int]
    """The number of stored writes, after a check that each is complete."""


WRITERS = {
    "import": Writer(import_winners, imported),
    "misses": Writer(save_misses, missed),
    "winner": Writer(prove_winner, proven),
    "file": Writer(write_file, written),
    "new database": Writer(make_database, made),
    "study": Writer(ask_and_tell, answered),
}


# The kills


def written_until_killed(writer: Writer, folder: Path, first: int, seconds: float) -> tuple[int, int]:
    """How many writes were begun and how many were done, those before `first` among them, until a SIGKILL so long after the
    first of them.
    """
    fork = multiprocessing.get_context("fork")
    reader, sender = fork.Pipe(duplex=False)

    def work() -> None:
        reader.close()
        for number in range(first, 10**6):
            sender.send_bytes(b"begun")
            writer.write(folder, number)
            sender.send_bytes(b"done")

    process = fork.Process(target=work)
    process.start()
    sender.close()
    heard = 0
    try:
        while heard < 2:
            reader.recv_bytes()
            heard += 1
        time.sleep(seconds)
        process.kill()
        while True:
            reader.recv_bytes()
            heard += 1
    except EOFError:
        process.join()
    assert process.exitcode == -9, "it ended by itself"
    return first + (heard + 1) // 2, first + heard // 2


@pytest.mark.timeout(900)
@KILLS
@pytest.mark.parametrize("name", WRITERS)
def test_what_a_killed_writer_has_told_is_kept_and_nothing_is_half_there(tmp_path: Path, name: str, kills: int) -> None:
    writer, chance, kept, amid = WRITERS[name], random.Random(kills), 0, 0
    for _ in range(kills):
        begun, done = written_until_killed(writer, tmp_path, kept, chance.uniform(0.0, LONGEST_S))
        amid += begun > done
        for path in tmp_path.glob("*.db"):
            with sqlite3.connect(path) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], path
            connection.close()
        kept = writer.found(tmp_path)
        assert done <= kept <= begun
    assert amid or kills == SAMPLE, "no kill came amid a write"
    parts = [path for path in tmp_path.iterdir() if path.suffix == ".part"]
    assert len(parts) <= kills, "a kill leaves one unfinished file at most"


@KILLS
def test_who_writes_beside_a_killed_writer_goes_on(tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock ends with the killed writer, so nobody waits for it."""
    monkeypatch.setattr("autotax.db.connection.BUSY_SECONDS", 800.0)
    prove_winner(tmp_path, 0)
    chance = random.Random(kills)
    for kill in range(kills):
        doomed = multiprocessing.get_context("fork").Process(target=prove_again_and_again, args=[tmp_path])
        doomed.start()
        started = time.monotonic()
        time.sleep(chance.uniform(0.02, 0.02 + LONGEST_S))
        doomed.kill()
        import_winners(tmp_path, kill)
        assert time.monotonic() - started < 400, "SQLite would wait for longer"
        doomed.join()
        assert doomed.exitcode == -9
        assert imported_beside(tmp_path) == FEW * (kill + 1)


def prove_again_and_again(folder: Path) -> None:
    while True:
        prove_winner(folder, 0)


def imported_beside(folder: Path) -> int:
    """All winners but the one that is proven again and again, where it is not one of these."""
    with Store.open(folder / "autotax.db", create=False) as store:
        return sum(entry.winner.problem != PROBLEM for entry in store.entries(*ALL))
