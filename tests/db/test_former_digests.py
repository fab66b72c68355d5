"""A database whose winners have digests of the former rule: they hold, for readers and for writers."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, text

from autotax.core.config import Config
from autotax.db import Store, resolve_url
from autotax.db.schema import CURRENT
from autotax.operators.registry import variant_digest
from tests.db.conftest import EXAMPLES, PROBLEM

PUSH = Config.of("push", block_m=64)


def _former(tmp_path: Path) -> tuple[str, str, str]:
    """A database as autotax 0.1 left it: its URL, and the former and the current digest of its winner."""
    now = variant_digest(PROBLEM.op, "push")
    former = next(old for old, new in CURRENT.items() if new == now)
    url = resolve_url(str(tmp_path / "former.db"))
    with Store.open(url) as store:
        EXAMPLES.keep(store, config=PUSH)
    engine = create_engine(url)
    with engine.begin() as connection:
        for table in ("autotax_winner", "autotax_trial"):
            changed = connection.execute(text(f"UPDATE {table} SET kernel_digest = '{former}' WHERE kernel_digest = '{now}'"))
            assert changed.rowcount == 1
        connection.execute(text("DELETE FROM autotax_meta WHERE name = 'digests'"))
    engine.dispose()
    return url, former, now


def _stored(url: str) -> set[str]:
    engine = create_engine(url)
    with engine.begin() as connection:
        stored = {
            digest
            for table in ("autotax_winner", "autotax_trial")
            for (digest,) in connection.execute(text(f"SELECT kernel_digest FROM {table}"))
        }
    engine.dispose()
    return stored


def test_a_reader_sees_the_current_digest_and_writes_nothing(tmp_path: Path) -> None:
    url, former, now = _former(tmp_path)
    with Store.open(url, create=False) as store:
        assert [winner.kernel_digest for winner in store.winners()] == [now]
        assert [known.kernel_digest for known in store.known_winners()] == [now]
        assert [trial.kernel_digest for trial in store.trials()] == [now]
    assert _stored(url) == {former}


def test_a_writer_replaces_former_digests_once_and_a_new_winner_takes_the_place_of_the_old(tmp_path: Path) -> None:
    url, _, now = _former(tmp_path)
    with Store.open(url) as store:
        assert _stored(url) == {now}
        EXAMPLES.keep(store, config=PUSH, speedup=1.5, interval_high=1.6)
        assert [winner.speedup for winner in store.winners()] == [1.5]
    with Store.open(url) as store:
        assert len(store.winners()) == 1


def test_each_variant_of_today_has_one_former_digest() -> None:
    """But for two baselines, which have had three others since they take e4m3."""
    assert len(set(CURRENT.values())) == len(CURRENT) - 8
    assert not set(CURRENT) & set(CURRENT.values())
