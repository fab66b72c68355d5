"""An unattended run: problems tuned over and over while ranks, kernels and the tuner itself are harmed.

    python -m tests.unattended --minutes 30 --backend cpu|cuda --db FILE [--every 6] [--trials N] [--shapes FILE] [--json OUT]
    further: [--soak N] [--kill-every MINUTES]

Exits with 1 if a problem ends without a winner, an innocent config is blamed, a fault is taken for something else, or
anything is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from autotax.core.problem import Problem
from autotax.db import Store, TrialRecord
from autotax.hardware import detect
from autotax.operators.problem_files import read_shapes
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.runner.processes import SHARED
from autotax.tuner.tuning import KILLED_TWICE

ROOT = Path(__file__).parents[1]
DEADLINE_S = 12.0
"""Deadline of the ranks: short, so that hangs cost little time."""
STUCK_S = 900.0
"""A tuner that has not ended its problems by then is stuck."""
ENDING_S = 60.0
"""Time limit for the last killed processes to disappear."""
MARK = "AUTOTAX_UNATTENDED"
"""Environment variable that all processes of a run inherit; it identifies leftovers."""
FAILURES = ("hang", "crash", "wrong_result", "compile_error", "out_of_resources")


def usual_problems(on_gpu: bool, world_size: int) -> list[Problem]:
    if on_gpu:
        return [
            AllGatherGemm(512, 7168, 8192, "bf16", "m", world_size),
            AllGatherGemm(2048, 2560, 8192, "bf16", "m", world_size),
            FlashDecode(1, 64, 8, 128, 32768, "bf16", world_size),
            FlashDecode(8, 64, 8, 128, 8192, "bf16", world_size),
        ]
    return [
        AllGatherGemm(32, 40, 32, "fp32", "m", world_size),
        AllGatherGemm(32, 24, 64, "fp32", "k", world_size),
        FlashDecode(1, 4, 2, 16, 50, "fp32", world_size),
        FlashDecode(2, 2, 1, 16, 33, "fp32", world_size),
    ]


@dataclass(frozen=True)
class Batch:
    """Problems for one tuner. `fresh`: start new runs; otherwise continue the old ones."""

    problems: tuple[Problem, ...]
    fresh: bool
    seed: int


@dataclass
class Supervisor:
    """Keeps tuners running, and kills one now and then."""

    backend: str
    db: str
    trials: int
    soak: int | None
    every: int
    kill_every_s: float
    folder: Path
    random: random.Random = field(default_factory=lambda: random.Random(0))
    first: int = 0
    """Runs from here on are its own; the database may hold others, of whose faults it knows nothing."""
    tuners: int = 0
    kills: int = 0
    resumes: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "faults.jsonl"

    def run(self, problems: Sequence[Problem], seconds: float) -> None:
        """Tunes all problems again and again.

        When the time is up the tuner is killed once more; the problem it was at is finished, and those never tuned yet.
        """
        until = time.monotonic() + seconds
        self.first = self.last_run() + 1
        seed = 0
        batches: deque[Batch] = deque()
        next_kill = self.next_kill()
        while batches or time.monotonic() < until:
            if not batches:
                batches.append(Batch(tuple(problems), fresh=True, seed=seed))
                seed += 1
            batch = batches.popleft()
            over = time.monotonic() >= until
            if over and batch.fresh and batch.seed > 0:
                continue
            self.resumes += not batch.fresh
            last = self.last_run()
            if self.tune(batch, None if over else min(next_kill, until)):
                self.kills += 1
                next_kill = self.next_kill()
                batches.extendleft(reversed(self.rest(batch, last)))

    def next_kill(self) -> float:
        return time.monotonic() + self.kill_every_s * self.random.uniform(0.5, 1.5)

    def tune(self, batch: Batch, kill_at: float | None) -> bool:
        """Runs a tuner. Returns whether it was killed; otherwise it has finished all its problems."""
        self.tuners += 1
        shapes, errors = self.folder / "shapes.toml", self.folder / "stderr.txt"
        shapes.write_text("".join(_table(problem) for problem in batch.problems))
        plan = {"log": str(self.log), "every": self.every, "deadline_s": DEADLINE_S, "seed": self.random.randrange(2**31)}
        how = ["--fresh" if batch.fresh else "--resume", "--seed", str(batch.seed), "--trials", str(self.trials)]
        how += [] if self.soak is None else ["--soak", str(self.soak)]
        where = ["--backend", self.backend, "--db", self.db, "--json"]
        command = [sys.executable, "-m", "tests.saboteur", json.dumps(plan), "tune", "--shapes", str(shapes), *how, *where]
        with errors.open("w") as stderr:
            tuner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr)
            try:
                tuner.wait(STUCK_S if kill_at is None else max(0.0, kill_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                tuner.kill()
                tuner.wait()
                if kill_at is None:
                    self.complaints.append(f"a tuner was stuck: {errors.read_text()[-300:]}")
                return kill_at is not None
        if tuner.returncode != 0:
            self.complaints.append(f"a tuner ended with code {tuner.returncode}: {errors.read_text()[-300:]}")
        return False

    def last_run(self) -> int:
        with Store.open(self.db, create=False) as store:
            return max((run.id for run in store.runs()), default=0)

    def rest(self, batch: Batch, last: int) -> list[Batch]:
        """The work that a killed tuner left: the problem that it was tuning, to be continued, and the problems not begun."""
        with Store.open(self.db, create=False) as store:
            begun = {run.problem: run.status for run in store.runs() if run.id > last}
        cut = tuple(problem for problem in batch.problems if begun.get(problem) == "running")
        rest = tuple(problem for problem in batch.problems if problem not in begun)
        batches = [Batch(cut, fresh=False, seed=batch.seed), Batch(rest, batch.fresh, batch.seed)]
        return [part for part in batches if part.problems]


def _table(problem: Problem) -> str:
    values = {name: value for name, value in problem.to_dict().items() if name != "op"}
    return f"[[{problem.op}]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()) + "\n"


# Processes and files that are left


def processes() -> list[str]:
    """Processes of this run that are still there."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and MARK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return commands


def _wait_for_the_last() -> None:
    """Waits for processes that were importing torch when their tuner was killed: they end after the import."""
    until = time.monotonic() + ENDING_S
    while processes() and time.monotonic() < until:
        time.sleep(0.5)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def memory_in_use(on_gpu: bool) -> list[int]:
    """MiB in use on each GPU, seen from another process."""
    if not on_gpu:
        return []
    code = (
        "import torch, json\n"
        "print(json.dumps([(t - f) >> 20 for f, t in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


# The report


def report(supervisor: Supervisor, problems: Sequence[Problem]) -> dict[str, Any]:
    lines = supervisor.log.read_text().splitlines() if supervisor.log.exists() else []
    entries = [json.loads(line) for line in lines]
    faults = [entry for entry in entries if "fault" in entry]
    with Store.open(supervisor.db, create=False) as store:
        runs, trials, winners = store.runs(), store.trials(), store.winners(with_samples=False)
    runs = [run for run in runs if run.id >= supervisor.first]
    trials = [trial for trial in trials if (trial.run_id or 0) >= supervisor.first]
    won = {winner.problem: winner for winner in winners}
    finished = Counter(run.problem for run in runs if run.status == "done")
    complaints = list(supervisor.complaints)
    complaints += [f"{p} has no winner" for p in problems if p not in won or not finished[p]]
    complaints += [f"run {run.id} of {run.problem} ended without a winner" for run in runs if run.status == "failed"]
    complaints += [f"{f['fault']} was taken for {f['status']}" for f in faults if f.get("status") != f.get("expected")]
    victims = {(f["problem"], digest) for f in faults if "victims" in f for digest in f["victims"]}
    complaints += [f"{trial.config} was blamed: {trial.status}: {trial.error}" for trial in blamed(trials, victims)]
    seconds: dict[str, list[float]] = defaultdict(list)
    for fault in faults:
        seconds[fault["fault"]].append(fault["seconds"])
    return {
        "problems": [
            {
                "problem": problem.to_dict(),
                "finished": finished[problem],
                "winner": won[problem].config.to_dict() if problem in won else None,
                "speedup": won[problem].speedup if problem in won else None,
            }
            for problem in problems
        ],
        "trials": dict(Counter(trial.status for trial in trials if "stage" not in trial.conditions)),
        "finalists": dict(Counter(trial.status for trial in trials if "stage" in trial.conditions)),
        "faults": {name: {"times": len(spans), "most_s": round(max(spans), 2)} for name, spans in sorted(seconds.items())},
        "victims": len(victims),
        "tuners": supervisor.tuners,
        "kills": supervisor.kills,
        "resumes": supervisor.resumes,
        "restarts": max(0, sum("start" in entry for entry in entries) - supervisor.tuners),
        "complaints": complaints,
    }


def blamed(trials: Sequence[TrialRecord], victims: set[tuple[str, str]]) -> list[TrialRecord]:
    """Failed trials of configs that were fine in others, except where a fault is known to have hit them."""
    def key(trial: TrialRecord) -> tuple[str, str]:
        assert trial.run
        return trial.run.problem.key, trial.config.digest

    fine = {key(trial) for trial in trials if trial.status in ("ok", "pruned")}
    failed = [trial for trial in trials if trial.status in FAILURES and KILLED_TWICE not in (trial.error or "")]
    return [trial for trial in failed if key(trial) in fine and key(trial) not in victims]


def show(summary: dict[str, Any]) -> None:
    console = Console(width=150)
    table = Table("problem", "finished", "winner", "over BSP", title="Problems", title_justify="left")
    for entry in summary["problems"]:
        speedup = f"{entry['speedup']:.2f}x" if entry["speedup"] else "-"
        values = " ".join(str(value) for value in entry["problem"].values())
        table.add_row(values, str(entry["finished"]), entry["winner"]["variant"] if entry["winner"] else "none", speedup)
    console.print(table)
    table = Table("fault", "times", "most seconds", title="Faults", title_justify="left")
    for name, fault in summary["faults"].items():
        table.add_row(name, str(fault["times"]), str(fault["most_s"]))
    console.print(table)
    for name in ("trials", "finalists", "victims", "tuners", "kills", "resumes", "restarts", "left", "minutes", "complaints"):
        console.print(f"{name}: {summary[name]}", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--backend", choices=("cpu", "cuda", "rocm"), default="cpu")
    parser.add_argument("--db", required=True)
    parser.add_argument("--every", type=int, default=6, help="measurements between two faults")
    parser.add_argument("--trials", type=int, help="of each problem each time")
    parser.add_argument("--soak", type=int, help="replays of each finalist; as usual unless given")
    parser.add_argument("--kill-every", type=float, default=2.0, help="minutes between two kills of the tuner, about")
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--json", type=Path, help="where the report goes")
    given = parser.parse_args(arguments)
    os.environ[MARK] = str(os.getpid())
    os.environ.pop(SHARED, None)  # processes of a shared fork server lack the mark
    hardware = detect(given.backend)
    world_size = hardware.default_world_size
    problems = read_shapes(given.shapes, world_size) if given.shapes else usual_problems(hardware.on_gpu, world_size)
    trials = given.trials or (40 if hardware.on_gpu else 8)
    shared, memory = shared_memory(), memory_in_use(hardware.on_gpu)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unattended-") as folder:
        kill_every_s = given.kill_every * 60
        supervisor = Supervisor(given.backend, given.db, trials, given.soak, given.every, kill_every_s, Path(folder))
        supervisor.run(problems, given.minutes * 60)
        summary = report(supervisor, problems)
    _wait_for_the_last()
    summary["minutes"] = round((time.monotonic() - started) / 60, 2)
    summary["left"] = {
        "processes": processes(),
        "shared_memory": sorted(shared_memory() - shared),
        "memory_before_mib": memory,
        "memory_after_mib": memory_in_use(hardware.on_gpu),
    }
    left = summary["left"]
    if left["processes"] or left["shared_memory"]:
        summary["complaints"].append("something is left behind")
    if any(after > before + 16 for before, after in zip(memory, left["memory_after_mib"], strict=True)):
        summary["complaints"].append("GPU memory is left in use")
    show(summary)
    if given.json:
        given.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if summary["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
