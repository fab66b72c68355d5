# ruff: noqa - as it ran
"""Engines and programs: how fast four shards go round, alone and beside a product."""

import ctypes, json, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed._symmetric_memory as symm
import triton, triton.language as tl
from autotax.heap.base import without_multicast


@triton.jit
def push_kernel(src, bases, rank, size, per, WORLD: tl.constexpr, BLOCK: tl.constexpr, HINT: tl.constexpr):
    """each program its part, every block to all peers"""
    pid = tl.program_id(0)
    at = pid * per
    end = tl.multiple_of(tl.minimum(at + per, size), 1024)
    own = tl.load(bases + rank)
    for c in range(at, end, BLOCK):
        o = tl.multiple_of(c, 1024) + tl.arange(0, BLOCK)
        x = tl.load(src + o, mask=o < end)
        for hop in tl.static_range(1, WORLD):
            far = tl.load(bases + (rank + hop) % WORLD)
            there = far.to(tl.pointer_type(tl.bfloat16)) + rank * size + o
            tl.store(tl.multiple_of(there, (16,)), x, mask=o < end, cache_modifier=HINT)


@triton.jit
def push_ring(src, bases, rank, size, per, WORLD: tl.constexpr, BLOCK: tl.constexpr, HINT: tl.constexpr):
    """each program its part, peer after peer"""
    pid = tl.program_id(0)
    at = pid * per
    end = tl.multiple_of(tl.minimum(at + per, size), 1024)
    for hop in range(1, WORLD):
        far = tl.load(bases + (rank + hop) % WORLD)
        for c in range(at, end, BLOCK):
            o = tl.multiple_of(c, 1024) + tl.arange(0, BLOCK)
            x = tl.load(src + o, mask=o < end)
            there = far.to(tl.pointer_type(tl.bfloat16)) + rank * size + o
            tl.store(tl.multiple_of(there, (16,)), x, mask=o < end, cache_modifier=HINT)


@triton.jit
def push_tma(src, bases, rank, size, per_rows, WORLD: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """the shard as [size / C, C]; each program per_rows of its rows, every block to all peers by TMA stores"""
    pid = tl.program_id(0)
    rows = size // C
    mine = tl.make_tensor_descriptor(src, [rows, C], [C, 1], [R, C])
    p1 = (tl.load(bases + (rank + 1) % WORLD).to(tl.pointer_type(tl.bfloat16))) + rank * size
    p2 = (tl.load(bases + (rank + 2) % WORLD).to(tl.pointer_type(tl.bfloat16))) + rank * size
    p3 = (tl.load(bases + (rank + 3) % WORLD).to(tl.pointer_type(tl.bfloat16))) + rank * size
    d1 = tl.make_tensor_descriptor(tl.multiple_of(p1, (16,)), [rows, C], [C, 1], [R, C])
    d2 = tl.make_tensor_descriptor(tl.multiple_of(p2, (16,)), [rows, C], [C, 1], [R, C])
    d3 = tl.make_tensor_descriptor(tl.multiple_of(p3, (16,)), [rows, C], [C, 1], [R, C])
    for r in tl.range(pid * per_rows, tl.minimum((pid + 1) * per_rows, rows), R, num_stages=2):
        x = mine.load([r, 0])
        d1.store([r, 0], x)
        d2.store([r, 0], x)
        d3.store([r, 0], x)


def main(rank, world, out):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    rt = ctypes.CDLL([l.split()[-1] for l in open("/proc/self/maps") if "libcudart" in l][0])
    MAX = 32 << 20  # elements of a shard
    with without_multicast():
        inbox = symm.empty((world * MAX,), dtype=torch.bfloat16, device=f"cuda:{rank}")
        h = symm.rendezvous(inbox, dist.group.WORLD.group_name)
    bases = torch.tensor([int(p) for p in h.buffer_ptrs], dtype=torch.int64, device="cuda")
    ptrs = [int(p) for p in h.buffer_ptrs]
    src = torch.randn(MAX, device="cuda", dtype=torch.bfloat16)
    results = []

    def raw(dst, s, nbytes, stream):
        assert (
            rt.cudaMemcpyAsync(
                ctypes.c_void_p(dst), ctypes.c_void_p(s), ctypes.c_size_t(nbytes), 4, ctypes.c_void_p(stream.cuda_stream)
            )
            == 0
        )

    def peercopy(dst, dd, s, sd, nbytes, stream):
        assert (
            rt.cudaMemcpyPeerAsync(
                ctypes.c_void_p(dst), dd, ctypes.c_void_p(s), sd, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream.cuda_stream)
            )
            == 0
        )

    streams = [torch.cuda.Stream() for _ in range(12)]

    def forked(lanes, per_lane):
        cur = torch.cuda.current_stream()
        for i in range(lanes):
            streams[i].wait_stream(cur)
            per_lane(i, streams[i])
        for i in range(lanes):
            cur.wait_stream(streams[i])

    def to(hop, n, off, cnt, stream, pull=False):
        p = (rank + hop) % world
        if pull:
            raw(ptrs[rank] + (p * n + off) * 2, ptrs[p] + (p * n + off) * 2, cnt * 2, stream)
        else:
            raw(ptrs[p] + (rank * n + off) * 2, src.data_ptr() + off * 2, cnt * 2, stream)

    def w_pair(n):
        if rank == 0:
            to(1, n, 0, n, torch.cuda.current_stream())

    def w_exchange(n):
        p = rank ^ 1
        raw(ptrs[p] + rank * n * 2, src.data_ptr(), n * 2, torch.cuda.current_stream())

    def w_ring1(n):
        to(1, n, 0, n, torch.cuda.current_stream())

    def w_ring(n):
        for hop in (1, 2, 3):
            to(hop, n, 0, n, torch.cuda.current_stream())

    def w_par(n):
        forked(3, lambda i, s: to(i + 1, n, 0, n, s))

    def w_pull(n):
        forked(3, lambda i, s: to(i + 1, n, 0, n, s, True))

    def w_six(n):
        forked(6, lambda i, s: to(i % 3 + 1, n, (i // 3) * (n // 2), n // 2, s))

    def w_twelve(n):
        forked(12, lambda i, s: to(i % 3 + 1, n, (i // 3) * (n // 4), n // 4, s))

    def w_ring_halves(n):  # one peer at a time, two engines on it
        def lane(i, s):
            for hop in (1, 2, 3):
                to(hop, n, i * (n // 2), n // 2, s)

        forked(2, lane)

    def w_ring_quarters(n):
        def lane(i, s):
            for hop in (1, 2, 3):
                to(hop, n, i * (n // 4), n // 4, s)

        forked(4, lane)

    def w_chunks(n, c=8):
        for i in range(c):
            for hop in (1, 2, 3):
                to(hop, n, i * (n // c), n // c, torch.cuda.current_stream())

    def w_pushpull(n):  # half pushed, half pulled
        def lane(i, s):
            for hop in (1, 2, 3):
                to(hop, n, i * (n // 2), n // 2, s, i == 1)

        forked(2, lane)

    def w_peer(n):
        for hop in (1, 2, 3):
            p = (rank + hop) % world
            peercopy(ptrs[p] + rank * n * 2, p, src.data_ptr(), rank, n * 2, torch.cuda.current_stream())

    def prog(kernel, comm, warps, block, hint=""):
        def f(n):
            per = triton.cdiv(n, comm * 1024) * 1024
            kernel[(comm,)](src, bases, rank, n, per, WORLD=world, BLOCK=block, HINT=hint, num_warps=warps)

        return f

    def tma(comm, R, warps):
        def f(n):
            per = triton.cdiv(n // 256, comm * R) * R
            push_tma[(comm,)](src, bases, rank, n, per, WORLD=world, R=R, C=256, num_warps=warps)

        return f

    ways = {
        "tma8": (tma(8, 64, 8), 3),
        "tma16": (tma(16, 64, 8), 3),
        "tma32": (tma(32, 64, 8), 3),
        "tma16s": (tma(16, 32, 4), 3),
        "pair": (w_pair, 1),
        "exchange": (w_exchange, 1),
        "ring1": (w_ring1, 1),
        "ring": (w_ring, 3),
        "par": (w_par, 3),
        "pull": (w_pull, 3),
        "six": (w_six, 3),
        "twelve": (w_twelve, 3),
        "ring_halves": (w_ring_halves, 3),
        "ring_quarters": (w_ring_quarters, 3),
        "chunks": (w_chunks, 3),
        "pushpull": (w_pushpull, 3),
        "peer": (w_peer, 3),
        "prog8": (prog(push_kernel, 8, 16, 16384), 3),
        "prog16": (prog(push_kernel, 16, 16, 16384), 3),
        "prog32": (prog(push_kernel, 32, 16, 16384), 3),
        "progring16": (prog(push_ring, 16, 16, 16384), 3),
        "progring32": (prog(push_ring, 32, 16, 16384), 3),
        "prog16wt": (prog(push_kernel, 16, 16, 16384, ".wt"), 3),
        "prog16cs": (prog(push_kernel, 16, 16, 16384, ".cs"), 3),
    }
    gm = {"8192x1536x4096": (8192, 1536, 4096), "2048x2560x8192": (2048, 2560, 8192), "8192x3584x4096": (8192, 3584, 4096)}
    mats = {
        k: (
            torch.randn(m, kk, device="cuda", dtype=torch.bfloat16),
            torch.randn(n, kk, device="cuda", dtype=torch.bfloat16),
            torch.empty(m, n, device="cuda", dtype=torch.bfloat16),
        )
        for k, (m, n, kk) in gm.items()
    }
    side = torch.cuda.Stream()

    def timed(f, reps=10, graph=True, beside=None):
        torch.cuda.synchronize()
        dist.barrier()
        g = None

        def body():
            for _ in range(reps):
                f()

        body()
        torch.cuda.synchronize()
        if graph:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                body()
            g.replay()
            torch.cuda.synchronize()
        ts, gts = [], []
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            h.barrier()
            if beside:
                x, w, c = mats[beside]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    ea, eb = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    ea.record()
                    nn = max(1, int(reps * beside_us / gemm_us[beside])) if False else 20
                    for _ in range(nn):
                        torch.mm(x, w.T, out=c)
                    eb.record()
            a.record()
            (g.replay() if graph else body())
            b.record()
            torch.cuda.synchronize()
            ts.append(a.elapsed_time(b) * 1e3 / reps)
            if beside:
                gts.append(ea.elapsed_time(eb) * 1e3 / nn)
        t = torch.tensor([sorted(ts)[2], sorted(gts)[2] if gts else 0.0], device="cuda")
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.tolist()

    def report(name, n, parts, t, note=""):
        if rank == 0:
            rate = n * 2 * parts / t[0] / 1e3
            row = dict(way=name, mib=n * 2 / 2**20, us=round(t[0], 1), GBs=round(rate), gemm_us=round(t[1], 1), note=note)
            results.append(row)
            print(row, flush=True)

    for x in mats:
        t = timed(lambda: torch.mm(mats[x][0], mats[x][1].T, out=mats[x][2]))
        if rank == 0:
            print("cublas", x, round(t[0], 1), flush=True)
    for mib in (16, 4):
        n = mib << 19
        for name, (w, parts) in ways.items():
            try:
                t = timed(lambda: w(n))
            except Exception as e:
                if rank == 0:
                    print(name, repr(e)[:200], flush=True)
                continue
            report(name, n, parts, t)
    n = 16 << 19
    for name in ("ring", "par"):
        report(name, n, 3, timed(lambda: ways[name][0](n), graph=False), "eager")
    for shape in ("8192x1536x4096", "2048x2560x8192"):
        n = (16 if shape[0] == "8" else 8) << 19
        for name in (
            "none",
            "ring",
            "par",
            "ring_halves",
            "ring_quarters",
            "chunks",
            "twelve",
            "pull",
            "prog8",
            "prog16",
            "prog32",
            "progring16",
            "prog16cs",
            "prog16wt",
            "tma16",
            "tma32",
        ):
            if name == "none":
                report(name, n, 0, timed(lambda: src[:8].add_(0), beside=shape), "beside " + shape)
                continue
            try:
                t = timed(lambda: ways[name][0](n), beside=shape)
            except Exception as e:
                if rank == 0:
                    print(name, repr(e)[:200], flush=True)
                continue
            report(name, n, ways[name][1], t, "beside " + shape)
    # correctness of one way: what has arrived
    n = 4 << 19
    inbox.zero_()
    torch.cuda.synchronize()
    dist.barrier()
    src.fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    ways["chunks"][0](n)
    torch.cuda.synchronize()
    dist.barrier()
    ok = all(bool((inbox[p * n : (p + 1) * n] == p + 1).all()) for p in range(world) if p != rank)
    if rank == 0:
        print("arrived", ok)
        json.dump(results, open(out + "/links.json", "w"), indent=1)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(main, args=(4, sys.argv[1]), nprocs=4)
