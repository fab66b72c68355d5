# ruff: noqa - as it ran
"""Rings of copies by the engines, with and without a barrier of the ranks between hops."""

import ctypes, json, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed._symmetric_memory as symm
from autotax.heap.base import without_multicast


def main(rank, world, out):
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613")
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    rt = ctypes.CDLL([l.split()[-1] for l in open("/proc/self/maps") if "libcudart" in l][0])
    MAX = 16 << 20
    with without_multicast():
        inbox = symm.empty((world * MAX,), dtype=torch.bfloat16, device=f"cuda:{rank}")
        h = symm.rendezvous(inbox, dist.group.WORLD.group_name)
    ptrs = [int(p) for p in h.buffer_ptrs]
    src = torch.randn(MAX, device="cuda", dtype=torch.bfloat16)

    def to(hop, n):
        p = (rank + hop) % world
        assert (
            rt.cudaMemcpyAsync(
                ctypes.c_void_p(ptrs[p] + rank * n * 2),
                ctypes.c_void_p(src.data_ptr()),
                ctypes.c_size_t(n * 2),
                4,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            == 0
        )

    def forward(step, n):  # a true ring: what came last goes on to the next
        p = (rank + 1) % world
        s = (rank - step) % world
        a = src.data_ptr() if step == 0 else ptrs[rank] + s * n * 2
        assert (
            rt.cudaMemcpyAsync(
                ctypes.c_void_p(ptrs[p] + s * n * 2),
                ctypes.c_void_p(a),
                ctypes.c_size_t(n * 2),
                4,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            == 0
        )

    def ring(n):
        [to(hop, n) for hop in (1, 2, 3)]

    def ring_start(n):
        h.barrier()
        ring(n)

    def ring_sync(n):
        for hop in (1, 2, 3):
            h.barrier()
            to(hop, n)

    def xor_sync(n):
        for x in (1, 2, 3):
            h.barrier()
            to(((rank ^ x) - rank) % world, n)

    def ring_forward(n):
        for step in (0, 1, 2):
            forward(step, n)

    def same(n):
        [to(1, n) for _ in range(3)]

    def barrier(n):
        h.barrier()

    side = torch.cuda.Stream()
    gm = {"8192x1536x4096": (8192, 1536, 4096), "2048x2560x8192": (2048, 2560, 8192)}
    mats = {
        k: (
            torch.randn(m, kk, device="cuda", dtype=torch.bfloat16),
            torch.randn(n, kk, device="cuda", dtype=torch.bfloat16),
            torch.empty(m, n, device="cuda", dtype=torch.bfloat16),
        )
        for k, (m, n, kk) in gm.items()
    }

    def timed(f, reps=10, beside=None):
        for _ in range(3):
            f()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(reps):
                f()
        g.replay()
        torch.cuda.synchronize()
        ts = []
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            h.barrier()
            if beside:
                x, w, c = mats[beside]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(20):
                        torch.mm(x, w.T, out=c)
            a.record()
            g.replay()
            b.record()
            torch.cuda.synchronize()
            ts.append(a.elapsed_time(b) * 1e3 / reps)
        t = torch.tensor([sorted(ts)[2]], device="cuda")
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.item()

    rows = []
    for beside in (None, "8192x1536x4096", "2048x2560x8192"):
        for mib in (16, 8, 4):
            n = mib << 19
            for name, f in (
                ("same", same),
                ("ring", ring),
                ("ring_start", ring_start),
                ("ring_sync", ring_sync),
                ("xor_sync", xor_sync),
                ("ring_forward", ring_forward),
                ("barrier", barrier),
            ):
                us = timed(lambda: f(n), beside=beside)
                if rank == 0:
                    rows.append(dict(beside=beside, mib=mib, way=name, us=round(us, 1), GBs=round(3 * n * 2 / us / 1e3)))
                    print(rows[-1], flush=True)
    if rank == 0:
        json.dump(rows, open(out + "/links2.json", "w"), indent=1)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(main, args=(4, sys.argv[1]), nprocs=4)
