"""Rates of reads in orders that know the two halves of Hopper's L2, and in others. One GPU.

    PYTHONPATH=. python results/h200x1/halves.py > results/h200x1/halves.txt

First the cycles of a read are measured for each processor and many lines that are in the L2. If they have two levels, the sign
says in which half a processor is. Then all processors read the same numbers of bytes from pieces of 256 KiB, as programs read
keys and values, and sums are checked:

- `all`: every processor reads all pieces once;
- `halves`: the processors of one half read the even pieces, the others the odd ones, twice each;
- `chance`: the same with two groups of processors that chance has drawn, in neighbouring pairs, which share a path to the L2.
"""

from __future__ import annotations

import random
import statistics

import torch

SOURCE = r"""
#define CHAIN 64

extern "C" __global__ void cycles(const unsigned* lines, int count, int stride, unsigned* taken, unsigned* places) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    places[blockIdx.x] = sm;
    for (int line = 0; line < count; line++) {
        unsigned long long at = (unsigned long long)(lines + (long long)line * stride);
        unsigned value, least = ~0u;
        for (int repeat = 0; repeat < 5; repeat++) {  // the first brings the line
            unsigned began = clock(), ended = 0;
            at += began == 0xfffffff1u ? 4 : 0;  // reads begin after the clock
            for (int read = 0; read < CHAIN; read++) {
                asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
                at += value;  // values are 0: the next read waits for this one
            }
            if (value != 1) ended = clock();  // after the last one
            least = min(least, (ended - began) / CHAIN);
        }
        taken[blockIdx.x * count + line] = least;
    }
}

extern "C" __global__ void reads(
    const uint4* data, int pieces, int width, const int* groups, const int* ranks, int mode, int passes, unsigned* sums
) {
    unsigned sm, sum = 0;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    int group = groups[sm], own = mode ? pieces / 2 : pieces;
    for (int pass = 0; pass < passes * (mode ? 2 : 1); pass++)
        for (int number = 0; number < own; number++) {
            int turn = (number + ranks[sm]) % own, piece = mode ? 2 * turn + group : turn;
            const uint4* at = data + (long long)piece * width;
            for (int i = threadIdx.x; i < width; i += blockDim.x * 4) {
                uint4 v[4];
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                        : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(at + i + j * blockDim.x));
                #pragma unroll
                for (int j = 0; j < 4; j++) sum += v[j].x + v[j].y + v[j].z + v[j].w;
            }
        }
    atomicAdd(sums + sm, sum);
}
"""
LINES, STRIDE = 512, 4096 // 4
PIECE = 256 << 10
"""Bytes of a piece."""
SIZES = (8, 16, 24, 28, 32, 36, 40, 48, 56, 64, 96)
"""MiB of all pieces."""
THREADS, SHARED, ROUNDS = 1024, 120 << 10, 15
"""So much shared memory leaves room for one program on each processor."""


def kernel_of(name: str) -> torch.cuda._utils._CudaKernel:
    kernel = torch.cuda._compile_kernel(SOURCE, name)
    kernel.set_shared_memory_config(SHARED)
    return kernel


def halves(processors: int) -> tuple[dict[int, int], list[float]]:
    """Each processor's half, and the correlation of its cycles with those of the first processor, whose sign tells the half."""
    lines = torch.zeros(LINES * STRIDE, dtype=torch.int32, device="cuda")
    taken = torch.zeros(processors, LINES, dtype=torch.int32, device="cuda")
    places = torch.zeros(processors, dtype=torch.int32, device="cuda")
    cycles = kernel_of("cycles")
    for _ in range(2):
        cycles((processors, 1, 1), (1, 1, 1), (lines, LINES, STRIDE, taken, places), SHARED)
    torch.cuda.synchronize()
    assert len(set(places.tolist())) == processors, "several programs were on one processor"
    by_line = taken.float()
    print(f"cycles of a read: {by_line.quantile(0.05):.0f} (5 %), {by_line.median():.0f}, {by_line.quantile(0.95):.0f} (95 %)")
    centred = by_line - by_line.mean(1, keepdim=True)
    centred = centred - centred.mean(0, keepdim=True)
    alike = torch.corrcoef(centred)[0]
    return dict(zip(places.tolist(), (alike < 0).int().tolist(), strict=True)), alike.tolist()


def main() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    group_of, alike = halves(processors)
    sides = [sum(side == which for side in group_of.values()) for which in (0, 1)]
    print(f"processors by half: {sides[0]} and {sides[1]}; correlations with the first: "
          f"{min(alike):.2f} to {max(alike):.2f}, {sum(abs(a) < 0.2 for a in alike)} of {processors} below 0.2")
    drawn = [pair % 2 for pair in range(processors // 2)]
    random.Random(0).shuffle(drawn)
    by_chance = {sm: drawn[sm // 2] for sm in range(processors)}
    sums = torch.zeros(processors, dtype=torch.int32, device="cuda")
    reads = kernel_of("reads")
    print("MiB | all, TB/s | halves | chance | halves over all | over chance")
    for size in SIZES:
        pieces = (size << 20) // PIECE
        data = torch.randint(-(2**31), 2**31 - 1, ((size << 20) // 4,), dtype=torch.int32, device="cuda")
        passes = max(1, 192 // size)
        ways = {"all": (group_of, 0), "halves": (group_of, 1), "chance": (by_chance, 1)}
        parts = data.view(pieces, -1).sum(1, dtype=torch.int64)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name in random.Random(number).sample(sorted(ways), len(ways)):
                groups, mode = ways[name]
                of = torch.tensor([groups[sm] for sm in range(processors)], dtype=torch.int32, device="cuda")
                members: dict[int, int] = {}
                turns = []
                for sm in range(processors):  # members of a group begin at pieces that are spread evenly
                    which = groups[sm] if mode else 0
                    count = list(groups.values()).count(which) if mode else processors
                    turns.append(members.get(which, 0) * (pieces // (2 if mode else 1)) // count)
                    members[which] = members.get(which, 0) + 1
                ranks = torch.tensor(turns, dtype=torch.int32, device="cuda")
                sums.zero_()
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                reads((processors, 1, 1), (THREADS, 1, 1), (data, pieces, PIECE // 16, of, ranks, mode, passes, sums), SHARED)
                ended.record()
                torch.cuda.synchronize()
                for sm in range(processors):
                    right = parts.sum() if not mode else 2 * parts[groups[sm] :: 2].sum()
                    assert (int(right) * passes - int(sums[sm])) % 2**32 == 0, "a program read other bytes"
                if number:
                    times[name].append(began.elapsed_time(ended))
        rates = {name: processors * passes * (size << 20) / statistics.median(ms) / 1e9 for name, ms in times.items()}
        over = " | ".join(f"{rates['halves'] / rates[other]:.2f}" for other in ("all", "chance"))
        print(f"{size} | {rates['all']:.2f} | {rates['halves']:.2f} | {rates['chance']:.2f} | {over}")


if __name__ == "__main__":
    main()
