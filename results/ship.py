"""Makes a file of shipped winners: the winners of an export without their samples, without the names of users.

    PYTHONPATH=. python results/ship.py winners.json autotax/shipped/h200x4.json

Figures, intervals and versions stay. The samples belong into results/HOST/winners.json.xz, where tests look for them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from autotax.db import formats


def main(source: str, target: str) -> None:
    """Reads any file of `autotax export`; the order of the winners stays."""
    entries = formats.read(Path(source))
    formats.write(Path(target), [replace(e, winner=replace(e.winner, samples=None)) for e in entries], anonymous=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
