"""Times three journeys of a newcomer in an environment that exists: a first table, a first kernel, a served layer.

    python results/first-hour/journeys.py > results/first-hour/journeys.txt                           # two CPU ranks
    CUDA_VISIBLE_DEVICES=0 python results/first-hour/journeys.py > results/first-hour/journeys-gpu.txt  # one GPU

Prints a table of the commands, then what they printed. Folder, database and Triton's cache are new. Ends within 140 s: commands
that the time does not reach are left out. Exits with 1 if one failed or was left out.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 140.0


@dataclass(frozen=True)
class Step:
    """A command, and what it took; None where it did not end by itself."""

    line: str
    seconds: float
    processor_s: float
    code: int | None
    printed: str


def journeys(ranks: int) -> dict[str, list[str]]:
    """The commands of each journey. `examples/in_torch.py` looks up what the first one tunes."""
    sizes = "--n 7168 --k 8192" if torch.cuda.is_available() else "--n 96 --k 64 --dtype fp32"
    small = "--m 64 --n 96 --k 64 --dtype fp32 --variants my-push"
    return {
        "a first table": [f"autotax tune all-gather-gemm --m {128 * ranks} {sizes} --trials 4"],
        "a first operator": [
            "autotax new operator my-sum",
            "autotax tune my-sum --n 512 --dtype fp32 --trials 2 --soak 2 --load my_sum.py",
        ],
        "a first variant": [
            "autotax new variant my-push",
            f"autotax tune all-gather-gemm {small} --trials 2 --soak 2 --load my_push.py",
        ],
        "a served layer": [f"torchrun --standalone --nproc-per-node {ranks} examples/in_torch.py"],
    }


def run(line: str, folder: Path, left_s: float) -> Step:
    programs = {"autotax": ["-m", "autotax"], "torchrun": ["-m", "torch.distributed.run"]}
    first, *words = shlex.split(line)
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    own = {"AUTOTAX_DB": str(folder / "own.db"), "TRITON_CACHE_DIR": str(folder / "triton"), "COLUMNS": "80"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *programs[first], *words], cwd=folder, env=os.environ | own | {"PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    code: int | None = None
    try:
        out, err = process.communicate(timeout=left_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        out, err = ended(process)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Step(line, seconds, used, code, out if code == 0 else out + "\n".join(err.splitlines()[-3:]))


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a command and its ranks. Returns the output of the command."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def main() -> int:
    on_gpu = torch.cuda.is_available()
    ranks = torch.cuda.device_count() if on_gpu else 2
    device = torch.cuda.get_device_name(0) if on_gpu else "CPU ranks"
    print(f"{ranks} x {device}; torch {torch.__version__}; load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n")
    print("| to | command | seconds | processor | ended |\n|---|---|---|---|---|", flush=True)
    began, done, failed = time.perf_counter(), list[Step](), False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, lines in journeys(ranks).items():
            for line in lines:
                left_s = began + LIMIT_S - time.perf_counter()
                if left_s <= 0:
                    print(f"| {name} | `{line}` | - | - | left out |")
                    failed = True
                    continue
                step = run(line, Path(folder), left_s)
                how = {0: "well", None: f"at the limit of {LIMIT_S:g} s"}.get(step.code, f"exit code {step.code}")
                print(f"| {name} | `{line}` | {step.seconds:.1f} | {step.processor_s:.1f} | {how} |", flush=True)
                done.append(step)
    for step in done:
        print(f"\n$ {step.line}\n" + "\n".join(text.rstrip() for text in step.printed.splitlines()))
    return 1 if failed or any(step.code != 0 for step in done) else 0


if __name__ == "__main__":
    sys.exit(main())
