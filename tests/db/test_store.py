"""What every store must do, whatever database is behind it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import optuna
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import Store
from autotax.db.url import sqlite_path
from autotax.operators.problems import FlashDecode
from autotax.sources import variant_digest
from autotax.statuses import TRIAL_STATUSES
from tests.db.conftest import BSP, ENVIRONMENT, HARDWARE, PROBLEM, PUSH, a_trial, a_winner, keep_winner


def test_trials_come_back_as_they_went_in(store: Store) -> None:
    run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {"sampler": "tpe", "seed": 1})
    bare = {"latency_us": None, "samples": None, "slowest_rank": None, "verified": False, "relative_error": None}
    failed = [status for status in TRIAL_STATUSES if status != "ok"]
    added = [a_trial(0)] + [
        a_trial(number, status=status, error=f"{status}: said\nthe compiler", **bare)
        for number, status in enumerate(failed, start=1)
    ]
    ids = [store.add_trial(run_id, trial) for trial in added]

    found = store.trials()
    assert found == added
    assert [trial.id for trial in found] == ids
    assert {trial.run_id for trial in found} == {run_id}
    assert all(trial.created_at and abs(datetime.now(UTC) - trial.created_at) < timedelta(minutes=1) for trial in found)
    run = found[0].run
    assert run is not None
    assert (run.problem, run.hardware, run.environment) == (PROBLEM, HARDWARE, ENVIRONMENT)
    assert (run.settings, run.status, run.ended_at) == ({"sampler": "tpe", "seed": 1}, "running", None)


def test_an_error_that_is_not_a_number_or_text_that_is_not_text_is_kept(store: Store) -> None:
    run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
    store.add_trial(run_id, a_trial(status="wrong_result", relative_error=math.nan, error="bad\0 \udcff bytes"))
    (trial,) = store.trials()
    assert trial.relative_error == math.inf
    assert trial.error == "bad ? bytes"


def test_trials_are_found_by_what_is_asked(store: Store) -> None:
    other_problem = FlashDecode(batch=1, q_heads=64, kv_heads=8, head_dim=128, kv_len=131072, world_size=4)
    other_hardware = replace(HARDWARE, device="AMD Instinct MI300X")
    other_triton = replace(ENVIRONMENT, triton="3.7.1")
    places = [
        (PROBLEM, HARDWARE, ENVIRONMENT),
        (other_problem, HARDWARE, ENVIRONMENT),
        (PROBLEM, other_hardware, ENVIRONMENT),
        (PROBLEM, HARDWARE, other_triton),
    ]
    for number, place in enumerate(places):
        store.add_trial(store.begin_run(*place, {}), a_trial(number))
    last_run = store.begin_run(*places[0], {})
    store.add_trial(last_run, a_trial(4, status="hang", latency_us=None))

    def numbers(*args: object, **more: object) -> list[int]:
        return [trial.number for trial in store.trials(*args, **more)]  # type: ignore[arg-type]

    assert numbers() == [0, 1, 2, 3, 4]
    assert numbers(PROBLEM) == [0, 2, 3, 4]
    assert numbers(other_problem) == [1]
    assert numbers(PROBLEM, HARDWARE) == [0, 3, 4]
    assert numbers(environment=other_triton) == [3]
    assert numbers(environment=replace(ENVIRONMENT, kernels="f" * 16)) == [0, 1, 2, 4], "those of a variant say more"
    assert numbers(run_id=last_run) == [4]
    assert numbers(PROBLEM, status="ok") == [0, 2, 3]
    assert [run.problem for run in store.runs(other_problem)] == [other_problem]
    assert store.counts() == {"runs": 5, "trials": 5, "winners": 0}


def test_a_run_ends(store: Store) -> None:
    run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
    store.end_run(run_id, "interrupted")
    (run,) = store.runs()
    assert run.status == "interrupted"
    assert run.ended_at is not None
    assert run.ended_at >= run.started_at
    with pytest.raises(ValueError, match="finished"):
        store.end_run(run_id, "finished")


def test_a_run_keeps_what_was_noticed_and_its_accounts(store: Store) -> None:
    run_id, other = (store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {}) for _ in range(2))
    for text_ in ("rank 1 is slow", "clocks fell\0 to 1.2 GHz", "rank 1 is slow", "clocks fell\0 to 1.2 GHz"):
        store.add_notice(run_id, text_)
    store.add_notice(other, "rank 1 is slow")
    store.end_run(run_id, "done", {"measuring_s": 12.5, "compiling_s": 3.0})
    store.end_run(other, "interrupted")
    run, bare = store.runs()
    assert run.notices == ("rank 1 is slow", "clocks fell to 1.2 GHz")
    assert run.accounts == {"measuring_s": 12.5, "compiling_s": 3.0}
    assert (bare.notices, bare.accounts) == (("rank 1 is slow",), {})


def test_each_conditions_have_their_winner(store: Store) -> None:
    usual = keep_winner(store)
    others = [Conditions("eager", "warm"), Conditions("graph", "warm"), Conditions(skew_us=12.5)]
    kept = [keep_winner(store, config=BSP, conditions=conditions) for conditions in others]
    assert store.winners() == [usual, *kept]
    again = keep_winner(store, config=Config.of("pull"), conditions=others[1])
    assert store.winners() == [usual, kept[0], kept[2], again]


def test_there_is_one_winner_of_a_key(store: Store) -> None:
    first = keep_winner(store)
    assert store.winners() == [first]
    second = keep_winner(store, config=BSP, speedup=1.0, tie=True)
    assert store.winners() == [second]
    assert store.winners(with_samples=False) == [replace(second, samples=None)]

    other = keep_winner(store, environment=replace(ENVIRONMENT, comm="nccl 2.28.0"))
    assert store.winners() == [second, other]
    assert store.counts()["winners"] == 2


def test_a_winner_that_was_not_met_stays_if_it_is_better_proven(store: Store) -> None:
    first = keep_winner(store)
    trial = store.add_trial(store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {}), a_trial(config=BSP))
    weak = a_winner(trial, BSP, interval_low=1.0, interval_high=1.0, speedup=1.0)
    assert store.set_winner(weak, met={BSP.digest}) == first.config
    assert store.winners() == [first]
    strong = replace(weak, interval_low=9.0, interval_high=9.0, speedup=9.0)
    assert store.set_winner(strong, met={BSP.digest}) is None
    assert store.winners() == [strong]
    assert store.set_winner(weak, met={BSP.digest, first.config.digest}) is None, "it has met them all"
    assert store.winners() == [weak]


def test_winners_of_other_sources_are_kept_for_where_they_hold(store: Store) -> None:
    old, other = (keep_winner(store, config=config, kernel_digest=digest * 16) for config, digest in ((PUSH, "e"), (BSP, "f")))
    first = keep_winner(store)
    assert store.winners() == [old, other, first]
    second = keep_winner(store, config=Config.of("pull"), environment=replace(ENVIRONMENT, kernels="f" * 16))
    assert store.winners() == [old, other, second], "of those that hold here there is one"
    again = keep_winner(store, config=Config.of("push", block_m=32), kernel_digest="e" * 16)
    assert store.winners() == [other, second, again]
    assert [trial.kernel_digest for trial in store.trials()] == [
        *("e" * 16, "f" * 16),
        *(variant_digest(PROBLEM.op, variant) for variant in ("push", "pull")),
        "e" * 16,
    ]


def test_what_is_not_verified_never_wins(store: Store, url: str) -> None:
    run_id = store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})
    verified, unverified = (store.add_trial(run_id, a_trial(verified=flag)) for flag in (True, False))
    with pytest.raises(ValueError, match="not verified"):
        store.set_winner(a_winner(verified, verified=False))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(unverified))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(verified, Config.of("pull")))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(verified, problem=replace(PROBLEM, m=1024)))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(verified, environment=replace(ENVIRONMENT, kernels="f" * 16)))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(verified, kernel_digest="f" * 16))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(verified + 1000))
    with pytest.raises(ValueError, match="not a verified one"):
        store.set_winner(a_winner(verified, conditions=Conditions(mode="eager")))
    assert store.winners() == []

    store.set_winner(a_winner(verified))
    engine = create_engine(url)
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(text("UPDATE autotax_winner SET verified = (1 = 0)"))
    engine.dispose()


def test_the_database_refuses_what_makes_no_sense(store: Store, url: str) -> None:
    with pytest.raises(IntegrityError):
        store.add_trial(12345, a_trial())
    store.add_trial(store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {}), a_trial())
    engine = create_engine(url)
    for change in ("status = 'lost'", "latency_us = NULL"):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(text(f"UPDATE autotax_trial SET {change}"))
    engine.dispose()
    with pytest.raises(ValueError, match="lost"):
        a_trial(status="lost")


def test_what_was_kept_is_there_after_reopening(url: str) -> None:
    with Store.open(url) as store:
        winner = keep_winner(store)
    for create in (True, False):
        with Store.open(url, create=create) as store:
            assert store.exists
            assert store.winners() == [winner]
            assert store.trials() == [a_trial()]


def test_a_store_opened_to_read_does_not_write(url: str) -> None:
    Store.open(url).close()
    with Store.open(url, create=False) as store, pytest.raises(RuntimeError, match="create=True"):
        store.begin_run(PROBLEM, HARDWARE, ENVIRONMENT, {})


def test_operators_of_a_later_version_are_left_out(store: Store, url: str) -> None:
    keep_winner(store)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotax_problem SET op = 'all-to-all-gemm'"))
    engine.dispose()
    assert store.winners() == []
    assert store.trials() == []
    assert store.runs() == []


def test_optuna_keeps_its_studies_beside(url: str) -> None:
    with Store.open(url) as store:
        winner = keep_winner(store)
        storage = optuna.storages.RDBStorage(url)
        study = optuna.create_study(study_name=PROBLEM.key, storage=storage)
        for _ in range(3):
            trial = study.ask()
            store.add_trial(store.runs()[0].id, a_trial(number=trial.number + 1))
            study.tell(trial, trial.suggest_float("x", 0, 1))
        storage.engine.dispose()
    with Store.open(url) as store:
        assert store.winners() == [winner]
        assert store.counts()["trials"] == 4
        again = optuna.load_study(study_name=PROBLEM.key, storage=url)
        assert len(again.trials) == 3


def test_optuna_may_come_first(url: str) -> None:
    if path := sqlite_path(url):
        path.parent.mkdir()
    study = optuna.create_study(storage=url)
    with Store.open(url, create=False) as store:
        assert not store.exists
        assert store.winners() == []
    with Store.open(url) as store:
        keep_winner(store)
    assert study.ask().number == 0
