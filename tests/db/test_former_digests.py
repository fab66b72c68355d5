"""A database whose winners have digests of the former rule: they hold, for readers and for writers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from autotax.core.config import Config
from autotax.db import Store, resolve_url
from autotax.db.schema import CURRENT, WinnerRow
from autotax.operators.registry import operators, variant_digest
from tests.db.conftest import EXAMPLES, PROBLEM

PUSH = Config.of("push", block_m=64)
TABLES = ("autotax_winner", "autotax_trial")


def _former(tmp_path: Path, digests: str = "") -> tuple[str, str, str]:
    """A database that an earlier autotax left: its URL, and the former and the current digest of its winner. `digests` is what it
    says of its digests, by default nothing, as autotax 0.1.
    """
    now = variant_digest(PROBLEM.op, "push")
    former = next(old for old, new in CURRENT.items() if new == now)
    url = resolve_url(str(tmp_path / "former.db"))
    with Store.open(url) as store:
        EXAMPLES.keep(store, config=PUSH)
    _run(
        url,
        *(f"UPDATE {table} SET kernel_digest = '{former}' WHERE kernel_digest = '{now}'" for table in TABLES),
        f"UPDATE autotax_meta SET value = '{digests}' WHERE name = 'digests'" if digests else
        "DELETE FROM autotax_meta WHERE name = 'digests'",
    )  # fmt: skip
    return url, former, now


def _run(url: str, *statements: str) -> None:
    """Executes statements that each change one row."""
    engine = create_engine(url)
    with engine.begin() as connection:
        assert all(connection.execute(text(statement)).rowcount == 1 for statement in statements)
    engine.dispose()


def _stored(url: str) -> set[str]:
    engine = create_engine(url)
    with engine.begin() as connection:
        stored = {
            digest
            for table in TABLES
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


@pytest.mark.parametrize("digests", ["", "by content", "by content, 0123abcd"])
def test_a_writer_replaces_former_digests_once_and_a_new_winner_takes_the_place_of_the_old(tmp_path: Path, digests: str) -> None:
    url, _, now = _former(tmp_path, digests)
    with Store.open(url) as store:
        assert _stored(url) == {now}
        EXAMPLES.keep(store, config=PUSH, speedup=1.5, interval_high=1.6)
        assert [winner.speedup for winner in store.winners()] == [1.5]
    with Store.open(url) as store:
        assert len(store.winners()) == 1


def test_of_winners_that_become_one_the_latest_stays(tmp_path: Path) -> None:
    """Former autotax stored a second row where the digest had become another."""
    url, _, now = _former(tmp_path, "by content")
    columns = [column.name for column in WinnerRow.__table__.columns]
    later = [{"kernel_digest": f"'{now}'", "speedup": "1.75"}.get(name, name) for name in columns]
    _run(url, f"INSERT INTO autotax_winner ({', '.join(columns)}) SELECT {', '.join(later)} FROM autotax_winner")
    with Store.open(url) as store:
        assert _stored(url) == {now}
        assert [winner.speedup for winner in store.winners()] == [1.75]


def test_former_digests_lead_to_current_ones() -> None:
    assert not set(CURRENT) & set(CURRENT.values())
    current = {variant_digest(op.name, name) for op in operators().values() for name in op.variants}
    assert set(CURRENT.values()) <= current and len(CURRENT) >= 60
