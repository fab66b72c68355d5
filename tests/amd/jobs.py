"""Jobs for the emulated GPUs: every variant for AMD, on shapes that no tile divides and with shards that have no rows.

PYTHONPATH=. python -m tests.amd.jobs [TARGET, OPERATOR or VARIANT ...]

A table: problem, variant, calls, greatest error, faults.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.operators import named
from autotax.operators.problems import (
    AllGatherGemm,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    GemmReduceScatter,
    HeadGather,
)
from autotax.operators.verification import TOLERANCE
from autotax.spaces import space_for
from tests.amd.ranks import Outcome, emulate, hardware
from tests.spaces.drawing import ways_to_exchange

SUMS = GemmReduceScatter(21, 96, 130, "fp16", "replicated", 2, "kn")
PROBLEMS: tuple[Problem, ...] = (
    AllGatherGemm(37, 45, 72, "bf16", "m", 2),
    AllGatherGemm(20, 17, 200, "fp16", "k", 2),
    AllGatherGemm(1, 33, 40, "fp16", "m", 2),  # a rank without rows
    FlashDecode(2, 4, 2, 16, 75, "bf16", 2, "head_scatter", 16),
    FlashDecode(1, 4, 2, 32, 128, "fp16", 2),
    FlashDecode(2, 4, 2, 32, 1, "bf16", 2),  # a rank without tokens
    GemmReduceScatter(37, 45, 72, "bf16", "scattered", 2),
    SUMS,
    GemmReduceScatter(1, 33, 40, "fp16", "scattered", 2),  # a rank without rows
    GemmReduceScatter(5, 48, 72, "bf16", "scattered", 2),  # rows of whole words
    DecodeMerge(5, 6, 40, "bf16", 2, "head_scatter"),
    DecodeMerge(3, 4, 32, "fp32", 2, "replicated"),
    DecodeMerge(1, 1, 32, "fp16", 2),
    HeadGather(5, 6, 21, "bf16", 2),
    HeadGather(5, 6, 32, "bf16", 2),  # whole words
    AllReduceNorm(5, 264, "bf16", 2),
    AllReduceNorm(33, 256, "bf16", 2, quant="row"),
    AllReduceNorm(3, 384, "bf16", 2, "none", "block"),
    AllReduceNorm(3, 264, "bf16", 2, k=72),  # behind a product
    AllReduceNorm(2, 256, "bf16", 2, k=256, scales="block", quantize="block"),  # behind one of e4m3
    GatherAttention(1, 2, 1, 16, 44, "bf16", 2, layout="zigzag"),
    GatherAttention(1, 2, 1, 16, 44, "fp16", 2, "none"),
    GatherAttention(1, 2, 1, 16, 44, "bf16", 2, window=11),
    AllReduceNorm(3, 272, "bf16", 2, k=80, scales="row", quantize="row"),
)
CODES = PROBLEMS[-1]
"""Every program quantises all rows for itself."""
NARROW = FlashDecode(2, 4, 2, 16, 75, "bf16", 2, "head_scatter", 16, "e4m3fnuz", "learned", window=20, queries=3)
"""The 8-bit type that gfx942 converts, with all optional inputs of query tokens."""
TWO_DIES = AllGatherGemm(70, 70, 40, "bf16", "m", 2)
BY_DIES: dict[str, Value] = {"dies": 2, "comm_dies": 2, "signals": "die", "comm": 2, "pieces": 4, "across": 0, "splits": 1}
"""For `push`: the emulated GPUs have two dies, though spaces do not know it."""
SHARED_ROWS = AllReduceNorm(3, 384, "bf16", 2, quant="row")
"""Two programs share a row, and load the words of their own parts twice."""
PACKETS = AllGatherGemm(50, 70, 256, "bf16", "m", 2)
IN_PARTS: dict[str, Value] = {"block_m": 32, "block_n": 32, "block_k": 64, "splits": 2}
"""For `push_packets`: a shard of four pieces, the last one short, and tiles in parts."""
FEW: dict[str, Value] = {"block_m": 16, "block_n": 16, "dies": 2, "comm": 4, "piece": 16, "group": 16}
BLOCKS_BY_DIES = (
    (GatherAttention(2, 4, 2, 32, 96, "bf16", 2, layout="zigzag"), FEW | {"order": "head_first"}),
    (GatherAttention(1, 4, 4, 48, 96, "fp16", 2, layout="zigzag", window=31, v_dim=32), FEW | {"order": "block_first"}),
)
"""For `push`: blocks of queries of two dies, and keys of a rank that come in three groups."""
LIBRARIES = {
    "all-gather-gemm": {"bsp"},
    "all-reduce-norm": {"bsp"},
    "gather-attention": {"bsp", "decomposed", "heads"},
    "gemm-reduce-scatter": {"bsp"},
    "head-gather": {"bsp"},
}
"""Variants that compute with the vendor's library, which the emulator lacks."""
CALLS = 3
"""Slots of an inbox are used again from the third on; the second is ragged."""

Job = tuple[str, Problem, Config]


def jobs(targets: list[str]) -> Iterator[Job]:
    """The default of each variant, and other ways to exchange. Variants without kernels of ours are left out."""
    for target in targets:
        values = space_for(TWO_DIES, hardware(target, 2)).default("push").values
        yield target, TWO_DIES, Config.of("push", values | BY_DIES | {"block_m": 32, "block_n": 32})
        values = space_for(PACKETS, hardware(target, 2)).default("push_packets").values
        yield target, PACKETS, Config.of("push_packets", values | IN_PARTS)
        for words in ("blank", "epoch"):
            in_two: dict[str, Value] = {"words": words, "shots": "two", "block": 128, "num_warps": 2, "per_processor": 1}
            yield target, SUMS, Config.of("two_kernel_words", in_two)
        yield target, SHARED_ROWS, Config.of("one_shot", words="epoch", split=2, num_warps=1, per_processor=1)
        late: dict[str, Value] = {"shots": "two", "owners": "turned", "signals": "late"}
        yield target, SHARED_ROWS, Config.of("push", late, rows=1, ahead=1, num_warps=1, per_processor=1)
        values = space_for(CODES, hardware(target, 2)).default("scaled_fused").values
        yield target, CODES, Config.of("scaled_fused", values | {"loads": "pointer", "quantised": "within"})
        for attention, few in BLOCKS_BY_DIES:
            values = space_for(attention, hardware(target, 2)).default("push").values
            yield target, attention, Config.of("push", values | few)
        for problem in (*PROBLEMS, NARROW) if target == "hip:gfx942" else PROBLEMS:
            space = space_for(problem, hardware(target, problem.world_size))
            for name in space.variants:
                if name in named(problem.op).peers:
                    continue
                if name in LIBRARIES.get(problem.op, ()):
                    continue
                ways = [way for way in ways_to_exchange(space) if way.variant == name]
                for config in dict.fromkeys([space.default(name), *ways]):
                    yield target, problem, config


def run(job: Job, seed: int = 0) -> Outcome:
    """Runs a job. The process must not interpret kernels."""
    target, problem, config = job
    return emulate(problem, config, CALLS, seed, target=target)


def released_without_waiting(listing: str) -> str:
    """Edits a listing into Triton 3.6's form of a release: a write-back right before the atomic, without a wait."""
    without = re.sub(r"\n\s*buffer_wbl2 sc0 sc1[^\n]*", "", listing)
    return re.sub(r"(\n\s*global_atomic_add [^\n]*off(?: offset:\d+)? sc1)", r"\n\tbuffer_wbl2 sc0 sc1\1", without)


def run_without_waiting(job: Job, seed: int) -> Outcome:
    """Like `run`, but no release waits for its write-back."""
    target, problem, config = job
    return emulate(problem, config, CALLS, seed, target=target, edit=released_without_waiting)


def without_write_back(listing: str) -> str:
    """Edits a listing: its increments of counters on the same GPU no longer write back the die's L2."""
    return re.sub(r"\n\s*buffer_wbl2 sc1[^\n]*", "", listing)


def run_without_write_back(job: Job, seed: int) -> Outcome:
    """Like `run`, with a listing edited by `without_write_back`."""
    target, problem, config = job
    return emulate(problem, config, CALLS, seed, target=target, edit=without_write_back)


def faults(job: Job, outcome: Outcome) -> list[str]:
    """Returns the faults of an outcome, a line each."""
    limit = TOLERANCE[job[1].out_dtype]
    wrong = [f"call {number}: error {error:.1e}" for number, error in enumerate(outcome.errors) if not error <= limit]
    return [*wrong, *outcome.notes]


def _keep_compiled(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def pool(folder: str) -> ProcessPoolExecutor:
    """Two processes that compile for AMD and emulate it. The compiler may end its process."""
    return ProcessPoolExecutor(2, get_context("spawn"), initializer=_keep_compiled, initargs=(folder,))


def main(*arguments: str) -> int:
    import triton

    targets = [argument for argument in arguments if argument.startswith("hip:")] or ["hip:gfx942"]
    names = set(arguments).difference(targets)
    chosen = [job for job in jobs(targets) if not names or names & {job[1].op, job[2].variant}]
    print(f"Triton {triton.__version__}, two ranks, seed 0, dies with late write-backs")
    print(f"{'target':11s} {'problem':72s} {'variant':16s} {'calls':>5s} {'greatest error':>15s} {'instructions':>13s} faults")
    bad = 0
    with tempfile.TemporaryDirectory() as folder, pool(os.environ.get("TRITON_CACHE_DIR", folder)) as processes:
        for job, future in [(job, processes.submit(run, job)) for job in chosen]:
            start = f"{job[0]:11s} {job[1]!s:72s} {job[2].variant:16s} {CALLS:5d}"
            try:
                outcome = future.result()
            except Exception as error:
                messages = [f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"]
                print(f"{start} {'-':>15s} {'-':>13s} {'; '.join(messages)}", flush=True)
            else:
                messages = faults(job, outcome)
                print(f"{start} {max(outcome.errors):15.1e} {outcome.instructions:13d} {'; '.join(messages) or 0}", flush=True)
            bad += bool(messages)
    print(f"{len(chosen)} configs, {bad} with faults")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
