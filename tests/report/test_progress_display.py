"""Progress of a run: a live display in a terminal, a few lines elsewhere."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from autotax.core.config import Config
from autotax.report.progress_display import Display, TuningScreen
from autotax.runner.measurement import Candidate, Measurement
from autotax.tuner import Progress
from tests.report.test_tables import CPUS, GPUS, PROBLEM, a_measurement, seen

HANG = Measurement(Candidate(Config.of("pull", block_m=128)), "hang", "no answer\nfrom rank 1")


def at(done: int, seconds: float, **more: object) -> Progress:
    best = a_measurement(118.2, "push", comm=16)
    start = Progress(PROBLEM, done, 60, {"ok": done - 1, "hang": 1}, HANG, best, 154.9, seconds, None)
    return replace(start, **more)  # type: ignore[arg-type]


def test_a_display_tells_where_a_run_stands() -> None:
    display = Display(PROBLEM, GPUS)
    assert "ranks start" in seen(display)
    display.progress(at(1, 3.0))
    display.progress(at(30, 60.0))
    text = seen(display)
    assert "30/60 trials" in text and "30.0 a minute" in text and "1:21 left" in text, "0:21 of it for the finalists"
    assert "push 118.2 us, 1.31x faster than BSP (154.9 us) comm=16" in text
    assert "29 ok, 1 hang" in text and "pull hang no answer from rank 1" in text


@pytest.mark.parametrize("width", [80, 160])
def test_the_bar_takes_what_the_figures_leave(width: int) -> None:
    display = Display(PROBLEM, GPUS)
    display.progress(at(30, 60.0))
    (bar,) = [line for line in seen(display, width).splitlines() if "30/60 trials" in line]
    assert len(bar.rstrip()) > width - 3 and bar.index("30/60") > width - 60


def test_progress_is_short() -> None:
    assert repr(at(30, 60.0)) == f"<Progress {PROBLEM.key}: searching, 30 of 60 trials, best push(comm=16) 118.2 us>"


def test_nothing_beats_bsp_yet() -> None:
    display = Display(PROBLEM, GPUS)
    display.progress(at(1, 3.0, best=a_measurement(154.9, "bsp")))
    assert "nothing beats BSP (154.9 us) yet" in seen(display)


def test_what_more_trials_should_win_is_told_while_they_are_searched() -> None:
    display, log = Display(PROBLEM, GPUS), StringIO()
    display.progress(at(30, 60.0, gain=0.0123))
    assert "eight more trials should win 1.2%" in seen(display)
    display.progress(at(30, 60.0, gain=0.0123, phase="finalists"))
    assert "should win" not in seen(display)
    with TuningScreen(1, console=Console(file=log))(PROBLEM, GPUS) as listener:
        listener.progress(at(10, 20.0, gain=0.0123))
    assert "eight more trials should win 1.2%" in log.getvalue()


def test_earlier_trials_do_not_count_as_pace() -> None:
    display = Display(PROBLEM, GPUS)
    display.progress(at(51, 6.0))
    assert "10.0 a minute" in seen(display) and "1:47 left" in seen(display)


def test_the_time_limit_may_come_first() -> None:
    display = Display(PROBLEM, GPUS)
    display.progress(at(1, 2.0))
    display.progress(at(30, 60.0, seconds_left=20.0))
    assert "0:41 left" in seen(display)


def test_before_anything_is_verified_and_in_the_final() -> None:
    display = Display(PROBLEM, CPUS)
    display.progress(at(1, 1.0, best=None, baseline_us=None, statuses={"hang": 1}))
    assert "nothing verified yet" in seen(display) and "say nothing about GPUs" in seen(display)
    display.progress(at(60, 90.0, last=None, phase="finalists"))
    assert "finalists and soak" in seen(display) and " left" in seen(display)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_display_fits_any_terminal(width: int) -> None:
    display = Display(PROBLEM, GPUS)
    display.progress(at(30, 60.0))
    assert max(map(len, seen(display, width).splitlines())) <= width


def test_a_log_gets_a_line_now_and_then() -> None:
    log = StringIO()
    with TuningScreen(1, console=Console(file=log))(PROBLEM, GPUS) as listener:
        for done in range(1, 26):
            listener.progress(at(done, 2.0 * done))
        listener.progress(at(25, 50.0, last=None, phase="finalists"))
    lines = log.getvalue().splitlines()
    assert [line.split(" trials")[0] for line in lines[1:]] == [
        "searching: 1/60",
        "searching: 10/60",
        "searching: 20/60",
        "finalists: 25/60",
    ]
    assert "30.0 a minute" in lines[2] and "2:06 left" in lines[2], "soak included"


def test_a_terminal_gets_a_display_that_goes_away() -> None:
    terminal = StringIO()
    with TuningScreen(1, console=Console(file=terminal, force_terminal=True, width=100))(PROBLEM, GPUS) as listener:
        listener.progress(at(30, 60.0))
    assert isinstance(listener, Display) and "30/60 trials" in terminal.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_notice_is_a_line_that_stays(terminal: bool) -> None:
    log = StringIO()
    with TuningScreen(1, console=Console(file=log, force_terminal=terminal, width=60))(PROBLEM, GPUS) as listener:
        listener.notice("rank 2 is [slow]\nand " + 20 * "very ")
        listener.progress(at(1, 2.0))
    assert "notice: rank 2 is [slow] and very very" in log.getvalue()
    if terminal:
        assert log.getvalue().count("very ") + log.getvalue().count("very\n") >= 19, "whole words"
