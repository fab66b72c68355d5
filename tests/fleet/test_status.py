"""Texts of a fleet's screen, events and last tables. The tests need no database and no hosts."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from autotax.fleet.driver import FleetOutcome, Won
from autotax.fleet.messages import ClaimStatus, FleetPace, HostStatus, Snapshot, events, gaps
from autotax.fleet.screen import EventLines, FleetDisplay, FleetLines, document, line_of, remarks, summary, tables
from tests.db.conftest import a_winner

HOST = HostStatus("h1", 0, "node-1", "k1", "NVIDIA H200", "working", "", 1, 12, 60, 40, 90.0, 100.0, 1.0)
CLAIM = ClaimStatus(1, "gemm/m=16", "k1", "graph/cold/0", "node-1", "h1", None, "", None, 60.0, 0, 0, None, False)
OTHER = replace(CLAIM, id=2, problem="gemm/m=32", host=None, holder=None)
NOW = Snapshot((HOST,), (CLAIM, OTHER), 120.0, 1)


def names(before: Snapshot, after: Snapshot) -> list[str]:
    return [event["event"] for event in events(before, after)]


def test_events_tell_what_changed_once() -> None:
    assert names(Snapshot(), NOW) == ["host joined", "problem begun"] and names(NOW, NOW) == []
    tuned = replace(CLAIM, holder=None, outcome="tuned", message="push 1.31", seconds=61.24)
    later = replace(NOW, claims=(tuned, replace(OTHER, holder="h1", host="node-1")))
    (first, second) = events(NOW, later)
    assert (first["event"], first["host"], first["took_s"]) == ("problem tuned", "node-1", 61.2)
    assert second["event"] == "problem begun"
    dead = replace(HOST, state="lost", note="its node died")
    lost = replace(NOW, hosts=(dead,), claims=(replace(CLAIM, holder=None, lapses=1),))
    assert [event.get("note") for event in events(NOW, lost)] == ["its node died"]
    taken = replace(lost, claims=(replace(CLAIM, holder="h2", host="node-2", lapses=1),))
    assert events(lost, taken)[0]["after_lost_hosts"] == 1
    failed = replace(NOW, claims=(replace(CLAIM, holder=None, failures=1, failed_on="node-1", message="a hang"),))
    assert names(NOW, failed) == ["problem failed"]


def test_the_screen_shows_hosts_problems_pace_and_time_left() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    display = FleetDisplay(console)
    display.show(replace(NOW, hosts=(replace(HOST, trials=20),), seconds=60.0), [])
    display.show(NOW, [{"event": "host lost", "kind": "k1", "host": "node-9", "note": "gone"}])
    console.print(display)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for said in ("host lost: k1 on node-9 (gone)", "1 host of 1 kind, 1 awaited", "2 left to tune", "20 trials a minute",
                 "1:30 left", "node-1", "NVIDIA H200", "gemm/m=16", "12/60"):  # fmt: skip
        assert said in shown, (said, shown)


def test_many_hosts_fit_on_one_screen() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    display = FleetDisplay(console)
    display.show(Snapshot(tuple(replace(HOST, id=str(i), slot=i, name=f"node-{i}") for i in range(500))), [])
    console.print(display)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("\n") < 45 and "and 468 more" in shown


def test_json_is_an_event_a_line_and_logs_are_lines() -> None:
    output: list[str] = []
    lines = EventLines(output.append)
    lines.show(NOW, events(Snapshot(), NOW))
    records = [json.loads(line) for line in output]
    assert [record["event"] for record in records] == ["host joined", "problem begun", "progress"]
    assert (records[2]["left"], records[2]["hosts"], records[2]["waiting_for_hosts"], records[2]["kinds"]) == (2, 1, 1, {"k1": 1})
    console = Console(file=io.StringIO(), width=300)
    FleetLines(console).show(NOW, events(Snapshot(), NOW))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "autotax: problem begun: gemm/m=16 on node-1" in shown and summary(NOW, _paced()) in shown


def _paced() -> FleetPace:
    pace = FleetPace()
    pace.note(NOW)
    return pace


def test_hosts_of_a_kind_that_differ_by_more_than_a_tenth_are_named() -> None:
    measured = [("k", "p", "c", "a", us) for us in (100.0, 101.0, 99.0)]
    measured += [("k", "p", "c", "b", 109.0), ("k", "p", "c", "c", 125.0)]
    measured += [("k", "q", "c", "c", 90.0), ("k", "q", "c", "a", 100.0)]  # of one pair the widest gap counts
    measured += [("k2", "p", "c", "d", 500.0), ("k", "p", "other config", "b", 900.0), ("k", "alone", "c", "a", 1.0)]
    pairs = gaps(measured)
    assert [(gap.slow, gap.fast, gap.problem, round(gap.ratio, 3)) for gap in pairs] == [("c", "a", "p", 1.25)]
    assert str(pairs[0]) == "c is 25 % slower than a at BSP of p (125.0 us against 100.0 us)"
    assert gaps([("k", "p", "c", "a", 100.0), ("k", "p", "c", "b", 110.0)]) == []


def test_the_end_tells_winners_by_kind_what_failed_and_slow_hosts() -> None:
    winner = a_winner(1)
    kind = winner.hardware.digest
    failed = replace(CLAIM, outcome="failed", failed_on="node-1", message="nothing could be verified", holder=None)
    lost = replace(HOST, id="h2", name="node-2", state="lost", note="its node died")
    pairs = gaps([(kind, "p", "c", "a", 100.0), (kind, "p", "c", "b", 150.0)])
    outcome = FleetOutcome(replace(NOW, hosts=(HOST, lost), claims=(failed, OTHER)), (Won(winner, "node-1"),), tuple(pairs))
    console = Console(file=io.StringIO(), width=200)
    console.print(tables(outcome))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for said in ("winners on 4 x NVIDIA H200", winner.problem.key, "120.5", "150.0", "1.25x [1.20, 1.29]", "node-1",
                 "failed: gemm/m=16 on node-1: nothing could be verified", "host node-2 lost: its node died",
                 "slow host: b is 50 % slower than a", "1 problems are left: run the same command again to go on"):  # fmt: skip
        assert said in shown, (said, shown)
    assert not outcome.done and len(remarks(outcome)) == 4
    report = document(outcome)
    assert json.loads(json.dumps(report))["winners"][0]["host"] == "node-1" and report["event"] == "ended"
    assert report["failed"][0]["message"] == "nothing could be verified"
    assert (report["left"], report["slow_hosts"][0]["slow"]) == (1, "b")
    assert replace(outcome, snapshot=Snapshot()).done and not replace(outcome, snapshot=Snapshot(), interrupted=True).done


def test_a_line_for_each_event() -> None:
    dealt = {"event": "problems dealt", "kind": "k1", "hardware": "4 x H200", "due": 3, "tuned_already": 2}
    assert line_of(dealt) == "problems dealt: k1 (3 due, 2 tuned already; 4 x H200)"
