"""Takes the winners of a folder that `tables.py` made into what is published and what ships:

    PYTHONPATH=. python results/ship.py FOLDER results/h200x2/decode autotax/shipped/h200x2-decode.json [--keys m=16]

A winner replaces the one of the same problem and conditions, and the order of the others stays. BSP and ties ship only where they
replace a winner, which was measured beside them: else its older figures would go on shipping. The published file keeps all
samples of the finalist round, where tests look for them, and the comparisons of problems that ship are added to those that are
published; a folder that `tables.py --served` made has nothing else. Shipped entries have no samples and no names of users, and
figures of seven digits, finer than the timer, and times of whole seconds. Intervals and versions stay.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from autotax.core.conditions import Conditions
from autotax.core.files import write_whole
from autotax.core.problem import Problem
from autotax.db import Store, formats
from autotax.db.records import Entry
from autotax.hardware import BACKENDS
from autotax.operators.registry import operators
from results.export import rounded

FIGURES = "latency_us", "baseline_us", "speedup", "interval_low", "interval_high"
PRESET = 9 | lzma.PRESET_EXTREME


def winners_of(database: Path, keys: str, target: Path) -> list[Entry]:
    """Winners that ship, of problems whose key has a match of `keys`."""
    with Store.open(database, create=False) as store:
        entries = store.entries(list(operators()), BACKENDS)
    before = {place_of(entry) for entry in (formats.read(target) if target.exists() else [])}
    asked = [entry for entry in entries if re.search(keys, entry.winner.problem.key)]
    return [entry for entry in asked if is_faster(entry) or place_of(entry) in before]


def is_faster(entry: Entry) -> bool:
    return not entry.winner.tie and entry.winner.config.variant != "bsp"


def place_of(entry: Entry) -> tuple[Problem, Conditions]:
    """The problem and conditions of an entry. A file has at most one winner for both."""
    return entry.winner.problem, entry.winner.conditions


def shipped(entry: Entry) -> Entry:
    """An entry as it ships."""
    winner = entry.winner
    figures = {name: float(f"{getattr(winner, name):.7g}") for name in FIGURES}
    time = winner.created_at and winner.created_at.replace(microsecond=0)
    return replace(entry, winner=replace(winner, **figures, created_at=time, samples=None))


def merged(file: Path, entries: Iterable[Entry]) -> list[Entry]:
    """The entries of a file, if it exists, with these added or in the place of those of the same problem and conditions."""
    before = formats.read(file) if file.exists() else []
    return list({place_of(entry): entry for entry in (*before, *entries)}.values())


def pack(file: Path, entries: Iterable[Entry]) -> None:
    """Writes a compressed file of winners."""
    plain = file.with_suffix("")
    formats.write(plain, list(entries), anonymous=True)
    write_whole(file, lzma.compress(plain.read_bytes(), preset=PRESET))
    plain.unlink()


def add_comparisons(folder: Path, place: Path, keys: set[str]) -> None:
    """Adds the comparisons of these problems to the published ones."""
    file = place / "comparisons.jsonl.xz"
    before = lzma.decompress(file.read_bytes()).decode().splitlines() if file.exists() else []
    made = folder / "comparisons.jsonl"
    lines = [line for line in (made.read_text().splitlines() if made.exists() else []) if json.loads(line)["key"] in keys]
    added = [line for line in lines if line not in before]
    write_whole(file, lzma.compress("".join(f"{line}\n" for line in before + added).encode(), preset=PRESET))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with tuned.db, and comparisons.jsonl if any")
    parser.add_argument("place", type=Path, help="a folder of published results")
    parser.add_argument("target", type=Path, help="a file of shipped winners")
    parser.add_argument("--keys", default="", help="only problems whose key has a match of this regular expression")
    options = parser.parse_args()
    entries = winners_of(options.folder / "tuned.db", options.keys, options.target)
    pack(options.place / "winners.json.xz", merged(options.place / "winners.json.xz", map(rounded, entries)))
    formats.write(options.target, merged(options.target, map(shipped, entries)), anonymous=True)
    ships = [entry.winner.problem.key for entry in formats.read(options.target)]
    add_comparisons(options.folder, options.place, {key for key in ships if re.search(options.keys, key)})
    print(f"{sum(map(is_faster, entries))} winners, {len(entries)} with BSP; {len(ships)} ship in {options.target}")


if __name__ == "__main__":
    main()
