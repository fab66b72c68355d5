"""Audits Triton's AMD code for words that validate themselves: see `autotax.kernels.primitives`.

    PYTHONPATH=. python -m tests.kernels.words_on_amd [TARGET ...]     a table: variant, kernel, words stored and loaded, faults
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline, known_hardware
from autotax.operators.problems import AllGatherGemm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.spaces import space_for
from tests.kernels.releases import AMD, instructions

PROBLEMS: tuple[Problem, ...] = (
    FlashDecode(1, 64, 8, 128, 8192, "bf16", 2),
    DecodeMerge(16, 16, 128, "bf16", 2, "head_scatter"),
    HeadGather(16, 128, 576, "bf16", 8),
    GemmReduceScatter(64, 1024, 4096, "bf16", "scattered", 2),
    AllGatherGemm(64, 1024, 4096, "bf16", "m", 8),
    FlashDecode(3, 12, 4, 80, 1001, "bf16", 2, "head_scatter", 16),
    DecodeMerge(3, 12, 80, "fp32", 4, "replicated", "2"),
    FlashDecode(8, 64, 8, 128, 8192, "bf16", 8),
    DecodeMerge(16, 128, 512, "bf16", 8, "head_scatter"),
    GemmReduceScatter(256, 7168, 4096, "bf16", "replicated", 8),
    GemmReduceScatter(40, 300, 1000, "fp16", "replicated", 4, "kn"),
    AllGatherGemm(100, 300, 1000, "fp16", "k", 4),
)
BY_WORDS = {
    "flash-decode": ("resident", "compact", "fused", "single"),
    "decode-merge": ("words", "compact"),
    "head-gather": ("words",),
    "gemm-reduce-scatter": ("words",),
    "all-gather-gemm": ("push_packets",),
}
"""Variants that exchange words, always or with protocol=ll."""

Job = tuple[str, Problem, Config]

_WORD = re.compile(r"^(global_load|global_store)_dwordx2\b.*\bsc0 sc1$")
_LOADING = re.compile(r'elementwise_inline_asm "global_load_dwordx2.*?pack(?:ed|_)\w* = (\d+).*?-> tensor<((?:\d+x)+)', re.DOTALL)


def jobs(targets: Iterable[str] = AMD, problems: Iterable[Problem] = PROBLEMS) -> list[Job]:
    """A config of each variant that exchanges words."""
    cases: list[Job] = []
    for target in targets:
        for problem in problems:
            space = space_for(problem, known_hardware(target))
            for name in BY_WORDS[problem.op]:
                if name in space.variants:
                    config = space.default(name)
                    if "protocol" in config.values:
                        config = Config.of(name, config.values | {"protocol": "ll"})
                    cases.append((target, problem, config))
    return cases


def compiled(target: str, problem: Problem, config: Config) -> dict[str, tuple[dict[str, str], int]]:
    """The compilation stages and the number of warps of each kernel of a config."""
    kernels: dict[str, tuple[dict[str, str], int]] = {}

    class Keeping(Context):
        def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            stages = {stage: binary.asm[stage] for stage in ("ttir", "ttgir", "llir", "amdgcn")}
            kernels[kernel.__name__] = stages, binary.metadata.num_warps

    compile_offline(problem, config, known_hardware(target), Keeping)
    return kernels


def words(listing: str) -> tuple[int, int]:
    """How many instructions load and store whole words past the caches."""
    kinds = [kind[1] for line in instructions(listing) if (kind := _WORD.match(line))]
    return kinds.count("global_load"), kinds.count("global_store")


def faults(stages: dict[str, str], warps: int) -> list[str]:
    """Returns the faults in a kernel's use of LL words, a line each."""
    return [*_accesses(stages), *_copies(stages, warps), *_loops(stages["ttir"]), *_votes(stages["amdgcn"], warps)]


def _accesses(stages: dict[str, str]) -> list[str]:
    """Words are loaded and stored by the instructions of `primitives` alone, each with its bits, and no word is torn."""
    errors = []
    # Loads of the addresses of peers are not volatile.
    ordinary = r"tt\.(?:load [^\n]*isVolatile = true|store) [^\n]*tensor<(?:\d+x)+!tt\.ptr<i64>>"
    errors += ["an ordinary access to words"] * len(re.findall(ordinary, stages["ttir"]))
    for line in instructions(stages["amdgcn"]):
        past = "sc0 sc1" in line and re.match(r"(global|buffer|flat)_(load|store)", line)
        if past and not _WORD.match(line) and not re.match(r"global_load_dword v\d+", line):  # the poll of one flag
            errors.append(f"not one whole word: {line}")
    return errors


def _copies(stages: dict[str, str], warps: int) -> list[str]:
    """A word that is polled is held by one thread, which loads it once: what is voted on is what is used."""
    made, kept = (_LOADING.findall(stages[stage]) for stage in ("ttir", "ttgir"))
    errors = [f"{len(kept)} loads of {len(made)}"] if len(made) != len(kept) else []
    sizes = [math.prod(map(int, shape.rstrip("x").split("x"))) for _, shape in kept]
    errors += [f"{size} words for {64 * warps} threads" for size in sizes if size < 64 * warps]
    calls = re.findall(r'asm sideeffect "global_load_dwordx2[^"]*"[^(]*\(([^\n]*)\)', stages["llir"])
    return errors + ["a load from no address" for call in calls if "undef" in call or "poison" in call]


def _loops(ttir: str) -> list[str]:
    """Every loop of polls ends after some number of them."""
    errors = []
    for head in re.findall(r"scf\.while.*?scf\.condition\((%\w+)\)", ttir, re.DOTALL):
        condition = re.search(rf"{re.escape(head)} = arith\.andi (%\w+), (%\w+)", ttir)
        sides = condition.groups() if condition else ()
        if not any(re.search(rf"{re.escape(side)} = arith\.cmpi slt", ttir) for side in sides):
            errors.append("a loop without a limit")
    return errors


def _votes(listing: str, warps: int) -> list[str]:
    """In a loop of polls the loads are waited for and, where there are several waves, decided on together."""
    lines = [line.partition(";")[0].strip() for line in listing.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.match(r"\.LBB\w+:$", line)}
    jumps = [(labels.get(line.split()[-1], at), at) for at, line in enumerate(lines) if re.match(r"s_c?branch", line)]
    errors, polling = [], 0
    for first, last in ((first, last) for first, last in jumps if first < last):
        body = lines[first:last]
        loads = [at for at, line in enumerate(body) if line.startswith("global_load_dwordx2") and _WORD.match(line)]
        inner = [jump for jump in jumps if first < jump[0] < jump[1] < last]
        if not loads or inner:
            continue
        polling += 1
        if not any(line == "s_waitcnt vmcnt(0)" for line in body[loads[-1] :]):
            errors.append("polled words are not waited for")
        if warps > 1 and not ({"s_barrier"} <= set(body) and any(line.startswith("ds_read") for line in body)):
            errors.append("waves decide each for itself")
    if words(listing)[0] and not polling:
        errors.append("words are loaded in no loop")
    return errors


def main(*targets: str) -> int:
    import triton

    columns = ("warps", "stored", "loaded", "faults")
    print(f"Triton {triton.__version__}\n{'target':11s} {'variant':28s} {'kernel':22s}", *(f"{name:>8s}" for name in columns))
    wrong = 0
    for target, problem, config in jobs(targets or AMD):
        for kernel, (stages, warps) in compiled(target, problem, config).items():
            loaded, stored = words(stages["amdgcn"])
            if loaded or stored:
                number = len(faults(stages, warps))
                wrong += number
                numbers = (warps, stored, loaded, number)
                print(f"{target:11s} {problem.op + ' ' + config.variant:28s} {kernel:22s}", *(f"{n:8d}" for n in numbers))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
