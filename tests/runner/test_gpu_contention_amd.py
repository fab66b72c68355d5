"""Parsing of the answers of amd-smi, in the form of its manual. A script on the PATH stands in for it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotax.runner.gpu_monitor import amd_notices

LIST = [{"gpu": number, "bdf": f"0000:{bus}:00.0", "uuid": "x"} for number, bus in enumerate(("05", "2C", "46"))]
OURS = {100, 101, 102}
DEVICES = ["0000:2c:00", "0000:46:00"]
"""Identifiers as torch gives them. Another user has the first GPU."""


def _processes(*running: tuple[int, int, str]) -> list[dict[str, Any]]:
    """From (GPU, process number, name)."""
    entries = []
    for number in range(3):
        mine = [{"process_info": {"name": name, "pid": pid}} for gpu, pid, name in running if gpu == number]
        entries.append({"gpu": number, "process_list": mine or [{"process_info": "No running processes detected"}]})
    return entries


def _throttle(**states: str) -> list[dict[str, Any]]:
    usual = {"accumulation_counter": 7, "ppt_violation_status": "ACTIVE", "prochot_violation_status": "NOT ACTIVE"}
    return [{"gpu": number, "throttle": usual | (states if number == 1 else {})} for number in range(3)]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "amd-smi"
    script.write_text(f'#!/bin/sh\ncat {tmp_path}/"$1"\n')
    script.chmod(0o755)
    for name, answer in (("list", LIST), ("process", _processes()), ("metric", _throttle())):
        (tmp_path / name).write_text(json.dumps(answer))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_nothing_is_said_of_ourselves_and_of_the_power_limit(answers: Path) -> None:
    (answers / "process").write_text(json.dumps(_processes((1, 101, "python"), (2, 102, "python"), (0, 999, "somebody"))))
    assert amd_notices(DEVICES, OURS) == ()


def test_another_process_is_named(answers: Path) -> None:
    (answers / "process").write_text(json.dumps(_processes((1, 101, "python"), (2, 123, "train"))))
    assert amd_notices(DEVICES, OURS) == ("another process (pid 123, train) uses GPU 2",)


@pytest.mark.parametrize("wrapped", [False, True])
def test_clocks_that_are_held_down_are_told_with_the_reason(answers: Path, wrapped: bool) -> None:
    metrics = _throttle(socket_thermal_violation_status="ACTIVE", hbm_thermal_violation_status="ACTIVE")
    (answers / "metric").write_text(json.dumps({"gpu_data": metrics} if wrapped else metrics))
    assert amd_notices(DEVICES, OURS) == ("GPU 1 holds its clocks down: socket thermal, hbm thermal",)


@pytest.mark.parametrize("nonsense", ["", "ERROR", "[]", '[{"gpu": 1}]', '{"gpu": "one"}', "[[1, null]]"])
def test_answers_that_make_no_sense_are_no_notice(answers: Path, nonsense: str) -> None:
    for name in ("list", "process", "metric"):
        (answers / name).write_text(nonsense)
    assert amd_notices(DEVICES, OURS) == ()
    (answers / "list").write_text(json.dumps(LIST))
    assert amd_notices(DEVICES, OURS) == ()


def test_without_amd_smi_there_is_no_notice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert amd_notices(DEVICES, OURS) == ()
