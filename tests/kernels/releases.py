"""Reads AMD assembly for releases that nothing waits for.

    PYTHONPATH=. python -m tests.kernels.releases [--all] [TARGET or VARIANT ...]   a table: variant, kernel, publications, faults

An atomic publishes data: it sets a peer's flag, or increments a counter that another program of the same GPU acquires. Before
the atomic, in the order of the listing, there must be a write-back of its scope (`buffer_wbl2`), then a wait for the write-back.
Before the write-back all waves must wait for their stores. The listing is read from top to bottom: branches only skip parts.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.operators import named
from autotax.operators.problems import AllGatherGemm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.spaces import space_for
from tests.spaces.drawing import drawn, ways_to_exchange

AMD = ("hip:gfx942", "hip:gfx950")
PROBLEMS: tuple[Problem, ...] = (
    AllGatherGemm(256, 1024, 4096, "bf16", "m", 8),  # the most rows that `push_packets` takes
    FlashDecode(1, 64, 8, 128, 8192, "bf16", 8),
    GemmReduceScatter(512, 1024, 4096, "bf16", "scattered", 8),
    DecodeMerge(16, 128, 512, "bf16", 8, "head_scatter"),
    HeadGather(16, 128, 576, "bf16", 8),
    AllGatherGemm(300, 1000, 4096, "fp16", "k", 4),
    FlashDecode(3, 12, 4, 80, 1001, "bf16", 2, "head_scatter", 16),
    GemmReduceScatter(40, 300, 1000, "fp16", "replicated", 4, "kn"),
    DecodeMerge(3, 12, 80, "fp32", 4, "replicated", "2"),
)
QUICK = 5
"""Every variant has a kernel for one of the first so many; the further problems have other loops, ragged shapes and pages."""
DRAWN = 3
"""Configs of each variant of each problem that the full table draws at random, beside its seeds and ways to exchange."""

Job = tuple[str, Problem, Config]

_MNEMONIC = re.compile(r"^[a-z]\w+")
_STORE = re.compile(r"^(global|buffer|flat)_(store|atomic)\w*")
_DRAINED = re.compile(r"^s_waitcnt\b.*\bvmcnt\(0\)")


def instructions(listing: str) -> list[str]:
    """The instructions of a listing, without labels, directives and comments."""
    lines = (line.partition(";")[0].partition("//")[0].strip() for line in listing.splitlines())
    return [line for line in lines if _MNEMONIC.match(line) and not line.endswith(":")]


def publications(code: list[str]) -> Iterator[tuple[int, str]]:
    """Where an atomic publishes, and the bits of the write-back that it needs.

    An atomic without a return value (no `sc0`) is a signal. One with a return value and system scope (`sc1`) is a poll. One with
    a return value and GPU scope publishes if it also acquires, as an invalidation after it shows. Otherwise it hands out a
    number or leaves a note.
    """
    for at, line in enumerate(code):
        if not re.match(r"(global|flat|buffer)_atomic", line):
            continue
        bits = line.split()
        if "sc0" not in bits:
            yield at, "sc0 sc1" if "sc1" in bits else "sc1"
        if "sc0" not in bits or "sc1" in bits:
            continue
        ends = ("buffer_inv", "s_barrier")
        after = next((later for later in code[at + 1 :] if _STORE.match(later) or later.startswith(ends)), "")
        if after.startswith("buffer_inv"):
            yield at, "sc1"


def faults(listing: str) -> list[str]:
    """Returns the faulty releases of a kernel, a line each; an empty list for a correct kernel."""
    code, errors = instructions(listing), []
    waves = re.findall(r"\.max_flat_workgroup_size:\s+(\d+)", listing)
    for at, line in enumerate(code):
        if line.startswith("buffer_wbl2"):
            then = next((later for later in code[at + 1 :] if _DRAINED.match(later) or _STORE.match(later)), "s_waitcnt vmcnt(0)")
            if not _DRAINED.match(then):
                errors.append(f"{line}: not waited for before {then}")
            if not _settled(code[:at], waves == ["64"]):
                errors.append(f"{line}: stores before it not waited for by all waves")
    for at, bits in publications(code):
        back = next((earlier for earlier in reversed(code[:at]) if earlier.startswith("buffer_wbl2") or _changes(earlier)), "")
        if not back.startswith("buffer_wbl2") or not set(bits.split()) <= set(back.split()):
            errors.append(f"{code[at]}: no write-back ({bits}) before it, but {back or 'nothing'}")
    return errors


def _changes(line: str) -> bool:
    """Whether a line is a store that must be written back before a later publication."""
    return "_store" in line and bool(_STORE.match(line))


def _settled(before: list[str], alone: bool) -> bool:
    """Whether all waves have waited for their stores: from the end a barrier, then the wait, then the stores."""
    barrier = alone  # a single wave needs none, and the compiler leaves it out
    for line in reversed(before):
        if line.startswith("buffer_wbl2") and not barrier:
            return True  # a further copy of the same write-back: what goes before that one goes before this one
        if _changes(line):
            return False
        barrier |= line.startswith("s_barrier")
        if barrier and _DRAINED.match(line):
            return True
    return True


def jobs(targets: Iterable[str] = AMD, everything: bool = False) -> list[Job]:
    """A config for each kernel of each variant, or those of the full table."""
    cases: dict[Job, None] = {}
    for target in targets:
        for problem in PROBLEMS if everything else PROBLEMS[:QUICK]:
            space = space_for(problem, known_hardware(target))
            for name, variant in space.variants.items():
                if name in named(problem.op).peers or (name == "bsp" and problem.op not in ("flash-decode", "decode-merge")):
                    continue  # has no kernels of ours
                configs = [space.default(name)]
                if everything:
                    configs += [seed for seed in variant.seeds if seed in space]
                    configs += [way for way in ways_to_exchange(space) if way.variant == name]
                    configs += [drawn(space, name, f"{target} {problem} {name} {number}") for number in range(DRAWN)]
                cases |= {(target, problem, config): None for config in configs}
    return list(cases)


def listings(target: str, problem: Problem, config: Config) -> dict[str, str]:
    """The assembly of each kernel of a config."""
    assemblies: dict[str, str] = {}

    class Listing(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            assemblies[kernel.__name__] = kernel.warmup(*args, TARGET=self.target, grid=grid, **options).asm["amdgcn"]

    compile_offline(problem, config, known_hardware(target), Listing)
    return assemblies


def main(*arguments: str) -> int:
    import triton

    words = [argument for argument in arguments if not argument.startswith("-")]
    targets = [name for name in words if name.startswith("hip:")] or list(AMD)
    variants = set(words).difference(targets)
    total: Counter[str] = Counter()
    table: dict[tuple[str, str, str], Counter[str]] = {}
    for job in jobs(targets, "--all" in arguments):
        target, problem, config = job
        if variants and config.variant not in variants:
            continue
        for kernel, listing in listings(*job).items():
            row = table.setdefault((target, f"{problem.op} {config.variant}", kernel), Counter())
            code = instructions(listing)
            row += Counter(
                configs=1,
                write_backs=sum(line.startswith("buffer_wbl2") for line in code),
                publications=sum(1 for _ in publications(code)),
                unwaited=sum("not waited for before" in fault for fault in faults(listing)),
                faults=len(faults(listing)),
            )
    columns = ("configs", "write_backs", "publications", "unwaited", "faults")
    print(f"Triton {triton.__version__}\n{'target':11s} {'variant':36s} {'kernel':28s}", *(f"{name:>12s}" for name in columns))
    for (target, variant, kernel), row in table.items():
        total += row
        print(f"{target:11s} {variant:36s} {kernel:28s}", *(f"{row[name]:12d}" for name in columns))
    print(f"{'all':77s}", *(f"{total[name]:12d}" for name in columns))
    return int(total["faults"] > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
