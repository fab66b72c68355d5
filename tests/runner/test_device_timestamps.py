"""Stamped kernels in Triton and Gluon compile for NVIDIA, and their records become slices of a timeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from autotax.core.config import Config
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from autotax.report import tables
from autotax.runner.device_timestamps import Mark, Span, spans_of
from autotax.runner.trace import Role, Slice, Timeline, inside
from tests.stamped import PROBLEMS

MARKS = [Mark("push", "", False), Mark("push", "wait", False), Mark("push", "wait", True), Mark("push", "", True)]
ROOT = Path(__file__).parents[2]


def records(*rows: tuple[int, int, int, int]) -> torch.Tensor:
    """Records of (time, program, warp, code), all on processor 7."""
    words = torch.zeros((len(rows), 4), dtype=torch.int64)
    words.view(torch.int32).view(-1, 8)[:, 2:6] = torch.tensor([[program, warp, code, 7] for _, program, warp, code in rows])
    words[:, 0] = torch.tensor([time for time, *_ in rows])
    return words


def test_records_become_spans_of_the_first_warp_that_went_each_way() -> None:
    first = [(1000 + 100 * code, 0, 0, code) for code in range(4)]
    alike = [(time + 1, program, 1, code) for time, program, _, code in first]
    other = [(1050, 0, 4, 0), (1400, 0, 4, 3)]
    spans = spans_of(records(*alike, *first[::-1], *other), MARKS)
    assert spans == [
        Span("push", "", 0, 0, 7, 1000, 1300),
        Span("push", "", 0, 4, 7, 1050, 1400),
        Span("push", "wait", 0, 0, 7, 1100, 1200),
    ]


def test_an_end_whose_begin_was_lost_is_no_span() -> None:
    assert spans_of(records((5, 0, 0, 2), (6, 0, 0, 0), (9, 0, 0, 3)), MARKS) == [Span("push", "", 0, 0, 7, 6, 9)]


SPANS = [
    Span("delay", "", 0, 0, 1, 8_000_000, 8_000_500),
    Span("push", "", 3, 0, 7, 9_000_000, 9_010_000),
    Span("push", "wait", 3, 0, 7, 9_002_000, 9_006_000),
    Span("push", "poll_tiles", 3, 9, 7, 9_001_000, 9_009_000, role=True),
    Span("push", "wait_first", 3, 9, 7, 9_001_000, 9_007_000),
    Span("push", "", 4, 0, 8, 9_000_000, 9_006_000),
]
KERNELS = [Slice("copy", "send", "stream 1", 10.0, 1.0), Slice("push", "kernel", "stream 7", 50.0, 10.0)]


def test_spans_are_moved_to_the_clock_of_the_kernels_and_lost_records_are_told() -> None:
    program, wait, role, poll, other, lost = inside(SPANS, 4, KERNELS)
    track = "push 3 on processor 7, warp 0"
    assert program == Slice("push", "program", track, 50.0, 10.0)
    assert wait == Slice("wait", "wait", track, 52.0, 4.0)
    assert (role.name, role.kind, poll.kind) == ("poll_tiles", "program", "wait")
    assert role.track == poll.track != track and other.track == "push 4 on processor 8, warp 0"
    assert lost.name == "4 records found no room"


def test_waits_are_told_of_each_role_beside_what_a_call_takes_as_it_ships() -> None:
    config, problem = Config.of("push"), AllGatherGemm(32, 32, 32, "fp32", world_size=2)
    slices = (*KERNELS, *inside(SPANS, 0, KERNELS))
    timeline = Timeline(problem, config, detect("cpu"), (slices,), (9.5,))
    assert timeline.programs
    poll = Role("poll_tiles", 8.0, 49.0, 0.0, 0.75, "wait_first")
    assert timeline.roles(0) == [Role("push", 8.0, 50.0, 0.0, 0.25, "wait"), poll]
    with (console := Console(width=80)).capture() as capture:
        console.print(tables.timeline(timeline))
    shown = capture.get()
    assert "9.50" in shown and "poll_tiles" in shown and "75 %" in shown and "first" in shown
    with console.capture() as capture:
        console.print(tables.timeline(Timeline(problem, config, detect("cpu"), (tuple(KERNELS),), (9.5,))))
    assert "9.50" in capture.get() and "none of Triton's" in capture.get()


def stamped(folder: Path, *arguments: str) -> tuple[set[str], set[str]]:
    """The device functions and the roles that were stamped, in a process that does not interpret and has its own cache."""
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.stamped", *arguments]
    here = known | {"TRITON_CACHE_DIR": str(folder)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=here, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    plain, stamped, functions, roles = json.loads(ended.stdout)
    assert [kernel["kernel"] for kernel in plain] == [kernel["kernel"] for kernel in stamped] != []
    assert all(kernel["stamps"] == 0 for kernel in plain)
    assert all(kernel["stamps"] >= 2 and kernel["assembled"] for kernel in stamped)
    return set(functions), set(roles)


@pytest.mark.volume
def test_kernels_of_both_languages_are_stamped_and_assembled(tmp_path: Path) -> None:
    functions, roles = stamped(tmp_path, "all-gather-gemm", "push", "push_specialized")
    assert functions >= {"", "push_shard", "wait_rows", "wait_first", "tell_all", "wait for landed", "wait for taken"}
    assert not functions & {"wait for full", "wait for empty"}
    assert roles == {"send_shard", "poll_tiles", "load_tiles", "multiply_tiles"}


@pytest.mark.volume
@pytest.mark.parametrize("operator", PROBLEMS)
def test_kernels_of_every_variant_are_stamped_and_assembled(tmp_path: Path, operator: str) -> None:
    assert stamped(tmp_path, operator)[0] > {""}
