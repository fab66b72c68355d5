"""Commands in surroundings that are broken: documented exit codes, one line where something is wrong, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOOKUP = "lookup all-gather-gemm --m 64 --n 96 --k 64"
GOOD, BAD = LOOKUP, "lookup nothing"
AUTOTAX = f"{sys.executable} -m autotax.cli.start"
CASES = {
    "stdout closed": (f"{AUTOTAX} {GOOD} >&-", 1, "stdout is closed"),
    "stdout full": (f"{AUTOTAX} {GOOD} >/dev/full", 1, "no space is left where the answer goes"),
    "a document, stdout full": (f"{AUTOTAX} {GOOD} --json >/dev/full", 1, "no space is left where the answer goes"),
    "nobody reads": (f"{AUTOTAX} {GOOD} | true; exit ${{PIPESTATUS[0]}}", 1, "nobody reads the answer"),
    "stderr closed": (f"{AUTOTAX} {GOOD} >/dev/null 2>&-", 0, ""),
    "stderr full": (f"{AUTOTAX} {GOOD} >/dev/null 2>/dev/full", 0, ""),
    "bad input, stderr closed": (f"{AUTOTAX} {BAD} 2>&-", 2, ""),
    "bad input, stderr full": (f"{AUTOTAX} {BAD} 2>/dev/full", 2, ""),
    "all closed": (f"{AUTOTAX} {GOOD} <&- >&- 2>&-", 1, ""),
    "folder deleted": (f"mkdir gone && cd gone && rmdir ../gone && {AUTOTAX} {GOOD}", 1, "the working directory is not there"),
    "a terminal of ASCII": (f"PYTHONIOENCODING=ascii PYTHONUTF8=0 LC_ALL=C {AUTOTAX} {GOOD} >/dev/null", 0, ""),
    "no home": (f"env -u AUTOTAX_DB HOME=/nowhere {AUTOTAX} {GOOD} >/dev/null", 0, ""),
} | {f"{columns} columns": (f"COLUMNS={columns} {AUTOTAX} {GOOD} >/dev/null", 0, "") for columns in (0, 1, 7, 100000, "x")}
SAMPLED = ("stdout closed", "stdout full", "nobody reads", "bad input, stderr full", "folder deleted")


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"AUTOTAX_DB": str(folder / "none.db"), "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("name", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.volume) for name in CASES])
def test_surroundings(tmp_path: Path, name: str) -> None:
    script, code, message = CASES[name]
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr + done.stdout and "Exception ignored" not in done.stderr, done
    assert (message in done.stderr and done.stderr.count("\n") == 1) if message else not done.stderr, done
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.volume
def test_interrupts(tmp_path: Path, sent: signal.Signals) -> None:
    """At the prompt of a command that waits for a FIFO which nobody opens: inside of the command, whatever the machine does."""
    fifo = tmp_path / "winners.json"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "autotax.cli.start", "tune", "--shapes", str(fifo)]
    # A background process of a shell inherits an ignored SIGINT; this restores the default action.
    listening = lambda: signal.signal(sent, signal.SIG_DFL)  # noqa: E731
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(tmp_path), preexec_fn=listening, **pipes)
    writer = None
    try:
        while writer is None and process.poll() is None:
            with suppress(OSError):  # until the command opens the other end
                writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            time.sleep(0.05)
        process.send_signal(sent)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
        if writer is not None:
            os.close(writer)
    assert (process.returncode, out, err.count("\n")) == (130, "", 1) and "interrupted" in err, (process.returncode, out, err)
