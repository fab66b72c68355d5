"""Digests of the machine code of shipped winners under the Triton at hand, and a table of those that several Tritons share:

    PYTHONPATH=. python results/versions/machine_code.py 1 > triton-$VERSION.txt      # each config of each file once
    PYTHONPATH=. python results/versions/machine_code.py 5 > triton-$VERSION.txt      # every fifth of them
    PYTHONPATH=. python results/versions/machine_code.py triton-*.txt                 # the table; the first file is the yardstick
    PYTHONPATH=. python results/versions/machine_code.py keep triton-3.6.0.txt        # puts digests into the shipped files

One line a winner: file, problem, variant, number of the config. Behind it one line a kernel: its name and the digest of its
instructions and constants. Everything is compiled offline for the winner's GPU.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from autotax.db.formats import read
from autotax.db.records import WinnerRecord
from autotax.db.shipped import FOLDER
from autotax.kernels.offline import resources_offline
from autotax.kernels.resources import Resources, machine_code
from autotax.software import triton_version


def name_of(winner: WinnerRecord) -> tuple[Any, ...]:
    """The same for winners that only their conditions tell apart."""
    return winner.problem, winner.config, winner.place.hardware


def configs_of(file: Path) -> list[WinnerRecord]:
    """One winner for each problem, config and GPU of a file."""
    winners: dict[Any, WinnerRecord] = {}
    for entry in read(file):
        winner = entry.winner
        if winner.place.hardware.backend == "cuda" and winner.config.values:
            winners.setdefault(name_of(winner), winner)
    return list(winners.values())


def line_of(file: Path, number: int, winner: WinnerRecord) -> str:
    return f"{file.stem} {winner.problem.key} {winner.config.variant} {number}"


def compile_every(step: int) -> None:
    """Compiles each `step`-th config of the shipped files."""
    print(f"# Triton {triton_version()}")
    files = sorted(FOLDER.glob("*.json"))
    chosen = [(file, number, winner) for file in files for number, winner in enumerate(configs_of(file))]
    for file, number, winner in chosen[::step]:
        print(line_of(file, number, winner), flush=True)
        for kernel in resources_offline(winner.problem, winner.config, winner.place.hardware):
            print(f"  {kernel.kernel} {kernel.code}", flush=True)


def kernels_of(path: Path) -> dict[str, list[str]]:
    """The lines of the kernels of each winner in an output of `compile_every`, without winners that launch no kernel of ours."""
    winners: dict[str, list[str]] = {}
    kernels: list[str] = []
    for line in path.read_text().splitlines()[1:]:
        if line.startswith("  "):
            kernels.append(line)
        else:
            winners[line] = kernels = []
    return {winner: lines for winner, lines in winners.items() if lines}


def compare(paths: list[Path]) -> None:
    """Prints for each file how many winners have the yardstick's machine code in all their kernels, of those in all outputs."""
    yardstick, *others = [kernels_of(path) for path in paths]
    compiled = [winner for winner in yardstick if all(winner in other for other in others)]
    files = Counter(winner.split()[0] for winner in compiled)
    print("| shipped file | compiled |" + "".join(f" {path.stem.removeprefix('triton-')} |" for path in paths[1:]))
    print("|---" * (2 + len(others)) + "|")
    equal = [Counter(winner.split()[0] for winner in compiled if other[winner] == yardstick[winner]) for other in others]
    for file, count in files.items():
        print(f"| {file} | {count} |" + "".join(f" {counter[file]} |" for counter in equal))
    print(f"| all | {len(compiled)} |" + "".join(f" {counter.total()} |" for counter in equal))
    shared = [winner.split() for winner in compiled if any(other[winner] == yardstick[winner] for other in others)]
    variants = sorted({f"{problem.partition('/')[0]} {variant}" for _, problem, variant, _ in shared})
    print(f"equal under one of them: {', '.join(variants) or 'none'}")


def keep(path: Path) -> None:
    """Puts the digest of each winner in an output of `compile_every` beside the winner, and changes nothing else of a file."""
    lines = kernels_of(path)
    for file in sorted(FOLDER.glob("*.json")):
        codes = {}
        for number, winner in enumerate(configs_of(file)):
            words = [line.split() for line in lines.get(line_of(file, number, winner), [])]
            codes[name_of(winner)] = machine_code([Resources(kernel, 0, code=code) for kernel, code in words])
        document = json.loads(file.read_text())
        for values, entry in zip(document["winners"], read(file), strict=True):
            if code := codes.get(name_of(entry.winner)):
                values["machine_code"] = code
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{file.name}: {sum('machine_code' in values for values in document['winners'])} of {len(document['winners'])}")


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        compile_every(int(sys.argv[1]))
    elif sys.argv[1] == "keep":
        keep(Path(sys.argv[2]))
    else:
        compare([Path(name) for name in sys.argv[1:]])
