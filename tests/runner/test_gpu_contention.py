"""Parsing of the answers of nvidia-smi. A script on the PATH stands in for it here."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotax.runner.gpu_monitor import nvidia_notices

GPUS = "0, GPU-aa-00, 0x0000000000000000\n1, GPU-aa-01, 0x0000000000000004\n2, GPU-aa-02, 0x0000000000000001\n"
OURS = {100, 101, 102}
DEVICES = ["aa-01", "aa-02"]
"""Identifiers as torch writes them. Another user has the first GPU."""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) cat {tmp_path}/gpus;; *) cat {tmp_path}/apps;; esac\n')
    script.chmod(0o755)
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "apps").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_nothing_is_said_of_ourselves_and_of_idle_or_capped_clocks(answers: Path) -> None:
    (answers / "apps").write_text("GPU-aa-01, 101, python\nGPU-aa-02, 102, python\nGPU-aa-00, 999, somebody\n")
    assert nvidia_notices(DEVICES, OURS) == ()


def test_another_process_is_named(answers: Path) -> None:
    (answers / "apps").write_text("GPU-aa-01, 101, python\nGPU-aa-02, 102, python\nGPU-aa-02, 123, /bin/train, big\n")
    assert nvidia_notices(DEVICES, OURS) == ("another process (pid 123, /bin/train, big) uses GPU 2",)


def test_where_process_numbers_are_not_ours_only_too_many_are_told(answers: Path) -> None:
    (answers / "apps").write_text("GPU-aa-01, 5001, [Not Found]\nGPU-aa-02, 5002, python\n")
    assert nvidia_notices(DEVICES, OURS) == ()
    (answers / "apps").write_text("GPU-aa-01, 5001, [Not Found]\nGPU-aa-01, 5003, x\nGPU-aa-02, 5002, python\n")
    assert nvidia_notices(DEVICES, OURS) == ("2 processes use GPU 1, of which one is ours",)


def test_clocks_that_are_held_down_are_told_with_the_reason(answers: Path) -> None:
    (answers / "gpus").write_text(GPUS.replace("0x0000000000000004", "0x0000000000000048"))
    assert nvidia_notices(DEVICES, OURS) == ("GPU 1 holds its clocks down: hardware slowdown, hardware thermal slowdown",)


@pytest.mark.parametrize("nonsense", ["", "No devices were found\n", "a, b\n", "1, GPU-aa-01, [N/A]\n"])
def test_answers_that_make_no_sense_are_no_notice(answers: Path, nonsense: str) -> None:
    (answers / "gpus").write_text(nonsense)
    (answers / "apps").write_text(nonsense)
    assert nvidia_notices(DEVICES, OURS) == ()


def test_an_nvidia_smi_that_fails_or_hangs_or_is_not_there_is_no_notice(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotax.runner.gpu_monitor.TIMEOUT_S", 0.2)
    (answers / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 5\n")
    assert nvidia_notices(DEVICES, OURS) == ()
    (answers / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert nvidia_notices(DEVICES, OURS) == ()
    monkeypatch.setenv("PATH", "/nowhere")
    assert nvidia_notices(DEVICES, OURS) == ()
