"""Replays stored winners many times with late ranks and changing inputs, every output compared with its reference:

    PYTHONPATH=. python results/soaks.py DATABASE [--only all-reduce-norm] [--replays 10000] [--most 6] [--seconds 120]

Winners of the operators take turns. Nothing is stored. The exit status is 1 if a winner failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import groupby, zip_longest

from autotax import api
from autotax.db import Store
from autotax.hardware import detect
from autotax.runner.measurement import Candidate, Effort


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("db")
    parser.add_argument("--only", type=lambda text: text.split(","), help="operators")
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--most", type=int, default=6, help="winners")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further winner after this time")
    options = parser.parse_args()
    with Store.open(options.db, create=False) as store:
        stored = [winner for winner in store.winners(with_samples=False) if winner.config.variant != "bsp"]
    chosen = [winner for winner in stored if not options.only or winner.problem.op in options.only]
    by_operator = [list(group) for _, group in groupby(sorted(chosen, key=lambda w: w.problem.op), key=lambda w: w.problem.op)]
    turns = [winner for turn in zip_longest(*by_operator) for winner in turn if winner][: options.most]
    hardware, failed, ends = detect(), False, time.monotonic() + options.seconds
    for world_size, group in groupby(sorted(turns, key=lambda w: w.problem.world_size), key=lambda w: w.problem.world_size):
        with api.ranks(hardware, world_size) as runner:
            for winner in group:
                if time.monotonic() > ends:
                    print(f"no time for {winner.problem.op} {winner.problem.brief()}", flush=True)
                    continue
                began, effort = time.monotonic(), Effort(samples=10, seconds=0.05, soak=options.replays)
                (measured,) = runner.measure(winner.problem, [Candidate(winner.config, winner.conditions)], effort)
                failed |= measured.status != "ok"
                passed = measured.conditions.get("soak", 0)
                seconds = time.monotonic() - began
                print(f"{measured.status}, {passed} replays in {seconds:.0f} s: {winner.problem.op} {winner.problem.brief()}")
                print(f"  {winner.config} {measured.error or ''}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
