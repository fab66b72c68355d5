"""Makes a file of shipped winners: the winners of an export without their samples, without the names of users.

    PYTHONPATH=. python results/ship.py winners.json autotax/shipped/h200x4.json

Figures have seven digits, finer than the timer: the package takes less. Intervals and versions stay. The samples belong into
results/HOST/winners.json.xz, where tests look for them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotax.db import formats

FIGURES = "latency_us", "baseline_us", "speedup", "interval_low", "interval_high"


def main(source: str, target: str) -> None:
    """Reads any file of `autotax export`; the order of the winners stays."""
    formats.write(Path(target), [shipped(entry) for entry in formats.read(Path(source))], anonymous=True)


def shipped(entry: Any) -> Any:
    """An entry as it ships."""
    figures = {name: float(f"{getattr(entry.winner, name):.7g}") for name in FIGURES}
    return replace(entry, winner=replace(entry.winner, **figures, samples=None))


if __name__ == "__main__":
    main(*sys.argv[1:])
