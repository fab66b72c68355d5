"""The searches of `autotax replay` on recorded trials and on two surrogates, each problem left out of all fitting of its prior.

    python results/search/train.py results/search/models > results/search/train.txt
    python results/search/replays.py LANDSCAPE OP SEEDS AHEAD [TRIALS] > results/search/replays-OP-LANDSCAPE.txt

LANDSCAPE is `recorded`, `boosted` or `forest`. Nothing is measured here.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autotax.db import landscapes  # noqa: E402
from autotax.tuner import replay  # noqa: E402
from autotax.tuner.held_out import held_out, trees_of  # noqa: E402

MODELS = Path(__file__).with_name("models")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def shown(trials: float, most: int) -> str:
    return f">{most}" if trials > most else f"{trials:g}"


def main(kind: str, op: str, seeds: int, ahead: int, most: int) -> None:
    print(f"$ python results/search/replays.py {' '.join(sys.argv[1:])}")
    grounds = []
    for path in sorted((ROOT / "results").glob("h200x[24]/landscapes.json.gz")):
        file = landscapes.read(path)
        for key in (key for key in file.problems if key.startswith(op)):
            made = replay.recorded(file, key) if kind == replay.RECORDED else (
                replay.surrogate(file, key, kind, trees_of(MODELS, op, kind)))  # fmt: skip
            if made:
                grounds.append(made)
    print(f"{op}, {kind}: {len(grounds)} problems of 2 and 4 H200, {seeds} seeds, {ahead} asked ahead, {most} trials")
    if kind != replay.RECORDED:
        print(f"surrogate's error on configs left out: {trees_of(MODELS, op, kind).error:.3f} of log latency")
    print(f"{'trials to within 1 % and 3 % of the best':46} median   95 %   median   95 %   after 12   after 16 (median, 95 %)")
    for name, strategy in replay.STRATEGIES.items():
        began = time.monotonic()
        played = [
            replay.play(ground, strategy, most, seed, ahead, held_out(MODELS, ground.problem, ground.hardware))
            for ground in grounds
            for seed in range(seeds)
        ]
        figures = []
        for share in (0.01, 0.03):
            found = [float(each.within(share) or most + 1) for each in played]
            figures += [f"{shown(statistics.median(found), most):>6}  {shown(quantile(found, 0.95), most):>6} "]
        for trials in (12, 16):
            lost = [each.best_after(trials) - 1 for each in played]
            figures.append(f" {statistics.median(lost):6.2%} {quantile(lost, 0.95):6.1%}")
        print(f"{name:46} {' '.join(figures)}   ({(time.monotonic() - began) / len(played):.1f} s a search)", flush=True)
        if "prior and GP, in turn" in name:
            stops(played, most)


def stops(played: list[replay.Played], most: int) -> None:
    """What a run that ends by itself would have lost, if further trials could only have come from this search."""
    for threshold in (0.003, 0.007, 0.015):
        ends = [
            next((at for at, gain in enumerate(each.gains, 1) if gain is not None and gain < threshold), most)
            for each in played
        ]
        missed = [each.best_after(end) / each.best_after(most) - 1 for each, end in zip(played, ends, strict=True)]
        lost = [each.best_after(end) - 1 for each, end in zip(played, ends, strict=True)]
        print(f"    ends where the next eight should win less than {threshold:.1%}: after {statistics.median(ends):g} trials "
              f"({quantile([float(e) for e in ends], 0.95):g} at 95 %); {most} trials would have won "
              f"{statistics.mean(missed):.2%} more (95 %: {quantile(missed, 0.95):.1%}), "
              f"within 1 % of the best known in {sum(x <= 0.01 for x in lost) / len(lost):.0%}")  # fmt: skip


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[3:]]
    main(sys.argv[1], sys.argv[2], numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 60)
