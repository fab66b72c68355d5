"""What replays cannot tell, measured on the GPUs at hand, of which one is enough. docs/search.md says which of it has been run.

    python results/search/live.py shapes   [--before CHECKOUT]    the new search against the one before, and trials a minute
    python results/search/live.py paired                          the same with and without `--paired`
    python results/search/live.py ends                            where a search ends by itself, against 300 trials
    python results/search/live.py coverage                        40 further jobs against the intervals of five winners
    each: [--world-size W] [--shapes N] [--skip N] [--batch N] [--trials N] [--repeats N] [--tiny] > results/search/live-STEP.txt

`shapes` tunes each shape with 24 trials by either search, in both orders; one paired job judges the four winners. The search
before is `--sampler tpe`, or that of another checkout. `--tiny` tries the script itself, on CPU ranks; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import autotax  # noqa: E402
from autotax import hardware as machine  # noqa: E402
from autotax.api import ranks  # noqa: E402
from autotax.core.config import Config  # noqa: E402
from autotax.core.problem import Problem  # noqa: E402
from autotax.core.settings import as_deployed  # noqa: E402
from autotax.operators.problems import AllGatherGemm, FlashDecode  # noqa: E402
from autotax.runner import Candidate, Effort  # noqa: E402
from autotax.tuner.finalists import ROUND_EFFORT, speedup  # noqa: E402

JUDGE = Effort(samples=100, seconds=2.0)
OPTIONS: argparse.Namespace


def shapes() -> list[Problem]:
    """Sizes of which neither this package nor results/ has a winner."""
    if OPTIONS.tiny:
        return [FlashDecode(1, 4, 2, 16, 64, "fp32", 2)][: OPTIONS.shapes]
    w = OPTIONS.world_size
    decode = [(2, 48, 8, 128, 49152), (12, 64, 8, 128, 20480), (3, 40, 8, 128, 98304), (24, 32, 4, 128, 12288)]
    gemm = [(384, 6144, 6144), (1536, 4608, 6144), (96, 6144, 12288), (3072, 3072, 6144)]
    made: list[Problem] = [FlashDecode(*sizes, "bf16", w) for sizes in decode]
    made += [AllGatherGemm(*sizes, "bf16", "m", w) for sizes in gemm]
    return made[OPTIONS.skip : OPTIONS.skip + OPTIONS.shapes]


def tune(problems: Sequence[Problem], *more: str, checkout: Path = ROOT) -> list[dict[str, Any]]:
    """The documents of a run with a database of its own."""
    with tempfile.TemporaryDirectory() as folder:
        more = ("--soak", "0", *more, *(["--backend", "cpu"] if OPTIONS.tiny else []))
        shapes = Path(folder) / "shapes.toml"
        shapes.write_text("\n".join(table_of(problem) for problem in problems))
        command = [sys.executable, "cli.py", "tune", "--shapes", str(shapes), "--db", f"{folder}/live.db", "--json"]
        cold = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/compiled"}  # no search finds what another one compiled
        output = subprocess.run([*command, *more], cwd=checkout, env=cold, stdout=subprocess.PIPE, text=True, check=True).stdout
    answer = json.loads(output)
    documents = answer if isinstance(answer, list) else answer["results"]  # a list: older checkouts, of fewer parameters
    return [next(entry for entry in documents if entry["problem"].items() <= problem.to_dict().items()) for problem in problems]


def table_of(problem: Problem) -> str:
    """The problem in a file of shapes."""
    sizes = (f"{name} = {json.dumps(value)}" for name, value in problem.to_dict().items() if name != "op")
    return "\n".join([f"[[{problem.op}]]", *sizes, ""])


def winner(document: dict[str, Any]) -> Config:
    return Config.of(document["winner"]["variant"], document["winner"]["config"])


@contextmanager
def runner_of(problem: Problem) -> Iterator[Any]:
    with ranks(machine.detect("cpu" if OPTIONS.tiny else None), problem.world_size) as runner:
        yield runner


def judged(problem: Problem, configs: Sequence[Config], effort: Effort = JUDGE) -> list[list[float]]:
    """Paired samples of each config from one job."""
    with runner_of(problem) as runner:
        conditions = as_deployed(None, runner.hardware)
        unique = list(dict.fromkeys(configs))
        measurements = dict(zip(unique, runner.measure(problem, [Candidate(c, conditions) for c in unique], effort), strict=True))
    wrong = [f"{config}: {m.status} {m.error}" for config, m in measurements.items() if not m.verified]
    if wrong:
        raise SystemExit(f"a winner could not be measured again: {wrong}")
    return [measurements[config].rounds for config in configs]


def against(sides: dict[str, list[str]], before: Path) -> None:
    """Two searches in turn, in two orders, and one job that judges."""
    (new, new_words), (old, old_words) = sides.items()
    ratios, paces = [], {new: [], old: []}
    for first_of_batch in range(0, len(shapes()), OPTIONS.batch):
        problems = shapes()[first_of_batch : first_of_batch + OPTIONS.batch]
        runs = []
        for side in (new, old, old, new):
            words = ["--trials", str(OPTIONS.trials), *(new_words if side == new else old_words)]
            runs.append(tune(problems, *words, checkout=ROOT if side == new else before))
            paces[side] += [document["accounts"]["trials_per_minute"] for document in runs[-1]]
        for problem, documents in zip(problems, zip(*runs, strict=True), strict=True):
            winners = [winner(document) for document in documents]
            rounds = judged(problem, winners)
            for first, second in ((0, 1), (3, 2)):
                ratio, (low, high) = speedup(rounds[second], rounds[first])
                ratios.append(ratio)
                print(f"{problem.key}: {new} over {old} {ratio:.4f} ({low:.4f} to {high:.4f}); "
                      f"{winners[first]} and {winners[second]}", flush=True)  # fmt: skip
    logs = [math.log(ratio) for ratio in ratios]
    print(f"mean {math.exp(statistics.mean(logs)):.4f}, least {min(ratios):.4f}, most {max(ratios):.4f} of {len(ratios)}")
    for side, pace in paces.items():
        spread = f"median of {len(pace)} runs, {min(pace):.1f} to {max(pace):.1f}"
        print(f"{side}: {statistics.median(pace):.1f} trials a minute ({spread})")


def ends() -> None:
    """The search that ends by itself, against 300 trials."""
    most = OPTIONS.trials if OPTIONS.tiny else 300
    for problem in shapes():
        (short,) = tune([problem], "--effort", "normal", "--sampler", "gp", *(["--trials", str(most)] if OPTIONS.tiny else []))
        (long,) = tune([problem], "--trials", str(most), "--sampler", "gp")
        ratio, (low, high) = speedup(*judged(problem, [winner(short), winner(long)]))
        trials = sum(short["trials"].values())
        print(f"{problem.key}: ended after {trials} trials; the winner of {most} trials is {ratio:.4f} times as fast "
              f"({low:.4f} to {high:.4f})", flush=True)  # fmt: skip


def coverage() -> None:
    """How often another job, of other processes, lands inside a winner's interval."""
    inside: list[bool] = []
    for problem in shapes()[:5]:
        with tempfile.TemporaryDirectory() as folder:
            backend = "cpu" if OPTIONS.tiny else None
            verdict = autotax.tune(problem, trials=OPTIONS.trials, db=Path(folder) / "live.db", backend=backend)
        if verdict.winner is None or verdict.baseline is None:
            raise SystemExit(f"nothing could be verified for {problem.key}")
        if verdict.winner.measurement.config.variant == "bsp":
            print(f"{problem.key}: BSP wins, so there is no interval")
            continue
        config, bsp, (low, high) = verdict.winner.measurement.config, verdict.baseline.config, verdict.winner.interval
        for _ in range(OPTIONS.repeats):
            ratio, _ = speedup(*judged(problem, [bsp, config], ROUND_EFFORT))
            inside.append(low <= ratio <= high)
            print(f"{problem.key}: {ratio:.4f}, {low:.4f} to {high:.4f}: {'inside' if inside[-1] else 'OUTSIDE'}", flush=True)
    print(f"{sum(inside)} of {len(inside)} inside")


def main() -> None:
    global OPTIONS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("shapes", "paired", "ends", "coverage"))
    parser.add_argument("--before", type=Path, help="a checkout of the search before; none: this one with --sampler tpe")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="shapes that another run on another GPU takes")
    parser.add_argument("--batch", type=int, default=4, help="shapes that one command tunes")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=8, help="of each of five winners")
    parser.add_argument("--tiny", action="store_true")
    OPTIONS = parser.parse_args()
    hardware = machine.detect("cpu" if OPTIONS.tiny else None)
    print(f"$ python results/search/live.py {' '.join(sys.argv[1:])}\n{hardware}", flush=True)
    if OPTIONS.step == "shapes":
        old = [] if OPTIONS.before else ["--sampler", "tpe"]
        against({"new": ["--sampler", "gp"], "before": old}, OPTIONS.before or ROOT)
    elif OPTIONS.step == "paired":
        against({"paired": ["--paired"], "one by one": []}, ROOT)
    else:
        {"ends": ends, "coverage": coverage}[OPTIONS.step]()


if __name__ == "__main__":
    main()
