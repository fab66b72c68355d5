"""Digests of the machine code of shipped winners under the Triton at hand, and a table of those that several Tritons share:

    PYTHONPATH=. python results/versions/machine_code.py 1 > triton-$VERSION.txt      # each config of each file once
    PYTHONPATH=. python results/versions/machine_code.py 5 > triton-$VERSION.txt      # every fifth of them
    python results/versions/machine_code.py triton-*.txt                              # the table; the first file is the yardstick

One line a winner: file, problem, variant, number of the config. Behind it one line a kernel: its name and the digest of its
instructions. Everything is compiled offline for the winner's GPU.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from autotax.db.formats import read
from autotax.db.records import WinnerRecord
from autotax.db.shipped import FOLDER
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline
from autotax.software import triton_version


def instructions(cubin: bytes) -> bytes:
    """The sections of an ELF file that hold instructions: those named `.text.KERNEL`."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + index * size) for index in range(count)]
    texts = sections[names][4]
    found = b""
    for name, _, _, _, offset, length in sections:
        if cubin[texts + name :].startswith(b".text."):
            found += cubin[offset : offset + length]
    return found


class Digesting(Context):
    """Prints the digest of each kernel that would be launched."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """See Context.launch."""
        binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
        digest = hashlib.sha256(instructions(binary.asm["cubin"])).hexdigest()[:16]
        print(f"  {kernel.__name__} {digest}", flush=True)


def configs_of(file: Path) -> list[WinnerRecord]:
    """One winner for each problem, config and GPU of a file. Winners that only their conditions tell apart are one."""
    found: dict[Any, WinnerRecord] = {}
    for entry in read(file):
        winner = entry.winner
        if winner.place.hardware.backend == "cuda" and winner.config.values:
            found.setdefault((winner.problem, winner.config, winner.place.hardware), winner)
    return list(found.values())


def compile_every(step: int) -> None:
    """Compiles each `step`-th config of the shipped files."""
    print(f"# Triton {triton_version()}")
    files = sorted(FOLDER.glob("*.json"))
    chosen = [(file, number, winner) for file in files for number, winner in enumerate(configs_of(file))]
    for file, number, winner in chosen[::step]:
        print(f"{file.stem} {winner.problem.key} {winner.config.variant} {number}", flush=True)
        compile_offline(winner.problem, winner.config, winner.place.hardware, Digesting)


def kernels_of(path: Path) -> dict[str, list[str]]:
    """The lines of the kernels of each winner in an output of `compile_every`, without winners that launch no kernel of ours."""
    found: dict[str, list[str]] = {}
    kernels: list[str] = []
    for line in path.read_text().splitlines()[1:]:
        if line.startswith("  "):
            kernels.append(line)
        else:
            found[line] = kernels = []
    return {winner: lines for winner, lines in found.items() if lines}


def compare(paths: list[Path]) -> None:
    """Prints for each file of winners how many have the yardstick's machine code in all their kernels."""
    yardstick, *others = [kernels_of(path) for path in paths]
    files = Counter(winner.split()[0] for winner in yardstick)
    print("| shipped file | winners |" + "".join(f" {path.stem.removeprefix('triton-')} |" for path in paths[1:]))
    print("|---" * (2 + len(others)) + "|")
    equal = [Counter(winner.split()[0] for winner in yardstick if other.get(winner) == yardstick[winner]) for other in others]
    for file, count in files.items():
        print(f"| {file} | {count} |" + "".join(f" {each[file]} |" for each in equal))
    print(f"| all | {len(yardstick)} |" + "".join(f" {each.total()} |" for each in equal))
    shared = [winner.split() for winner in yardstick if any(other.get(winner) == yardstick[winner] for other in others)]
    variants = sorted({f"{problem.partition('/')[0]} {variant}" for _, problem, variant, _ in shared})
    print(f"equal under one of them: {', '.join(variants) or 'none'}")


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        compile_every(int(sys.argv[1]))
    else:
        compare([Path(name) for name in sys.argv[1:]])
