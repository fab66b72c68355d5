"""Exports a host's databases into the tree: all trials without samples, and the best proven winners with their samples.

    python results/export.py results/HOST DATABASE ...       makes results/HOST/landscapes.json.gz and winners.json.xz

With --keep before the folder, what both files hold already stays in them. A winner that a database holds too is replaced by
that one, whether it is faster or not: the stronger of two measurements of one config would promise too much.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from autotax.core.files import write_whole
from autotax.db import Store, formats
from autotax.db.records import Entry, merge
from autotax.hardware import BACKENDS
from autotax.operators.registry import operators
from results.search import landscapes


def main(folder: Path, databases: list[Path], keep: bool) -> None:
    """Runs name their database by its path below the folder, or by its name if it lies elsewhere."""
    trials, winners = folder / "landscapes.json.gz", folder / "winners.json.xz"
    file = landscapes.write(trials, databases, folder, landscapes.read(trials) if keep else None)
    sides = []
    for database in databases:
        with Store.open(database, create=False) as store:
            sides.append(store.entries(list(operators()), BACKENDS))
    kept = {entry.winner.key: entry for entry in formats.read(winners)} if keep else {}
    best = kept | merge(*sides)
    with tempfile.TemporaryDirectory() as scratch:
        formats.write(plain := Path(scratch) / "winners.json", map(rounded, best.values()), anonymous=True)
        write_whole(winners, lzma.compress(plain.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(file.results)} trials of {len(file.runs)} runs, {len(best)} winners")


def rounded(entry: Entry) -> Entry:
    """With samples of seven digits, finer than the timer: the file takes half the bytes."""
    samples = entry.winner.samples or {}
    short = {config: [[float(f"{us:.7g}") for us in rank] for rank in ranks] for config, ranks in samples.items()}
    return replace(entry, winner=replace(entry.winner, samples=short or None))


if __name__ == "__main__":
    keep = sys.argv[1:2] == ["--keep"]
    folder, *databases = map(Path, sys.argv[2 if keep else 1 :])
    main(folder, sorted(databases), keep)
