"""A real Ray cluster of local nodes, real CPU ranks, a real server: two nodes, then four of two kinds of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'autotax[ray]'")

from autotax.core.errors import UsageError  # noqa: E402
from autotax.fleet.driver import Driver, new_order, open_engine  # noqa: E402
from autotax.fleet.messages import EngineOptions, Event, FleetJob  # noqa: E402
from autotax.hardware import Hardware, detect  # noqa: E402
from autotax.tuner import Settings  # noqa: E402
from tests.fleet.shared import MARK, PROBLEMS, SHAPES, TRIALS, assert_all_tuned_once, left_running, nothing_left  # noqa: E402
from tests.fleet.test_driver import Ear  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
SEARCH = ["--trials", str(TRIALS), "--soak", "0", "--sampler", "random", "--backend", "cpu", "--lease", "10s"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    mark = str(tmp_path_factory.mktemp("ray"))
    # Since 2.60 Ray would write a token into the home directory. Workers inherit the rest from their node.
    ours = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", MARK: mark}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
        made.add_node(**NODE)
        made.mark = mark
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def command(cluster: Any, url: str, shapes: Path) -> subprocess.Popen[str]:
    asked = ["fleet", "tune", "--on", f"ray:{cluster.address}", "--shapes", str(shapes), "--db", url, "--json", *SEARCH]
    return subprocess.Popen([sys.executable, "-m", "autotax", *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_nodes_an_interrupt_and_the_same_command_again(cluster: Any, url: str, tmp_path: Path) -> None:
    (shapes := tmp_path / "shapes.toml").write_text(SHAPES)
    with nothing_left(cluster.mark):
        first = command(cluster, url, shapes)
        assert first.stdout
        heard: list[Event] = []
        while not heard or heard[-1]["event"] != "problem tuned":
            heard.append(json.loads(first.stdout.readline()))
        assert len(left_running(cluster.mark)) > 1
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=60)
        assert first.returncode == 130 and "run the same command again" in err, err
        assert json.loads(out.splitlines()[-1])["event"] == "interrupted"
    assert {event["host"] for event in heard if event["event"] == "host joined"} == {f"{os.uname().nodename}#{i}" for i in (0, 1)}
    with nothing_left(cluster.mark):
        second = command(cluster, url, shapes)
        out, err = second.communicate(timeout=120)
        assert second.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    (dealt,) = [event for event in events if event["event"] == "problems dealt"]
    assert dealt["tuned_already"] >= 1 and dealt["due"] + dealt["tuned_already"] == 3
    assert events[-1]["event"] == "done" and len(events[-1]["winners"]) == 3
    hosts = {event["host"] for event in heard if event["event"] == "host joined"}
    assert {winner["host"] for winner in events[-1]["winners"]} <= hosts
    assert_all_tuned_once(url, [detect("cpu")])


def test_four_nodes_of_two_kinds_one_of_which_is_killed_at_work(cluster: Any, url: str) -> None:
    """The other node of its kind finishes the killed node's problem."""
    from ray.util.placement_group import placement_group_table

    for _ in range(2):
        cluster.add_node(**NODE)
    engine = open_engine(EngineOptions("ray", cluster.address, 4, "cpu", wait_s=60.0))
    killed: list[str] = []

    def kill(event: Event) -> None:
        if event["event"] != "problem begun" or killed:
            return
        slot = int(event["host"].partition("#")[2])
        where = placement_group_table(engine._group)["bundles_to_node_id"][slot]  # type: ignore[attr-defined]
        (node,) = [candidate for candidate in cluster.list_all_nodes() if candidate.node_id == where]
        if node is not cluster.head_node:
            killed.append(event["problem"])
            cluster.remove_node(node, allow_graceful=False)

    def jobs(hardware: Hardware) -> list[FleetJob]:
        return [FleetJob(problem, Settings(trials=TRIALS, soak=0, sampler="random").on(hardware)) for problem in PROBLEMS]

    ear = Ear(kill)
    with nothing_left(cluster.mark):
        order = new_order(url, backend="cpu", lease_s=10.0, tuner_module="tests.fleet.tuner_process")
        outcome = Driver(order, engine, jobs, ear).run()
    assert killed and outcome.done, outcome
    kinds = [replace(detect("cpu"), device=f"CPU of kind {number}") for number in (0, 1)]
    assert_all_tuned_once(url, kinds)
    assert "host lost" in ear.names() and len(outcome.winners) == 6
    (lost,) = [host.name for host in outcome.snapshot.hosts if host.state == "lost"]
    finished = {event["host"] for event in ear.heard if event["event"] == "problem tuned" and event.get("after_lost_hosts")}
    assert finished and lost not in finished


def test_no_cluster_is_told_in_one_line(url: str) -> None:
    order = new_order(url)
    with pytest.raises(UsageError, match=r"^no Ray cluster answers at '127\.0\.0\.1:1' \(.*\): start one by `ray start"):
        open_engine(EngineOptions("ray", "127.0.0.1:1")).start(order)
