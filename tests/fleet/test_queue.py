"""Claims: each problem of a kind is held by one worker at most, whatever happens to it, to the others and to the server."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context

import pytest
from sqlalchemy import text, update

from autotax.core.errors import MachineError, UsageError
from autotax.fleet.queue import MOST_LAPSES, ClaimQueue, ClaimRow, Due, FleetRow, server_url
from autotax.software import environment
from tests.db import server
from tests.fleet.conftest import B200, FLEET, H200, a_job, due, join

WRITERS, PROBLEMS = 16, 160
LEASE_S = 60.0
SHORT_S = 1.0
"""A short lease. A server that is older than the requested lease passes lapsed claims to other workers."""
KIND = H200.digest


def claims(desk: ClaimQueue) -> dict[str, ClaimRow]:
    return {row.problem_key: row for row in desk.attend(FLEET, LEASE_S)[1]}


def take(desk: ClaimQueue, host: str, lease_s: float = LEASE_S):
    return desk.take(host, FLEET, KIND, f"name of {host}", lease_s)


def test_sixteen_workers_at_once_claim_every_problem_once(
    desk: ClaimQueue, url: str, at_once: Callable[..., list[int | None]]
) -> None:
    desk.deal(FLEET, KIND, due(PROBLEMS))

    def claim_all(number: int) -> None:
        with ClaimQueue(url) as mine:
            host = f"host-{number}"
            join(mine, host)
            while claim := take(mine, host):
                assert mine.beat(host, FLEET, claim.id, LEASE_S, 300.0).held
                assert mine.finish(host, claim.id, "tuned", str(number), 0.0)

    assert at_once(WRITERS, claim_all) == [0] * WRITERS
    rows = claims(desk)
    assert len(rows) == PROBLEMS and {row.outcome for row in rows.values()} == {"tuned"}
    assert {row.lapses for row in rows.values()} == {0}, "nobody took what another one held"


def test_claims_of_sixteen_workers_of_which_half_are_killed(desk: ClaimQueue, url: str) -> None:
    """Every worker holds a claim when half of them are killed; the others finish every problem."""
    desk.deal(FLEET, KIND, due(40))
    fork, lease_s = get_context("fork"), 2.0
    all_hold_one = fork.Barrier(WRITERS)

    def work(number: int) -> None:
        with ClaimQueue(url) as mine:
            host = f"host-{number}"
            join(mine, host)
            claim = mine.take(host, FLEET, KIND, host, lease_s)
            all_hold_one.wait(60)
            if number % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            while claim or mine.left(FLEET, KIND):
                if claim:
                    mine.finish(host, claim.id, "tuned", "", 0.0)
                else:
                    time.sleep(0.05)
                claim = mine.take(host, FLEET, KIND, host, lease_s)

    processes = [fork.Process(target=work, args=[number]) for number in range(WRITERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0] * (WRITERS // 2)
    rows = claims(desk)
    assert {row.outcome for row in rows.values()} == {"tuned"}
    assert sum(row.lapses for row in rows.values()) >= WRITERS // 2, "the claims of the killed ones lapsed"


def test_problems_are_claimed_in_their_order_once_for_each_kind(desk: ClaimQueue) -> None:
    for kind in (KIND, B200.digest):
        desk.deal(FLEET, kind, due(3))
    join(desk, "a"), join(desk, "b", B200)
    first = [take(desk, "a").job for _ in range(1)]
    assert first == [a_job(0)]
    desk.finish("a", 1, "tuned", "", 1.0)
    assert take(desk, "a").job == a_job(1)
    assert desk.take("b", FLEET, B200.digest, "b", LEASE_S).job == a_job(0)
    assert (desk.left(FLEET, KIND), desk.left(FLEET, B200.digest)) == (2, 3)


def test_a_claim_that_is_not_renewed_goes_to_another_worker(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(1))
    join(desk, "a"), join(desk, "b")
    wait_for_a_server_of(SHORT_S)
    claim = take(desk, "a")
    assert claim and not claim.taken_before and take(desk, "b", SHORT_S) is None
    pass_time(desk, LEASE_S * 0.6)
    assert desk.beat("a", FLEET, claim.id, LEASE_S, 300.0).held
    pass_time(desk, LEASE_S * 0.6)
    assert take(desk, "b", SHORT_S) is None, "it was renewed"
    pass_time(desk, LEASE_S * 0.6)
    again = take(desk, "b", SHORT_S)
    assert again and again.taken_before and again.job == claim.job
    assert not desk.beat("a", FLEET, claim.id, LEASE_S, 300.0).held
    assert not desk.finish("a", claim.id, "tuned", "", 0.0), "it belongs to the other one"
    assert desk.finish("b", again.id, "tuned", "", 0.0)
    (row,) = claims(desk).values()
    assert (row.outcome, row.host, row.lapses) == ("tuned", "name of b", 1)


def wait_for_a_server_of(seconds: float) -> None:
    """Waits: a server that has just started passes no claims to other workers."""
    time.sleep(seconds)


def pass_time(desk: ClaimQueue, seconds: float) -> None:
    """Moves the expiry of claims and the driver's last sign of life back by `seconds`, so that tests need not wait."""
    with desk.engine.begin() as connection:
        connection.execute(update(ClaimRow).values(expires=ClaimRow.expires - timedelta(seconds=seconds)))
        connection.execute(update(FleetRow).values(heard=FleetRow.heard - timedelta(seconds=seconds)))


def test_a_worker_that_is_known_to_be_dead_frees_its_claim_at_once(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(1))
    for host in "abcd":
        join(desk, host)
    for host in "abcd"[:MOST_LAPSES]:
        assert take(desk, host)
        desk.lose(host, "its node is gone")
    assert take(desk, "d") is None, "it may be what kills them"
    hosts, (claim,) = desk.attend(FLEET, LEASE_S)
    assert [host.state for host in hosts] == ["lost"] * MOST_LAPSES + ["idle"] and claim.lapses == MOST_LAPSES


def test_a_commit_whose_answer_was_lost_claims_no_second_problem(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(2))
    join(desk, "a")
    assert take(desk, "a") == replace(take(desk, "a"), taken_before=False)
    assert [row.holder for row in claims(desk).values()] == ["a", None]


def test_what_failed_on_a_host_is_tried_by_another_and_then_given_up(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(1))
    join(desk, "a"), join(desk, "b")
    claim = take(desk, "a")
    assert desk.fail("a", claim.id, "name of a", "a hang", 1.0) and take(desk, "a") is None
    assert desk.fail("b", take(desk, "b").id, "name of b", "a crash", 1.0)
    (row,) = claims(desk).values()
    assert (row.outcome, row.message, row.failures) == ("failed", "a crash", 2)


def test_what_a_worker_gives_back_is_free_at_once(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(1))
    join(desk, "a"), join(desk, "b")
    desk.release("a", take(desk, "a").id)
    again = take(desk, "b")
    assert again.taken_before and not claims(desk)[again.job.problem.key].lapses


def test_another_fleet_leaves_what_is_in_work_to_its_worker_and_takes_the_rest(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(2))
    join(desk, "a")
    held = take(desk, "a")
    desk.begin("fleet-2")
    longer = [Due(a_job(number, trials=9)) for number in range(2)]
    desk.deal("fleet-2", KIND, longer)
    join(desk, "b", fleet="fleet-2")
    assert desk.take("b", "fleet-2", KIND, "b", LEASE_S).job == a_job(1, trials=9)
    assert desk.take("b2", "fleet-2", KIND, "b2", LEASE_S) is None
    assert desk.beat("a", FLEET, held.id, LEASE_S, 300.0).held and desk.finish("a", held.id, "tuned", "", 0.0)
    assert desk.left(FLEET, KIND) == 0 and desk.left("fleet-2", KIND) == 1
    desk.deal("fleet-2", KIND, longer[:1])
    assert desk.take("c", "fleet-2", KIND, "c", LEASE_S).job == a_job(0, trials=9), "dealt again, it is due again"


def test_a_fleet_that_stops_and_what_becomes_of_its_claims(desk: ClaimQueue) -> None:
    desk.deal(FLEET, KIND, due(3), a_job(1))
    join(desk, "a")
    claim = take(desk, "a")
    answer = desk.beat("a", FLEET, claim.id, LEASE_S, 300.0)
    assert (answer.going, answer.held, answer.dealt, answer.probe) == (True, True, True, a_job(1))
    desk.stop(FLEET)
    answer = desk.beat("a", FLEET, claim.id, LEASE_S, 300.0)
    assert (answer.going, answer.held) == (False, True)
    desk.begin("fleet-2")
    desk.deal("fleet-2", KIND, due(1))
    desk.clear(FLEET)
    assert claims(desk) == {} and desk.left("fleet-2", KIND) == 1
    assert desk.take("b", "fleet-2", KIND, "b", LEASE_S), "its worker was ended"


def test_workers_of_a_driver_that_is_gone_end(desk: ClaimQueue) -> None:
    join(desk, "a")
    assert desk.beat("a", FLEET, None, LEASE_S, 300.0).going
    wait_for_a_server_of(SHORT_S)
    pass_time(desk, LEASE_S)
    assert not desk.beat("a", FLEET, None, LEASE_S, SHORT_S).going

    def going_again() -> bool:
        desk.attend(FLEET, LEASE_S)
        return desk.beat("a", FLEET, None, LEASE_S, SHORT_S).going

    assert any(going_again() for _ in range(20))


def test_a_host_that_is_refused_ends(desk: ClaimQueue) -> None:
    join(desk, "a")
    desk.note_host("a", "refused", "its kernels are others")
    assert not desk.beat("a", FLEET, None, LEASE_S, 300.0, state="idle").going
    assert desk.attend(FLEET, LEASE_S)[0][0].state == "refused"


@pytest.mark.skipif(server.binaries() is None, reason="there is no wheel with a server")
@pytest.mark.volume
def test_a_server_that_restarts_is_waited_for_and_no_claim_lapses_for_it() -> None:
    programs = server.binaries()
    assert programs
    with server.running(programs) as url:
        from autotax.db import Store

        heard: list[str] = []
        with Store.open(url), ClaimQueue(url, patience_s=30, on_wait=heard.append) as desk:
            desk.begin(FLEET)
            desk.deal(FLEET, KIND, due(1))
            join(desk, "a"), join(desk, "b")
            lease_s = 4.0
            time.sleep(lease_s)
            claim = take(desk, "a", lease_s)
            pass_time(desk, lease_s)  # from here on only the server's recent start prevents a takeover
            restart_after(url, 0.5)
            assert take(desk, "b", lease_s) is None, "nobody could renew while it was away"
            assert desk.beat("a", FLEET, claim.id, lease_s, 300.0).held
            assert heard, "it was waited for"


def test_a_server_that_stays_away_is_told_in_one_line() -> None:
    with ClaimQueue("postgresql+psycopg://postgres@/postgres?host=/tmp/nowhere", patience_s=0.3) as desk:
        with pytest.raises(MachineError, match=r"^database .* has not answered for 0 s \(.*\): start it, then run the same"):
            desk.left(FLEET, KIND)
        with pytest.raises(UsageError, match=r"^database .* cannot be used"):
            desk.begin(FLEET)


def test_files_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^database .*x\.db; a fleet needs a PostgreSQL server"):
        server_url("/tmp/x.db")


def restart_after(url: str, seconds: float) -> None:
    """Ends a server at once, as a crash would, and starts it after a while, from another process."""
    folder = url.partition("host=")[2]
    pid = int(open(f"{folder}/data/postmaster.pid").readline())  # noqa: PTH123, SIM115
    fork = get_context("fork")

    def start() -> None:
        time.sleep(seconds)
        server.start_again(folder)

    os.kill(pid, signal.SIGQUIT)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    fork.Process(target=start).start()


def _put(values: object, path: tuple[str, ...], wrong: object) -> object:
    """A copy of a JSON document with another value at one place of it."""
    if not path:
        return wrong
    assert isinstance(values, dict)
    return values | {path[0]: _put(values[path[0]], path[1:], wrong)}


EDITED: list[tuple[str, tuple[str, ...]]] = [
    ("autotax_fleet_claim.job", ()),
    ("autotax_fleet_claim.job", ("problem",)),
    ("autotax_fleet_claim.job", ("problem", "m")),
    ("autotax_fleet_claim.job", ("problem", "op")),
    ("autotax_fleet_claim.job", ("settings",)),
    ("autotax_fleet_claim.job", ("settings", "trials")),
    ("autotax_fleet_claim.job", ("settings", "conditions")),
    ("autotax_fleet_claim.job", ("settings", "variants")),
    ("autotax_fleet_host.hardware", ()),
    ("autotax_fleet_host.hardware", ("count",)),
    ("autotax_fleet_host.environment", ("kernels",)),
    ("autotax_fleet_host.probes", ()),
    ("autotax_fleet.dealt", ()),
    ("autotax_fleet.dealt", (KIND,)),
    ("autotax_fleet.dealt", (KIND, "probe", "settings", "trials")),
    ("autotax_fleet.dealt", (KIND, "software", "torch")),
]


@pytest.mark.sampled(by=lambda place, wrong, **_: {"place": place, "wrong": wrong})
@pytest.mark.parametrize("wrong", ["no\x1bsense", 2.5, [3], {"a": None}], ids=repr)
@pytest.mark.parametrize(("place", "path"), EDITED, ids=lambda value: value if isinstance(value, str) else ".".join(value))
def test_an_edited_row_is_one_line_and_nothing_else(desk: ClaimQueue, place: str, path: tuple[str, ...], wrong: object) -> None:
    """Users may edit a database: a value of a wrong type is reported with its name."""
    join(desk, "a")
    desk.deal(FLEET, KIND, due(1), a_job(), environment("cpu"))
    table, column = place.split(".")
    with desk.engine.begin() as connection:
        (kept,) = connection.execute(text(f"SELECT {column} FROM {table}")).one()
        document = json.dumps(_put(kept, path, wrong))
        connection.execute(text(f"UPDATE {table} SET {column} = CAST(:message AS JSON)"), {"message": document})
    with pytest.raises(MachineError, match="a row of a fleet that is malformed") as raised:
        desk.attend(FLEET, LEASE_S)
        desk.beat("a", FLEET, None, LEASE_S, 300.0)
        take(desk, "a")
    assert str(raised.value).isprintable() and "run the same command again" in str(raised.value)


def test_a_password_is_in_no_error() -> None:
    url = "postgresql+psycopg://user:hunter2@127.0.0.1:9/none?password=hunter3"
    with ClaimQueue(url, patience_s=0.0) as lost, pytest.raises(MachineError) as raised:
        lost.left(FLEET, KIND)
    assert "hunter" not in str(raised.value)
