"""Times 100 bad command lines: seconds until the message is there and the command has ended, and seconds of the processor.

    python results/first-hour/bad.py > results/first-hour/bad.txt

Lines are drawn from the mistakes below by a fixed seed. Each must end with exit code 2 and one line on stderr.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINES, SEED = 100, 0
PROBLEMS = {
    "all-gather-gemm": "--m 64 --n 96 --k 64",
    "gemm-reduce-scatter": "--m 64 --n 96 --k 64",
    "flash-decode": "--batch 2 --q-heads 8 --kv-heads 2 --head-dim 32 --kv-len 128",
    "decode-merge": "--batch 2 --heads 8 --head-dim 32",
}
ANYWHERE = [
    "{c} {o} {s} --dtype fp8", "{c} {o} {s} --world-size 0", "{c} {o} {s} --world-size 65", "{c} {o} {s} --speed 9",
    "{c} {o} {s} --backend tpu", "{c} {o} {s} --backend cuda", "{c} {o} {s} --db nonsense://x/y", "{c} {o} {s} --dtype",
    "{c} {o} {s} --db /proc/none/my.db --world-size x", "{c} all-reduce {s}", "{c} {o}s {s}", "{c} {o}",
]  # fmt: skip
OF_CALLS = ["{c} {o} {s} --mode lazy", "{c} {o} {s} --l2 tepid", "{c} {o} {s} --skew -1", "{c} {o} {s} --skew nan"]
OF_SEARCH = [
    "tune {o} {s} --trials 0", "tune {o} {s} --trials few", "tune {o} {s} --timeout 10d", "tune {o} {s} --sampler cma",
    "tune {o} {s} --seed -1", "tune {o} {s} --variants bsp,teleport", "tune {o} {s} --soak -1", "tune {o} {s} --effort most",
    "tune --shapes nowhere.toml", "tune {o} {s} --shapes nowhere.toml", "tune --m 64",
]  # fmt: skip
OTHERS = [
    "", "tunes", "lookups", "--fast", "trials --sort latancy", "trials --status wrong", "trials --top 0", "trials --sort",
    "winners flash", "refresh --soak -1", "report nowhere.json", "import nowhere.json", "export --output", "trace",
    "compile {o} {s} --target cuda:1", "compile {o} {s}", "doctor --backend tpu", "compare --shapes nowhere.toml",
    "fleet tune --hosts 0", "fleet",
]  # fmt: skip


def drawn() -> list[str]:
    """Different lines; every mistake of OTHERS and OF_SEARCH is among them."""
    draw = random.Random(SEED)

    def filled(line: str) -> str:
        operator = draw.choice(list(PROBLEMS))
        return line.format(c=draw.choice(["tune", "compare", "taxes", "lookup", "trials"]), o=operator, s=PROBLEMS[operator])

    lines = dict.fromkeys(map(filled, OTHERS + OF_SEARCH))
    while len(lines) < LINES:
        mistake = draw.choice(ANYWHERE + OF_CALLS)
        line = filled(mistake)
        if not (mistake in OF_CALLS and line.startswith("trials")):
            lines[line] = None
    return list(lines)[:LINES]


def main() -> int:
    command, walls, processors, wrong = Path(sys.executable).with_name("autotax"), [], [], []
    print(f"{'seconds':>8} {'processor':>10}  command and message")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"AUTOTAX_DB": f"{folder}/none.db"}
        for line in drawn():
            before, began = _children_s(), time.perf_counter()
            ended = subprocess.run([command, *line.split()], capture_output=True, text=True, cwd=folder, env=environment)
            walls.append(time.perf_counter() - began)
            processors.append(_children_s() - before)
            if ended.returncode != 2 or ended.stdout or ended.stderr.count("\n") != 1 or list(Path(folder).iterdir()):
                wrong.append(line)
            print(f"{walls[-1]:8.2f} {processors[-1]:10.2f}  autotax {line}\n{'':21}{ended.stderr.strip()}")
    for name, seconds in (("seconds", walls), ("processor", processors)):
        print(f"{name}: median {statistics.median(seconds):.2f}, greatest {max(seconds):.2f}")
    print(f"{len(walls)} command lines, {len(wrong)} without exit code 2 and one line: {wrong}")
    return 1 if wrong else 0


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
