"""The conformance suite of stores, for any database.

    from tests.conformance.stores import check_store
    check_store("mariadb+pymysql://root@/autotax_test")

Each check takes the URL of an empty database, which is emptied again after the check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import MetaData, create_engine, inspect, text
from sqlalchemy.exc import IntegrityError

from autotax.core.conditions import EAGER, Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.settings import TRIAL_STATUSES
from autotax.db import Store, resolve_url
from autotax.db.records import Entry, MissRecord, Place
from autotax.db.url import shown, sqlite_path
from autotax.operators import operators
from autotax.operators.registry import variant_digest
from autotax.testing.examples import ENVIRONMENT, HARDWARE, Examples
from tests.conformance.checks import raises, run_all

WRITERS, TRIALS = 4, 10
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
OTHER_TRITON = replace(ENVIRONMENT, triton="3.7.1")


def check_store(url: str | Path) -> int:
    """Runs the suite on an empty database and returns the number of checks.

    Raises UsageError for a database that is not empty or cannot be used, AssertionError with a line for each failure.
    """
    resolved = resolve_url(url)
    Store.open(resolved, create=False).close()  # raises now if the database cannot be used
    if tables := _tables(resolved):
        few = ", ".join(sorted(tables)[:3])
        raise UsageError(f"database {shown(resolved)} is not empty (it holds {few}), and the suite would empty it: give another")
    return run_all({name: partial(run_check, name, resolved) for name in CHECKS})


def run_check(name: str, url: str) -> None:
    """Runs the check of that name on an empty database, and empties it."""
    try:
        CHECKS[name](url, Examples.of_any_operator())
    finally:
        wipe(url)


def wipe(url: str) -> None:
    """Removes all tables of a database."""
    if not _is_there(url):
        return
    engine = create_engine(url)
    tables = MetaData()
    tables.reflect(engine)
    tables.drop_all(engine)
    engine.dispose()


def _tables(url: str) -> list[str]:
    if not _is_there(url):
        return []
    engine = create_engine(url)
    try:
        return inspect(engine).get_table_names()
    finally:
        engine.dispose()


def _is_there(url: str) -> bool:
    """Whether the file of the database exists. Connecting by SQLAlchemy would create it."""
    path = sqlite_path(url)
    return path is None or path.exists()


def _edit(url: str, statement: str) -> None:
    """Executes a statement, as anybody who reaches the database could."""
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()


# Runs and trials


def trials_come_back_as_they_went_in(url: str, some: Examples) -> None:
    bare: dict[str, Any] = {"latency_us": None, "samples": None, "slowest_rank": None, "verified": False, "relative_error": None}
    failed = [status for status in TRIAL_STATUSES if status != "ok"]
    added = [some.trial(0)]
    added += [
        some.trial(number, status=status, error=f"{status}: said\nthe compiler", **bare)
        for number, status in enumerate(failed, start=1)
    ]
    with Store.open(url) as store:
        run_id = store.begin_run(some.problem, HARDWARE, ENVIRONMENT, {"sampler": "tpe", "seed": 1})
        ids = [store.add_trial(run_id, trial) for trial in added]
        trials = store.trials()
    assert trials == added
    assert [trial.id for trial in trials] == ids
    assert {trial.run_id for trial in trials} == {run_id}
    assert all(trial.created_at and abs(datetime.now(UTC) - trial.created_at) < timedelta(minutes=1) for trial in trials)
    run = trials[0].run
    assert run is not None
    assert (run.problem, run.hardware, run.environment) == (some.problem, HARDWARE, ENVIRONMENT)
    assert (run.settings, run.status, run.ended_at) == ({"sampler": "tpe", "seed": 1}, "running", None)


def an_error_that_is_not_a_number_or_text_that_is_not_text_is_kept(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        trial = some.trial(status="wrong_result", relative_error=math.nan, error="bad\0 \udcff bytes")
        store.add_trial(some.begin(store), trial)
        (kept,) = store.trials()
    assert kept.relative_error == math.inf
    assert kept.error == "bad ? bytes"


def trials_are_found_by_what_is_asked(url: str, some: Examples) -> None:
    places = [
        (some.problem, HARDWARE, ENVIRONMENT),
        (some.other_problem, HARDWARE, ENVIRONMENT),
        (some.problem, replace(HARDWARE, device="AMD Instinct MI300X"), ENVIRONMENT),
        (some.problem, HARDWARE, OTHER_TRITON),
    ]
    with Store.open(url) as store:
        for number, place in enumerate(places):
            store.add_trial(store.begin_run(*place, {}), some.trial(number))
        last_run = store.begin_run(*places[0], {})
        store.add_trial(last_run, some.trial(4, status="hang", latency_us=None))

        def numbers(*args: object, **more: object) -> list[int]:
            return [trial.number for trial in store.trials(*args, **more)]  # type: ignore[arg-type]

        assert numbers() == [0, 1, 2, 3, 4]
        assert numbers(some.problem) == [0, 2, 3, 4]
        assert numbers(some.other_problem) == [1]
        assert numbers(some.problem, HARDWARE) == [0, 3, 4]
        assert numbers(environment=OTHER_TRITON) == [3]
        assert numbers(environment=replace(ENVIRONMENT, kernels="f" * 16)) == [0, 1, 2, 4], "those of a variant say more"
        assert numbers(run_id=last_run) == [4]
        assert [run.problem for run in store.runs(some.other_problem)] == [some.other_problem]
        assert store.counts() == {"runs": 5, "trials": 5, "winners": 0}


def a_run_ends(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        run_id = some.begin(store)
        store.end_run(run_id, "interrupted")
        (run,) = store.runs()
        assert run.status == "interrupted"
        assert run.ended_at is not None and run.ended_at >= run.started_at
        with raises(ValueError, "finished"):
            store.end_run(run_id, "finished")


def a_run_keeps_what_was_noticed_and_its_accounts(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        run_id, other = (some.begin(store) for _ in range(2))
        for notice in ("rank 1 is slow", "clocks fell\0 to 1.2 GHz", "rank 1 is slow", "clocks fell\0 to 1.2 GHz"):
            store.add_notice(run_id, notice)
        store.add_notice(other, "rank 1 is slow")
        store.end_run(run_id, "done", {"measuring_s": 12.5, "compiling_s": 3.0})
        store.end_run(other, "interrupted")
        run, bare = store.runs()
    assert run.notices == ("rank 1 is slow", "clocks fell to 1.2 GHz")
    assert run.accounts == {"measuring_s": 12.5, "compiling_s": 3.0}
    assert (bare.notices, bare.accounts) == (("rank 1 is slow",), {})


# Winners


def each_conditions_have_their_winner(url: str, some: Examples) -> None:
    others = [Conditions("eager", "warm"), Conditions("graph", "warm"), Conditions(skew_us=12.5)]
    with Store.open(url) as store:
        usual = some.keep(store)
        kept = [some.keep(store, config=some.baseline, conditions=conditions) for conditions in others]
        assert store.winners() == [usual, *kept]
        again = some.keep(store, config=some.another, conditions=others[1])
        assert store.winners() == [usual, kept[0], kept[2], again]


def there_is_one_winner_of_a_key(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        first = some.keep(store)
        assert store.winners() == [first]
        second = some.keep(store, config=some.baseline, speedup=1.0, tie=True)
        assert store.winners() == [second]
        assert store.winners(with_samples=False) == [replace(second, samples=None)]
        other = some.keep(store, environment=replace(ENVIRONMENT, comm="nccl 2.28.0"))
        assert store.winners() == [second, other]
        assert store.counts()["winners"] == 2
        store.withdraw_winner(second)
        assert store.winners() == [other]


def a_winner_that_was_not_met_stays_if_it_is_better_proven(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        first = some.keep(store)
        trial = store.add_trial(some.begin(store), some.trial(config=some.baseline))
        weak = some.winner(trial, some.baseline, interval_low=1.0, interval_high=1.0, speedup=1.0)
        assert store.set_winner(weak, met={some.baseline.digest}) == first.config
        assert store.winners() == [first]
        strong = replace(weak, interval_low=9.0, interval_high=9.0, speedup=9.0)
        assert store.set_winner(strong, met={some.baseline.digest}) is None
        assert store.winners() == [strong]
        assert store.set_winner(weak, met={some.baseline.digest, first.config.digest}) is None, "it has met them all"
        assert store.winners() == [weak]


def winners_of_other_sources_are_kept_for_where_they_hold(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        named = ((some.config, "e"), (some.baseline, "f"))
        old, other = (some.keep(store, config=config, kernel_digest=digit * 16) for config, digit in named)
        first = some.keep(store)
        assert store.winners() == [old, other, first]
        second = some.keep(store, config=some.another, environment=replace(ENVIRONMENT, kernels="f" * 16))
        assert store.winners() == [old, other, second], "of those that hold here there is one"
        again = some.keep(store, config=Config.of(some.config.variant, block_m=32), kernel_digest="e" * 16)
        assert store.winners() == [other, second, again]
        today = [variant_digest(some.problem.op, config.variant) for config in (some.config, some.another)]
        assert [trial.kernel_digest for trial in store.trials()] == ["e" * 16, "f" * 16, *today, "e" * 16]


def what_is_not_verified_never_wins(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        run_id = some.begin(store)
        verified, unverified = (store.add_trial(run_id, some.trial(verified=flag)) for flag in (True, False))
        with raises(ValueError, "not verified"):
            store.set_winner(some.winner(verified, verified=False))
        unproven = [
            some.winner(unverified),
            some.winner(verified, some.another),
            some.winner(verified, problem=some.other_problem),
            some.winner(verified, environment=replace(ENVIRONMENT, kernels="f" * 16)),
            some.winner(verified, kernel_digest="f" * 16),
            some.winner(verified + 1000),
            some.winner(verified, conditions=EAGER),
        ]
        for winner in unproven:
            with raises(ValueError, "not a verified one"):
                store.set_winner(winner)
        assert store.winners() == []
        store.set_winner(some.winner(verified))
        with raises(IntegrityError):
            _edit(url, "UPDATE autotax_winner SET verified = (1 = 0)")


def winners_are_known_to_look_ups(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        winner = some.keep(store, environment=replace(ENVIRONMENT, python="3.12.0"))
        [known] = store.known_winners()
    assert (known.problem_key, known.config, known.tie) == (some.problem.key, some.config, False)
    assert (known.place, known.kernel_digest) == (Place(HARDWARE, winner.environment, Conditions()), winner.kernel_digest)
    assert (known.speedup, known.interval_low, known.interval_high) == (1.245, 1.2, 1.29)


# Winners from elsewhere


def _entry(some: Examples, config: Config | None = None, **more: Any) -> Entry:
    return Entry(some.winner(0, config, created_at=NOW, **more), "me@here")


def winners_of_other_software_or_conditions_are_no_conflict(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        some.keep(store)
        others = [_entry(some, environment=OTHER_TRITON), _entry(some, conditions=EAGER)]
        assert [outcome.what for outcome in store.merge(others, "a file")] == ["added", "added"]
        assert len(store.winners()) == 3
        assert {entry.by for entry in store.entries([some.problem.op], ["cuda"])} == {None, "me@here"}


def of_variants_that_hold_here_the_better_proven_answers_and_all_stay(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        some.keep(store, interval_low=1.1)
        others = [_entry(some, some.baseline, interval_low=1.05), _entry(some, some.baseline, kernel_digest="f" * 16)]
        assert [outcome.what for outcome in store.merge(others, "a file")] == ["kept", "added"]
        [better] = store.merge([_entry(some, some.another, interval_low=1.15)], "a file")
        assert (better.what, better.reason) == ("replaced", "its speed-up is at least 1.15x, the other's 1.1x")
        kept = [some.baseline, some.baseline, some.another, some.config]
        assert sorted(w.config.variant for w in store.winners()) == sorted(config.variant for config in kept)


def all_or_none_is_taken_in(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        with raises(ValueError, "not verified"):
            store.merge([_entry(some), _entry(some, problem=some.other_problem, verified=False)], "a file")
        assert store.counts() == {"runs": 0, "trials": 0, "winners": 0}


# Misses


def misses_are_kept_in_order_until_they_are_forgotten(url: str, some: Examples) -> None:
    usual, later = Conditions(), NOW.replace(year=2027)
    first, second = MissRecord(some.problem, HARDWARE, usual, 2, NOW), MissRecord(some.other_problem, HARDWARE, EAGER, 3, NOW)
    with Store.open(url) as store:
        store.add_misses([first, second])
        store.add_misses([replace(first, count=2**40, last_asked=later)])
        first = replace(first, count=2**40 + 2, last_asked=later)
        assert store.misses(HARDWARE) == [first, second]
        assert store.misses(replace(HARDWARE, count=8)) == []
        store.forget_miss(some.problem, HARDWARE, EAGER)
        assert store.misses(HARDWARE) == [first, second]
        for _ in range(2):
            store.forget_miss(some.problem, HARDWARE, usual)
        assert store.misses(HARDWARE) == [second]


# The database


def it_refuses_what_makes_no_sense(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        with raises(IntegrityError):
            store.add_trial(12345, some.trial())
        store.add_trial(some.begin(store), some.trial())
    for change in ("status = 'lost'", "latency_us = NULL"):
        with raises(IntegrityError):
            _edit(url, f"UPDATE autotax_trial SET {change}")


def what_was_kept_is_there_after_reopening(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        winner = some.keep(store)
    for create in (True, False):
        with Store.open(url, create=create) as store:
            assert store.exists
            assert store.winners() == [winner]
            assert store.trials() == [some.trial()]


def a_store_opened_to_read_does_not_write(url: str, some: Examples) -> None:
    Store.open(url).close()
    with Store.open(url, create=False) as store, raises(RuntimeError, "create=True"):
        some.begin(store)


def operators_that_are_not_here_are_left_out(url: str, some: Examples) -> None:
    with Store.open(url) as store:
        some.keep(store)
        unknown = "-".join([*operators(), "and more"])[:64]
        _edit(url, f"UPDATE autotax_problem SET op = '{unknown}'")
        assert store.winners() == []
        assert store.trials() == []
        assert store.runs() == []


def writers_at_once_lose_nothing(url: str, some: Examples) -> None:
    """Each writer has a separate store, as separate processes have. All open a new database at the same time."""

    def write(_: int) -> int:
        with Store.open(url) as store:
            run_id = some.begin(store)
            for number in range(TRIALS):
                store.add_trial(run_id, some.trial(number))
            store.end_run(run_id, "done")
            return run_id

    with ThreadPoolExecutor(WRITERS) as pool:
        runs = list(pool.map(write, range(WRITERS)))
    with Store.open(url, create=False) as store:
        assert sorted(run.id for run in store.runs()) == sorted(runs)
        assert {run.status for run in store.runs()} == {"done"}
        for run_id in runs:
            assert [trial.number for trial in store.trials(run_id=run_id)] == list(range(TRIALS))


def optuna_keeps_its_studies_beside(url: str, some: Examples) -> None:
    import optuna

    with Store.open(url) as store, _optuna(url) as storage:
        winner = some.keep(store)
        study = optuna.create_study(study_name=some.problem.key, storage=storage)
        for _ in range(3):
            trial = study.ask()
            store.add_trial(store.runs()[0].id, some.trial(number=trial.number + 1))
            study.tell(trial, trial.suggest_float("x", 0, 1))
    with Store.open(url) as store, _optuna(url) as storage:
        assert store.winners() == [winner]
        assert store.counts()["trials"] == 4
        assert len(optuna.load_study(study_name=some.problem.key, storage=storage).trials) == 3


def optuna_may_come_first(url: str, some: Examples) -> None:
    import optuna

    if path := sqlite_path(url):
        path.parent.mkdir(exist_ok=True)
    with _optuna(url) as storage:
        study = optuna.create_study(storage=storage)
        with Store.open(url, create=False) as store:
            assert not store.exists
            assert store.winners() == []
        with Store.open(url) as store:
            some.keep(store)
        assert study.ask().number == 0


@contextmanager
def _optuna(url: str) -> Iterator[Any]:
    """Optuna's storage in the same database. Its connections are closed at the end."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


CHECKS: dict[str, Callable[[str, Examples], None]] = {
    check.__name__: check
    for check in (
        trials_come_back_as_they_went_in,
        an_error_that_is_not_a_number_or_text_that_is_not_text_is_kept,
        trials_are_found_by_what_is_asked,
        a_run_ends,
        a_run_keeps_what_was_noticed_and_its_accounts,
        each_conditions_have_their_winner,
        there_is_one_winner_of_a_key,
        a_winner_that_was_not_met_stays_if_it_is_better_proven,
        winners_of_other_sources_are_kept_for_where_they_hold,
        what_is_not_verified_never_wins,
        winners_are_known_to_look_ups,
        winners_of_other_software_or_conditions_are_no_conflict,
        of_variants_that_hold_here_the_better_proven_answers_and_all_stay,
        all_or_none_is_taken_in,
        misses_are_kept_in_order_until_they_are_forgotten,
        it_refuses_what_makes_no_sense,
        what_was_kept_is_there_after_reopening,
        a_store_opened_to_read_does_not_write,
        operators_that_are_not_here_are_left_out,
        writers_at_once_lose_nothing,
        optuna_keeps_its_studies_beside,
        optuna_may_come_first,
    )
}
