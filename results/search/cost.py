"""The tuner's own processor time for each trial, before and now in turn. A made-up runner answers at once: nothing is measured.

    python results/search/cost.py BEFORE > results/search/cost.txt        BEFORE: a checkout of c0913ff

What a trial costs beyond that, ranks and compilers, needs GPUs: `live.py shapes` tells trials a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIALS, AHEAD = 70, 8
SPANS = ((5, 35), (35, 65))


def one(sampler: str) -> None:
    """In the checkout that is the working folder."""
    sys.path.insert(0, str(Path.cwd()))
    from autotax.db import Store
    from tests.tuner.shared import Ear, gemm_landscape, run
    from tests.tuner.synthetic import SyntheticRunner

    class Clock(Ear):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def progress(self, progress: object) -> None:  # noqa: ARG002
            self.seconds.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/cost.db") as store:
        runner, clock = SyntheticRunner(gemm_landscape), Clock()
        runner.look_ahead = AHEAD
        run(store, runner, trials=TRIALS, sampler=sampler, soak=0, listener=clock)
    costs = [(clock.seconds[last] - clock.seconds[first]) / (last - first) for first, last in SPANS]
    print(" ".join(f"{seconds * 1e3:.0f}" for seconds in costs))


def main(before: Path) -> None:
    print(f"$ python results/search/cost.py BEFORE\n{TRIALS} trials on SQLite, {AHEAD} configs asked ahead")
    sides = [("before, tpe", before, "tpe"), ("now, tpe", ROOT, "tpe"), ("now, gp", ROOT, "gp")]
    for name, checkout, sampler in (*sides, *reversed(sides)):
        command = [sys.executable, str(Path(__file__).resolve()), "--one", sampler]
        costs = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        spans = ", ".join(f"{ms} ms a trial of {first} to {last}" for ms, (first, last) in zip(costs, SPANS, strict=True))
        print(f"{name:12} {spans}", flush=True)


if __name__ == "__main__":
    one(sys.argv[2]) if sys.argv[1] == "--one" else main(Path(sys.argv[1]))
