"""Proof on request, before a look-up: a separate process, `autotax refresh`, proves stale winners again.

The process starts its own ranks, so a config that hangs or crashes cannot harm the calling program. It ends in time; winners
proven by then are in the database. The calling program imports neither the runner nor the tuner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db.records import Place
from autotax.db.shipped import sources
from autotax.db.staleness import same_devices
from autotax.db.url import resolve_url
from autotax.hardware import Hardware
from autotax.operators import loaded
from autotax.software import environment

USUAL_S = 60.0
"""Seconds that proving may take, unless the caller says otherwise."""
GRACE_S = 5.0
"""Seconds for the process to end in order when its time is up."""


def seconds_of(prove: bool | float) -> float:
    """Seconds that proving may take; 0 if it is not wanted. Raises UsageError for an invalid time."""
    if prove is True:
        return USUAL_S
    if isinstance(prove, bool):
        return 0.0
    if not isinstance(prove, int | float) or not 0 < prove < float("inf"):
        raise UsageError(f"prove is {prove!r}; it must be True, False or a positive number of seconds: give one of these")
    return float(prove)


def stale(
    problems: Sequence[Problem], hardware: Hardware, conditions: Conditions | None, db: str | Path | None
) -> list[Problem]:
    """Problems with winners of devices like these, none of which holds with the software here."""
    here = Place(hardware, environment(hardware.backend), conditions or Conditions.usual(hardware.on_gpu))

    def is_stale(problem: Problem) -> bool:
        winners = [winner for source in sources(db) for winner in source.index.of_problem(problem.key)]
        comparable = [winner for winner in winners if same_devices(winner.place.hardware, hardware)]
        mine = [winner for winner in comparable if winner.place.conditions.searched == here.conditions.searched]
        return bool(mine) and all(winner.differences(here) for winner in mine)

    return [problem for problem in problems if is_stale(problem)]


def prove(
    problems: Sequence[Problem], hardware: Hardware, conditions: Conditions | None, db: str | Path | None, seconds: float
) -> str:
    """Proves the stale winners of these problems, in at most `seconds`. Returns why some were not proven, or an empty text.

    Not collective. The new ranks use the GPUs at the same time as this process.
    """
    if not (remaining := stale(problems, hardware, conditions, db)):
        return ""
    with tempfile.TemporaryDirectory(prefix="autotax-prove-") as folder:
        shapes = Path(folder) / "shapes.toml"
        shapes.write_text("\n".join(_tables(remaining)), encoding="utf-8")
        command = [sys.executable, "-m", "autotax", "refresh", "--shapes", str(shapes), "--json", "--backend", hardware.backend]
        if conditions is not None:
            command += ["--mode", conditions.mode, "--l2", conditions.l2, "--skew", f"{conditions.skew_us:g}"]
        for module in loaded():
            command += ["--load", module]
        # The URL may hold a password, which others could read on a command line.
        return _run(command, os.environ | {"AUTOTAX_DB": resolve_url(db)}, seconds)


def _tables(problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems:
        yield f"[[{problem.op}]]"
        # JSON integers and plain strings are valid TOML.
        yield from (f"{name} = {json.dumps(value)}" for name, value in problem.to_dict().items() if name != "op")


def _run(command: Sequence[str], variables: dict[str, str], seconds: float) -> str:
    """Runs a process for at most `seconds`. Returns its error in one line."""
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
        return f"stale winners could not all be proven within {seconds:g} s: run `autotax refresh`"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return ""
    last = (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return f"stale winners could not be proven ({last.removeprefix('autotax: ')}): run `autotax refresh`"
