"""How long one GPU takes to read the KV cache of a rank, and to attend to it: what no exchange can be faster than.

    for i in $(seq 0 14); do python results/h200x2/steps/read.py $i 15 & done; wait     # compiles, in 15 processes
    python results/h200x2/steps/read.py

A plain kernel that sums 8 heads of K and V up, and the split kernel of every variant, in graphs whose inputs rotate through
more than the L2. Microseconds a call with the launch; the three or four fastest ways of each.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[3]))

from autotax.kernels.flash_decode.attention import split_kernel

TOKENS = (2048, 4096, 16384)
READS = list(product((2048, 4096, 8192), (4, 8, 16), (1, 3, 5, None)))
"""Elements a block, warps, stages; None for a loop that is unrolled."""
SPLITS = [
    (splits, block, warps, stages)
    for splits, block, warps, stages in product((8, 16, 32, 64), (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 5))
    if 512 * block * stages < 225_000 and warps <= max(2, block // 8) and (block, warps) != (128, 1) and splits * block >= 512
]


@triton.jit
def read_kernel(k, v, out, per, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, per, BLOCK, num_stages=STAGES):
        here = program * per + at + lanes
        acc += tl.load(k + here).to(tl.float32) + tl.load(v + here).to(tl.float32)
    tl.store(out + program, tl.sum(acc))


@triton.jit
def read_at_once(k, v, out, PER: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for at in tl.static_range(0, PER, BLOCK):
        here = program * PER + at + lanes
        acc += tl.load(k + here).to(tl.float32) + tl.load(v + here).to(tl.float32)
    tl.store(out + program, tl.sum(acc))


def read(programs: int, kv: list[torch.Tensor], out: torch.Tensor, block: int, warps: int, stages: int | None) -> None:
    per = kv[0].numel() // programs
    if stages is None:
        read_at_once[(programs,)](*kv, out, per, block, num_warps=warps)
    else:
        read_kernel[(programs,)](*kv, out, per, block, stages, num_warps=warps)


def attend(q: torch.Tensor, kv: list[torch.Tensor], lengths: torch.Tensor, out: list[torch.Tensor], way: tuple[int, ...]) -> None:
    splits, block, warps, stages = way
    split_kernel[(8 * splits,)](
        q, *kv, lengths, None, *out, 8, 64, kv[0].numel() // 1024, 0.1,
        GROUP=8, HEAD_DIM=128, SPLITS=splits, SPLIT_FIRST=False, CHIPLETS=1, BLOCK_G=16, BLOCK_D=128, BLOCK_S=block,
        PAGE=0, SHARE=0, WARPS=0, TARGET="cuda", num_warps=warps, num_stages=stages,
    )  # fmt: skip


def timed(call: Callable[[int], Any], sets: int, calls: int = 40) -> float:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    us = []
    for _ in range(12):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        us.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(us)


def measure(tokens: int, sets: int) -> None:
    elements = 8 * tokens * 128
    kv = [[torch.randn(elements, device="cuda").to(torch.bfloat16) for _ in range(2)] for _ in range(sets)]
    print(f"== {tokens} tokens, {4 * elements / 1e6:.1f} MB in {sets} sets; at 4.2 TB/s {4 * elements / 4.2e6:.2f}")
    sums = torch.zeros(512, device="cuda")
    for programs in (128, 256, 512):
        found = []
        for block, warps, stages in READS:
            per = elements // programs
            if block > per or (stages is None and per > 16 * block):
                continue
            us = timed(lambda i, n=programs, way=(block, warps, stages): read(n, kv[i], sums, *way), sets)  # type: ignore[misc]
            found.append((us, f"block {block} warps {warps} stages {stages}"))
        print(f"   read by {programs} programs:", "; ".join(f"{name} {us:.2f}" for us, name in sorted(found)[:3]))
    q = torch.randn(64, 128, device="cuda").to(torch.bfloat16)
    lengths = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
    out = [torch.empty(64, 64, 128, device="cuda"), torch.empty(64, 64, device="cuda")]
    best: dict[int, list[tuple[float, str]]] = {}
    for way in SPLITS:
        if way[0] * way[1] <= tokens:
            us = timed(lambda i, way=way: attend(q, kv[i], lengths, out, way), sets)  # type: ignore[misc]
            best.setdefault(way[0], []).append((us, "block {} warps {} stages {}".format(*way[1:])))
    for splits, rows in best.items():
        print(f"   attend, {splits} splits:", "; ".join(f"{name} {us:.2f}" for us, name in sorted(rows)[:4]), flush=True)


def compile_share(place: int, processes: int) -> None:
    """Runs every kernel of this process's share once, on little memory."""
    few = torch.zeros(1 << 24, device="cuda", dtype=torch.bfloat16)
    out, lengths = torch.zeros(1 << 22, device="cuda"), torch.full((1,), 64, dtype=torch.int32, device="cuda")
    for way in SPLITS[place::processes]:
        with suppress(RuntimeError):
            attend(few, [few[: 2048 * 1024]] * 2, lengths, [out, out], way)
    for block, warps, stages in READS[place::processes]:
        with suppress(RuntimeError):
            read(128, [few[: 128 * 16384]] * 2, out, block, warps, stages)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_share(int(sys.argv[1]), int(sys.argv[2]))
    else:
        for tokens in TOKENS:
            measure(tokens, max(4, math.ceil(180e6 / (4096 * tokens))))
