"""The vendor's attention to a long causal sequence on one GPU: in one call, in squares that are merged, in shares of the heads:

    PYTHONPATH=. python results/h200x1/cuts.py > results/h200x1/cuts.txt

`squares C` attends to C squares along the diagonal, then to those below, and merges the results. `heads C` attends to one C-th
of the heads after the other. Each result is compared with that of the one call. A burst of one way lasts 0.4 s at least. Its
second half counts, for the clocks depend on what ran before. Ways take turns in an order that is drawn anew each round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from autotax.core.problem import power_of_two
from autotax.kernels.gather_attention.vendor import MERGED_ROWS, Partial, attend, attend_part, merge_part_kernel
from autotax.operators.gather_attention import Part

ROUNDS, BURST_S = 5, 0.4
HEAD_DIM = 128
SHAPES = [(32, 4, 131072), (16, 4, 131072), (8, 8, 131072), (64, 8, 65536), (16, 16, 65536), (32, 4, 32768), (8, 8, 32768)]
"""Query heads, KV heads and tokens of a rank with every second head, or of half of a sequence."""
CUTS = (2, 4)


def merge(whole: Partial, result: Partial, first: int) -> None:
    """Merges the result of some queries, from `first` on, into that of all."""
    (o, sums), (more, more_sums) = whole, result
    added, heads = more.shape[1:3]
    grid = added * heads // MERGED_ROWS, len(o)
    constants = {"GROUP": MERGED_ROWS, "HEAD_DIM": HEAD_DIM, "BLOCK_D": power_of_two(HEAD_DIM), "TARGET": "cuda:90"}
    strides = *sums.stride(), *more_sums.stride()
    merge_part_kernel[grid](o, sums, more, more_sums, first, o.shape[1], added, heads, *strides, **constants, num_warps=4)


def in_squares(count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = 0, q.shape[1]
    first, *others = Part(0, tokens, tokens, causal=True).squares(count)
    whole = attend_part("cudnn", first, q, k, v)
    for part in others:
        merge(whole, attend_part("cudnn", part, q, k, v), part.queries[0])
    return whole[0]


def by_heads(count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pieces = zip(*([piece.contiguous() for piece in tensor.chunk(count, 2)] for tensor in (q, k, v)), strict=True)
    return torch.cat([attend("cudnn", *piece, causal=True)[0] for piece in pieces], 2)


def burst(way: Callable[[], Tensor]) -> list[float]:
    """The milliseconds of calls."""
    end, times = time.monotonic() + BURST_S, list[float]()
    while time.monotonic() < end or len(times) < 2:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        way()
        marks[1].record()
        marks[1].synchronize()
        times.append(marks[0].elapsed_time(marks[1]))
    return times[len(times) // 2 :]


def measure(q_heads: int, kv_heads: int, tokens: int) -> None:
    """Prints the milliseconds of each way, the least and the greatest of its bursts, its speed and its difference to one call."""
    q = torch.randn(1, tokens, q_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, tokens, kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ways = {"one call" if count == 1 else f"squares {count}": partial(in_squares, count, q, k, v) for count in (1, *CUTS)}
    ways |= {f"heads {count}": partial(by_heads, count, q, k, v) for count in CUTS}
    right = ways["one call"]().clone()
    differences = {way: (run() - right).abs().max().item() for way, run in ways.items()}
    bursts = {way: list[float]() for way in ways}
    drawn = random.Random(tokens * q_heads)
    for _ in range(ROUNDS):
        for way in drawn.sample(list(ways), len(ways)):
            bursts[way].append(statistics.median(burst(ways[way])))
    print(f"{q_heads}/{kv_heads} heads, {tokens} tokens")
    for way, times in bursts.items():
        ms = statistics.median(times)
        speed = 2 * HEAD_DIM * q_heads * tokens * (tokens + 1) / ms / 1e9
        spread = f"[{min(times):.2f}, {max(times):.2f}]"
        print(f"  {way:10} {ms:8.2f} ms {spread:18} {speed:4.0f} TFLOP/s  differs by {differences[way]:.1e}", flush=True)


if __name__ == "__main__":
    for shape in SHAPES:
        measure(*shape)
