"""Quantising by itself: programs, warps and early launch, as the difference of graphs with and without it."""
import sys, math, torch, triton, triton.language as tl
from autotax.kernels.all_gather_gemm.scaled_shards import quantise_kernel
from statistics import median

def graph(calls):
    for c in calls[:2]: c()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for c in calls: c()
    return g

def timed(gs, n=30):
    out = [[] for _ in gs]
    for _ in range(n):
        for i, g in enumerate(gs):
            s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); s.record(); g.replay(); e.record(); e.synchronize()
            out[i].append(s.elapsed_time(e) * 1e3)
    return [median(o) for o in out]

N = 20
for quant in ("row", "block"):
    for rows, k in ((8, 8192), (128, 8192), (256, 8192), (512, 8192), (1024, 8192), (2048, 8192), (1024, 5120), (4096, 5120)):
        cols = 1 << (k - 1).bit_length()
        groups = {"row": 1, "block": k // 128}[quant]
        xs = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        w = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        v = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16); o = torch.empty(256, 2048, device="cuda", dtype=torch.bfloat16)
        codes = torch.empty(rows, k, device="cuda", dtype=torch.uint8); scales = torch.empty(groups * rows, device="cuda")
        zero = torch.zeros(2, device="cuda", dtype=torch.int64)
        def fill(i): return lambda: torch.mm(v, w[i % 8], out=o)
        def call(i, warps):
            return lambda: quantise_kernel[(rows,)](xs[i % 4], scales, math.inf, codes, scales, zero, rows, groups, k, QUANT=quant, COLS=cols, TARGET="cuda", num_warps=warps)
        options = [(8,), (4,), (16,)]
        gs = [graph([fill(i) for i in range(N)])]
        want = None
        for op in options:
            call(0, *op)(); torch.cuda.synchronize()
            got = (codes.clone(), scales.clone())
            if want is None: want = got
            assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1]), op
            gs.append(graph([f for i in range(N) for f in (fill(i), call(i, *op))]))
        t = timed(gs)
        print(quant, rows, k, "filler %.2f" % (t[0] / N), " ".join(f"{op}: {(x - t[0]) / N:.2f}" for op, x in zip(options, t[1:])), flush=True)
