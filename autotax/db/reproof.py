"""Proof before a look-up: a separate process, `autotax refresh`, compares the machine code of stale winners or proves them again.

The process starts its own ranks, so a config that hangs or crashes cannot harm the calling program. It ends within
its bound and stores each winner that it has proven by then. It also stores each failure: a failed problem is not tried again with
the same software, until `autotax refresh` or `autotax tune` proves it. The calling program imports neither the runner nor the
tuner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autotax.core.children import import_path
from autotax.core.errors import MachineError, UsageError
from autotax.core.problem import Problem
from autotax.core.settings import OFF, Settings
from autotax.db.index import IndexedWinner
from autotax.db.records import Place, RunRecord, same_devices
from autotax.db.shipped import forget_sources, sources
from autotax.db.store import Store
from autotax.db.url import resolve_url
from autotax.operators import loaded, registry

VARIABLE = "AUTOTAX_PROVE_S"
EACH_S = 10.0
"""Seconds for each problem: five for its former winner and five for bulk-synchronous."""
START_S = 30.0
"""Seconds in addition, in which the ranks start."""
GRACE_S = 5.0
"""Seconds for the process to end in order when its time is up."""
GPU_SOAK, CPU_SOAK = 200, 5
"""Replays with delayed ranks and changing inputs."""


@dataclass(frozen=True)
class Bound:
    """How long proving may take: `seconds` for each problem and some to start, or for all problems together."""

    seconds: float
    per_problem: bool

    def whole(self, problems: int) -> float:
        """Seconds for so many problems."""
        return START_S + problems * self.seconds if self.per_problem else self.seconds


def bound_of(prove: bool | float) -> Bound | None:
    """The bound for `prove`: True, False or the seconds for all problems together. None: nothing is to be proven.

    True means $AUTOTAX_PROVE_S seconds for each problem, and 0 there switches it off. Raises UsageError for what is no time.
    """
    if prove is False:
        return None
    if prove is True:
        text = os.environ.get(VARIABLE, "").strip()
        if text.lower() in OFF[1:]:
            return None
        seconds = _positive(text) if text else EACH_S
        if seconds is None:
            raise UsageError(f"{VARIABLE} is {text!r}; it must be a number of seconds, or 0 for no proof: set another, or none")
        return Bound(seconds, per_problem=True)
    if (seconds := _positive(prove)) is None:
        raise UsageError(f"prove is {prove!r}; it must be True, False or a positive number of seconds: give one of these")
    return Bound(seconds, per_problem=False)


def _positive(value: object) -> float | None:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return seconds if 0 < seconds < float("inf") else None


# Stale winners, and proofs that failed.


def serving(problems: Iterable[Problem]) -> Iterator[Problem]:
    """The problems, and those stricter ones whose winners may serve them."""
    for problem in problems:
        yield problem
        if stricter := registry.of(problem).stricter(problem):
            yield stricter[0]


def stale(problems: Iterable[Problem], here: Place, db: str | Path | None) -> tuple[dict[Problem, str], dict[Problem, str]]:
    """Problems with winners of devices like these, none of which holds with the software of `here`.

    Returns:
        Problems to prove, with the difference. Problems whose proof has failed with this software, with the reason.
    """
    differing = {problem: reason for problem in problems if (reason := _difference(problem, here, db))}
    failures = _failures(tuple(differing), here, resolve_url(db)) if differing else {}
    return {problem: reason for problem, reason in differing.items() if problem not in failures}, failures


@lru_cache(maxsize=1024)
def _failures(problems: tuple[Problem, ...], here: Place, url: str) -> dict[Problem, str]:
    with Store.open(url, create=False) as store:
        runs = {problem: [run for run in store.runs(problem) if _was_here(run, here)] for problem in problems}
    last = {problem: tried[-1] for problem, tried in runs.items() if tried}
    ends = {"running": "it did not end", "failed": "nothing could be verified"}
    return {problem: run.notices[-1] if run.notices else ends[run.status] for problem, run in last.items()}


def forget() -> None:
    """Reads winners and failures again from now on, for another process has stored some."""
    forget_sources()
    _failures.cache_clear()


def _was_here(run: RunRecord, here: Place) -> bool:
    """Whether a run tried to prove former winners with this software, and neither ended well nor was interrupted by a user."""
    mine, software = run.environment, here.software
    alike = (mine.triton, mine.comm, mine.kernels) == (software.triton, software.comm, software.kernels)
    deployed = run.settings.get("conditions") == here.conditions.to_dict()
    tried = run.settings.get("proof") is True and run.status in ("failed", "running")
    return tried and alike and deployed and same_devices(run.hardware, here.hardware)


def _winners(problem: Problem, here: Place, db: str | Path | None) -> list[IndexedWinner]:
    """The winners of a problem on devices like these and under these conditions, of whatever software."""
    winners = [winner for source in sources(db) for winner in source.index.of_problem(problem.key)]
    comparable = [winner for winner in winners if same_devices(winner.place.hardware, here.hardware)]
    return [winner for winner in comparable if winner.place.conditions.searched == here.conditions.searched]


def _difference(problem: Problem, here: Place, db: str | Path | None) -> str:
    """Why no winner of a problem holds; empty if one does, or if there is none."""
    differences = [", ".join(winner.differences(here)) for winner in _winners(problem, here, db)]
    return min(differences, key=len, default="")


# The proof.


@dataclass(frozen=True)
class Proof:
    """The outcome of a proof: the variant that won each problem, and why others stay unproven."""

    variants: dict[Problem, str]
    unproven: dict[Problem, str]
    why: str
    """The difference of the first problem, for instance `triton 3.6.0 (here 3.8.0)`."""

    def __str__(self) -> str:
        """`2 of 3 stale winners hold again, triton 3.6.0 (here 3.8.0): push 1, bsp 1`"""
        whole = len(self.variants) + len(self.unproven)
        counted = ", ".join(f"{variant} {count}" for variant, count in Counter(self.variants.values()).most_common())
        return f"{len(self.variants)} of {whole} stale winners hold again, {self.why}{counted and f': {counted}'}"


def listed(unproven: Mapping[Problem, str]) -> str:
    """Problems that stay unproven, in one line; empty if there are none."""
    keys: dict[str, list[str]] = {}
    for problem, reason in unproven.items():
        keys.setdefault(reason, []).append(problem.key)
    lines = [f"{', '.join(alike)}: {reason}" for reason, alike in keys.items()]
    return f"stale winners could not all be proven ({'; '.join(lines)}): run `autotax refresh`" if lines else ""


def prove(problems: Iterable[Problem], here: Place, db: str | Path | None, bound: Bound) -> Proof | None:
    """Proves stale winners of these problems within `bound`, on new ranks, and remembers failures. None: none is stale."""
    outdated, _ = stale(problems, here, db)
    if not outdated:
        return None
    failure = _refreshed(list(outdated), here, db, bound)
    forget()
    left, failures = stale(outdated, here, db)
    unproven = dict.fromkeys(left, failure or "nothing could be verified")
    _remember(unproven, here, db)
    unproven |= failures
    variants = {problem: _proven(problem, here, db) for problem in outdated if problem not in unproven}
    return Proof(variants, unproven, next(iter(outdated.values())))


def _proven(problem: Problem, here: Place, db: str | Path | None) -> str:
    return next(winner.config.variant for winner in _winners(problem, here, db) if not winner.differences(here))


def _remember(unproven: Mapping[Problem, str], here: Place, db: str | Path | None) -> None:
    """Stores failures that the process could not store. A database that cannot be written only makes the next start try again."""
    settings = Settings(trials=1, conditions=here.conditions, proof=True).to_dict()
    with suppress(MachineError, UsageError):
        if unproven:
            with Store.open(resolve_url(db)) as store:
                for problem, reason in unproven.items():
                    run = store.begin_run(problem, here.hardware, here.software, settings)
                    store.add_notice(run, reason)
                    store.end_run(run, "failed")
    forget()


def _refreshed(problems: Sequence[Problem], here: Place, db: str | Path | None, bound: Bound) -> str:
    """Runs `autotax refresh` for these problems. Returns its error in one line."""
    hardware, conditions = here.hardware, here.conditions
    with tempfile.TemporaryDirectory(prefix="autotax-prove-") as folder:
        shapes = Path(folder) / "shapes.toml"
        shapes.write_text("\n".join(_tables(problems)), encoding="utf-8")
        # -P: files in the folder where the program runs must not shadow modules.
        command = [sys.executable, "-P", "-m", "autotax", "refresh", "--shapes", str(shapes), "--json"]
        command += ["--backend", hardware.backend, "--mode", conditions.mode]
        command += ["--l2", conditions.l2, "--skew", f"{conditions.skew_us:g}"]
        command += ["--soak", str(GPU_SOAK if hardware.on_gpu else CPU_SOAK)]
        if bound.per_problem:
            command += ["--each", f"{bound.seconds:f}"]
        for module in loaded():
            command += ["--load", module]
        # The URL may hold a password, which others could read on a command line.
        variables = os.environ | {"AUTOTAX_DB": resolve_url(db), "PYTHONPATH": import_path(), "AUTOTAX_PROVER": str(os.getpid())}
        return _run(command, variables, bound.whole(len(problems)))


def _tables(problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems:
        yield f"[[{problem.op}]]"
        # JSON integers and plain strings are valid TOML.
        yield from (f"{name} = {json.dumps(value)}" for name, value in problem.to_dict().items() if name != "op")


def _run(command: Sequence[str], variables: dict[str, str], seconds: float) -> str:
    """Runs a process for at most `seconds`. Returns its error in one line."""
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace",
    )
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
        return f"the time of {seconds:g} s was up"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return ""
    last = (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return last.removeprefix("autotax: ")
