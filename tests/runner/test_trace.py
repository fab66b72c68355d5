"""Timelines of real calls on CPU ranks: the slices, and files that Perfetto reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from autotax.cli import app
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.runner import trace
from autotax.runner.trace import Slice, Timeline, chrome, kind_of

PROBLEM = AllGatherGemm(32, 32, 32, "fp32", world_size=2)


def test_a_call_is_shown_rank_by_rank_and_program_by_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    sizes = ["all-gather-gemm", "--m", "32", "--n", "32", "--k", "32", "--dtype", "fp32", "--db", str(tmp_path / "none.db")]
    assert app.main(["trace", *sizes, "--variant", "push", "--file", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [rank["wait_us"] > 0 for rank in document["results"][0]["ranks"]] == [True, True]
    contents = json.loads(file.read_text())
    assert "says nothing about GPUs" in contents["otherData"]["clock"]
    slices = [event for event in contents["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1} and min(event["ts"] for event in slices) == 0.0
    for rank in (0, 1):
        mine = [event for event in slices if event["pid"] == rank]
        (call,) = [event for event in mine if event["name"] == "call"]
        assert {event["cat"] for event in mine} >= {"program", "wait", "send", "compute", "kernel"}
        assert all(call["ts"] <= event["ts"] and event["ts"] + event["dur"] <= call["ts"] + call["dur"] for event in mine)
        waits = [event for event in mine if event["cat"] == "wait"]
        programs = {event["tid"]: event for event in mine if event["cat"] == "program"}
        assert all(programs[wait["tid"]]["ts"] <= wait["ts"] for wait in waits), "a wait is in its program"
    threads = {event["args"]["name"] for event in contents["traceEvents"] if event["name"] == "thread_name"}
    assert {"host", "program 0,0,0"} <= threads


@pytest.mark.parametrize("operator", ["gemm-reduce-scatter", "decode-merge"])
def test_an_operator_with_an_output_of_its_own_is_traced(
    operator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "gemm-reduce-scatter": ["--m", "32", "--n", "32", "--k", "32", "--output", "replicated"],
        "decode-merge": ["--batch", "2", "--heads", "4", "--head-dim", "32", "--output", "replicated"],
    }[operator]
    file = tmp_path / "trace.json"
    given = [operator, *sizes, "--dtype", "fp32", "--db", str(tmp_path / "none.db"), "--variant", "bsp", "-o", str(file)]
    assert app.main(["trace", *given]) == 0
    assert all(int(part) <= 100 for part in re.findall(r"(\d+) %", capsys.readouterr().out)), "also where there are no programs"
    assert "output=replicated" in json.loads(file.read_text())["otherData"]["problem"]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "nowhere" / "trace.json")
    assert app.main(["trace", "all-gather-gemm", "--m", "32", "--n", "32", "--k", "32", "--file", file]) == 2
    assert "trace.json cannot be written (No such file or directory): give another path" in capsys.readouterr().err


@dataclass
class Event:
    """Stands in for an event of torch's profiler."""

    called: str
    start: int
    lasted: int
    device: DeviceType = DeviceType.CUDA

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.lasted

    def device_type(self) -> DeviceType:
        return self.device

    def device_resource_id(self) -> int:
        return 7


def recorded(monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> tuple[list[str], tuple[str, list[Slice]]]:
    """Records a call on a stand-in of a GPU whose profiler reports `events`.

    Returns the names of the steps in order, the result and its slices.
    """
    happened: list[str] = []

    def noted(what: str) -> str:
        happened.append(what)
        return what

    @contextmanager
    def profile(**_: object) -> Iterator[object]:
        noted("profile")
        results = SimpleNamespace(events=lambda: events)
        yield SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))

    world = SimpleNamespace(barrier=lambda: noted("barrier"), synchronize=lambda: noted("synchronize"))
    context = SimpleNamespace(interpreted=False, world=world, launch=lambda *given, **_: noted(f"hold {given[2]}"))
    monkeypatch.setattr("torch.profiler.profile", profile)
    stamps: Any = SimpleNamespace(clear=lambda: noted("clear"))
    return happened, trace.on_gpu(lambda: noted("call"), context, stamps)


def test_of_calls_on_a_gpu_that_are_enqueued_together_the_last_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        Event("delay_kernel", 0, 20_000_000), Event("push_kernel", 20_001_000, 50_000), Event("delay_kernel", 20_060_000, 1_000),
        Event("cudaLaunchKernel", 20_061_500, 3_000, DeviceType.CPU), Event("push_kernel", 20_062_000, 40_000),
        Event("Memcpy PtoP", 20_063_000, 8_000), Event("nothing", 20_064_000, 0),
    ]  # fmt: skip
    happened, (result, slices) = recorded(monkeypatch, events)
    begun = happened.index("profile")
    assert happened[begun:] == [
        "profile", "barrier", "hold 20000000", "call", "call", "clear", "hold 0", "call", "synchronize",
    ], "ranks meet after the profiler has started, which takes them unlike times"  # fmt: skip
    assert result == "call"
    assert slices == [
        Slice("push_kernel", "kernel", "stream 7", 20_062.0, 40.0), Slice("Memcpy PtoP", "send", "stream 7", 20_063.0, 8.0),
    ]  # fmt: skip


def test_a_profiler_that_sees_nothing_of_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="recorded no kernels of this GPU: see that CUPTI"):
        recorded(monkeypatch, [Event("cudaLaunchKernel", 0, 1_000, DeviceType.CPU)])


def test_nested_slices_count_once() -> None:
    slices = (
        Slice("call", "host", "host", 0.0, 10.0),
        Slice("wait_rows", "wait", "program 0", 1.0, 5.0),
        Slice("wait", "wait", "program 0", 2.0, 3.0),
        Slice("wait", "wait", "program 1", 8.0, 1.0),
    )
    timeline = Timeline(PROBLEM, None, detect("cpu"), (slices,))  # type: ignore[arg-type]
    assert (timeline.us(0, "wait"), timeline.us(0, "send"), timeline.call_us(0)) == (6.0, 0.0, 10.0)
    assert [event["ts"] for event in chrome(timeline)["traceEvents"] if event["ph"] == "X"] == [0.0, 1.0, 2.0, 8.0]


def test_kinds_follow_from_names() -> None:
    assert {kind_of(name) for name in ("wait_rows", "_poll", "await_slot", "receive_words")} == {"wait"}
    assert {kind_of(name) for name in ("push_shard", "signal_all", "send", "fetch_block")} == {"send"}
    assert {kind_of(name) for name in ("dot", "gather_gemm", "awaited_product", "merge")} == {"compute"}


def test_a_collective_beside_the_programs_is_no_part_of_their_time() -> None:
    slices = (
        Slice("all_gather", "send", "host", 0.0, 90.0), Slice("merge", "program", "program 0", 91.0, 8.0),
        Slice("store", "send", "program 0", 92.0, 2.0),
    )  # fmt: skip
    traced = Timeline(PROBLEM, None, detect("cpu"), (slices,))  # type: ignore[arg-type]
    assert (traced.us(0, "send"), traced.share(0, "send")) == (92.0, 0.25)
