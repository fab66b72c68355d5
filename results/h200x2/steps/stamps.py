"""Where the time of `resident` goes: its kernel with the clock read between the phases.

    python results/h200x2/steps/stamps.py

Each program writes %globaltimer (steps of 0.25 us on these machines) at ten points, the later ones only when the values of the
phase are there. Calls are made as the runner times them: in one graph, their inputs rotating; the first is verified. Times are
microseconds after the first program of a call has begun, medians over the calls of a replay. Before that, what a launch
costs in a graph: kernels of 132 programs that load and store one word, launched in every way.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

sys.path[:0] = [str(Path(__file__).parents[2] / "runtime"), str(Path(__file__).parents[3])]

from ranks import on_ranks  # noqa: E402

from autotax import FlashDecode  # noqa: E402
from autotax.config import Config, Value  # noqa: E402
from autotax.hardware import detect  # noqa: E402
from autotax.heap import World, open_heap  # noqa: E402
from autotax.kernels.context import Context  # noqa: E402
from autotax.kernels.flash_decode.attention import places, work_of  # noqa: E402
from autotax.kernels.flash_decode.exchange import distances, push_result, receive_result  # noqa: E402
from autotax.kernels.flash_decode.ll_packets import merge_words, store_words  # noqa: E402
from autotax.kernels.flash_decode.resident import Resident  # noqa: E402
from autotax.kernels.flash_decode.shapes import inputs_of  # noqa: E402
from autotax.kernels.primitives import LIMIT, dot  # noqa: E402
from autotax.operators.expected import relative_error  # noqa: E402
from autotax.problem import power_of_two  # noqa: E402
from autotax.runner.inputs import InputCache  # noqa: E402
from autotax.spaces import space_for  # noqa: E402

POINTS = ("begins", "epoch", "length", "first block", "attended", "splits stored", "splits merged", "pushed", "ranks merged")
POINTS += ("ends",)
CALLS, KEPT = 24, 64
SHAPES = ((1, 64, 8192), (1, 64, 32768), (4, 64, 32768))


@triton.jit
def stamp(stamps, point: tl.constexpr, value):
    """The time when `value` is there."""
    bits = value.to(tl.int32)
    now = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0x7abcdef1; mov.u64 $0, 0; @p mov.u64 $0, %globaltimer; }",
        "=l,r", [bits], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(stamps + point, now)


@triton.jit
def attend(
    q, k, v, lengths, item, split, kv_heads, shard_len, scale, stamps,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`attention.attend` of a cache in one piece."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    length = tl.load(lengths + item // kv_heads)
    per = tl.cdiv(tl.cdiv(length, BLOCK_S), SPLITS) * BLOCK_S
    start = split * per
    end = tl.minimum(start + per, length)
    stamp(stamps, 2, end)
    rows = item * GROUP + g
    query = tl.load(q + rows[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    cache = item.to(tl.int64) * shard_len * HEAD_DIM
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        offsets = cache + token.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        inside = (token < end)[:, None]
        keys = tl.load(k + offsets, mask=inside, other=0.0)
        scores = dot(query, keys.T, tl.zeros([BLOCK_G, BLOCK_S], tl.float32), TARGET) * scale
        scores = tl.where((token < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        if at == start:
            stamp(stamps, 3, tl.max(new_top))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        values = tl.load(v + offsets, mask=inside, other=0.0)
        acc = dot(weights, values, acc * shrink[:, None], TARGET)
        totals = totals * shrink[:, None] + weights
        top = new_top
    total = tl.sum(totals, 1)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    return o, lse


@triton.jit(do_not_specialize=["rank"])
def stamped_kernel(
    q, k, v, lengths, out, splits, inbox, bases, control, epochs, stamps,
    rank, items, kv_heads, rows, arriving, shard_len, scale,
    WORLD: tl.constexpr, LL: tl.constexpr, PAYLOAD: tl.constexpr, CHUNK: tl.constexpr, SPLIT_CHUNK: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, SPLIT_FIRST: tl.constexpr, CHIPLETS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SHARE: tl.constexpr, EARLY: tl.constexpr, KEPT: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = BLOCK_D // PARTS
    SENT: tl.constexpr = PART if tl.float32 == PAYLOAD else PART // 2
    begun = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    limit = tl.load(control + LIMIT)
    away = distances(bases, rank, WORLD)
    stamps += ((epoch % KEPT) * programs + program) * 10
    tl.store(stamps, begun)
    stamp(stamps, 1, epoch)
    for work in tl.range(program, items * SPLITS, programs, num_stages=1):
        item, split = work_of(tl.cast(work, tl.int32), items, SPLITS, SPLIT_FIRST, CHIPLETS)
        o, lse = attend(
            q, k, v, lengths, item, split, kv_heads, shard_len, scale, stamps,
            GROUP, HEAD_DIM, SPLITS, BLOCK_G, BLOCK_D, BLOCK_S, TARGET,
        )  # fmt: skip
        stamp(stamps, 4, tl.max(lse) + tl.max(tl.max(o, 0), 0))
        at = places(split.to(tl.int64) * rows, item, kv_heads, rows, GROUP, BLOCK_G, SHARE)
        store_words(o, lse, splits, at, epoch, tl.float32, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D)
        stamp(stamps, 5, epoch)
    for block in tl.range(program, rows // HEADS * PARTS, programs, num_stages=1):
        first, part = block // PARTS * HEADS, block % PARTS
        merged, merged_lse = merge_words(
            splits + part * PART, tl.cast(first, tl.int64), rows, epoch, rank, control, limit,
            False, tl.float32, SPLITS, SPLIT_CHUNK, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
        stamp(stamps, 6, tl.max(tl.max(merged_lse, 0), 0) + tl.max(tl.max(merged, 0), 0))
        push_result(
            merged, merged_lse, first, inbox + part * SENT, None, None, bases, away, epoch, rank, arriving,
            WORLD, LL, PAYLOAD, SHARE > 0, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
        stamp(stamps, 7, epoch)
    for block in tl.range(program, arriving // HEADS * PARTS, programs, num_stages=1):
        first, part = block // PARTS * HEADS, block % PARTS
        receive_result(
            out + part * PART, first, inbox + part * SENT, None, None, control, limit, epoch, rank, arriving,
            WORLD, LL, PAYLOAD, CHUNK, HEADS, HEADS, HEAD_DIM, BLOCK_H, PART, TARGET,
        )  # fmt: skip
        stamp(stamps, 8, epoch)
    tl.debug_barrier()
    tl.store(epochs + program, epoch + 1)
    stamp(stamps, 9, epoch)


class Stamped(Resident):
    def __init__(self, problem: FlashDecode, config: Config, context: Context) -> None:
        super().__init__(problem, config, context)
        self.stamps = torch.zeros((KEPT, self.programs, len(POINTS)), dtype=torch.int64, device=context.heap.slab.device)

    def __call__(self, *tensors: torch.Tensor) -> None:
        problem, context, shapes, inbox = self.problem, self.context, self.shapes, self.inbox
        inputs, out = inputs_of(tensors)
        attend = {name: value for name, value in shapes.attend.items() if name not in ("PAGE", "WARPS")}
        context.launch(
            stamped_kernel,
            (self.programs,),
            *inputs[:4], out, self.splits, inbox.o, context.heap.bases, self.control, self.epochs, self.stamps,
            context.rank, shapes.items, problem.kv_heads, shapes.rows, shapes.arriving, problem.shard_len, shapes.scale,
            WORLD=problem.world_size, HEADS=shapes.heads, BLOCK_H=power_of_two(shapes.heads), KEPT=KEPT,
            **self.merge, **inbox.receive, **attend, **self.options,
        )  # fmt: skip


@triton.jit
def word_kernel(words, WAIT: tl.constexpr):
    if WAIT:
        gdc_wait()
    at = words + tl.program_id(0)
    tl.store(at, tl.load(at) + 1)


def launches() -> list[str]:
    """Microseconds that one more launch of a small kernel takes in a graph."""
    words = torch.zeros(132, dtype=torch.int32, device="cuda")
    told = []
    for cooperative in (False, True):
        for early in (False, True):
            launch = functools.partial(
                word_kernel[(132,)], words, early, num_warps=4, launch_cooperative_grid=cooperative, launch_pdl=early
            )
            graphs = captured(launch, 20), captured(launch, 220)
            few, many = (statistics.median(timed(graph) for _ in range(30)) for graph in graphs)
            told.append(f"one more launch, {cooperative=!s}, {early=!s}: {(many - few) / 200:.2f} us")
    return told


def captured(call: Any, count: int) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def told_by(operator: Stamped, cache: InputCache, world: World) -> list[str]:
    seeds = [cache.rotation[i % len(cache.rotation)] for i in range(CALLS)]
    first = cache.get(seeds[0])
    with operator.context.rehearsal():
        operator(*first.tensors, first.out)
    world.barrier()
    operator(*first.tensors, first.out)
    world.synchronize()
    error = relative_error(first.out, cache.reference(seeds[0]))
    assert error < 5e-3, error
    calls_made = [(*cache.get(seed).tensors, cache.get(seed).out) for seed in seeds]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in calls_made:
            operator(*tensors)
    us = []
    for _ in range(10):
        world.barrier()
        us.append(timed(graph) / CALLS)
    assert operator.failure() is None, operator.failure()
    last = 1 + CALLS * 10
    calls = [operator.stamps[(last - i) % KEPT].double() / 1e3 for i in range(CALLS - 4, -1, -1)]
    told = [f"   {statistics.median(us):.2f} us a call with stamps"]
    begins = [call[:, 0].min().item() for call in calls]
    ends = [call[:, 9].max().item() for call in calls]
    for point, name in enumerate(POINTS):
        rows = []
        for call, begin in zip(calls, begins, strict=True):
            there = call[call[:, point] >= begin, point] - begin
            rows.append((there.min().item(), there.median().item(), there.max().item()))
        low, middle, high = (statistics.median(column) for column in zip(*rows, strict=True))
        told.append(f"   {name:26} first {low:6.2f}  median {middle:6.2f}  last {high:6.2f}")
    gaps = [begin - end for begin, end in zip(begins[1:], ends[:-1], strict=True)]
    told.append(f"   from the last end to the next begin {statistics.median(gaps):.2f}")
    told.append(f"   from begin to begin {statistics.median(after - before for before, after in itertools.pairwise(begins)):.2f}")
    return told


def measure(world: World) -> list[str]:
    torch.cuda.set_device(world.device)
    hardware = detect()
    told = launches()
    context = Context(world, open_heap(world, 1 << 28), hardware)
    for shape in SHAPES:
        problem = FlashDecode(shape[0], shape[1], 8, 128, shape[2], "bf16", world.size)
        cache = InputCache(problem, world.rank, world.device, hardware)
        usual = space_for(problem, hardware).default("resident").values | {"attend": "by_block"}
        more: dict[str, Value] = {"block_s": 32, "num_warps": 2, "per_processor": 2, "parts": 2}
        more["splits"] = 2 * int(usual["splits"])
        for changes in ({}, {"block_s": 64}, more):
            config = Config.of("resident", usual | changes)
            context.heap.reset()
            operator = Stamped(problem, config, context)
            context.heap.check()
            told += [f"== {problem}: {config}", *told_by(operator, cache, world)]
            world.synchronize()
    return told


if __name__ == "__main__":
    for rank, told in enumerate(on_ranks(measure, 2, "cuda", timeout_s=150)):
        print(f"rank {rank}")
        print("\n".join(told))
