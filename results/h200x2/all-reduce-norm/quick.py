"""`autotax tune` with short finals, for many sizes in little time: one baseline, two challengers, 0.25 s of each in a job.

    PYTHONPATH=. python results/h200x2/all-reduce-norm/quick.py --shapes FILE --trials 8 --db norm.db

Arguments are those of `autotax tune`. Winners are verified, soaked and measured in place as ever; intervals are wider.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace

from autotax.tuner import finalists, tuning


def main() -> None:
    for module in (finalists, tuning):  # one imports these names from the other
        module.BASELINES, module.CHALLENGERS = 1, 2
    finalists.ROUND_EFFORT = replace(finalists.ROUND_EFFORT, seconds=0.25)
    sys.argv = ["autotax", "tune", *sys.argv[1:]]
    runpy.run_module("autotax", run_name="__main__")


if __name__ == "__main__":
    main()
