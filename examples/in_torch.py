"""A tensor-parallel layer and decode attention in torch, on tuned kernels where the database has some.

    torchrun --nproc-per-node 4 examples/in_torch.py          # one process a GPU
    torchrun --nproc-per-node 2 examples/in_torch.py          # without a GPU: two CPU ranks

Prints what each module runs for each size, and compares both with torch.
"""

import os

import torch
import torch.distributed as dist

import autotax

GPU = torch.cuda.is_available()
N, K = (7168, 8192) if GPU else (96, 64)  # columns of this rank, inner size
Q_HEADS, KV_HEADS, HEAD_DIM, KV_LEN = (64, 8, 128, 8192) if GPU else (8, 2, 16, 64)
DTYPE = torch.bfloat16 if GPU else torch.float32


def main() -> None:
    """Runs on every rank of the job."""
    if "RANK" not in os.environ:
        raise SystemExit(f"no launcher has set RANK; start it so:\n\n{__doc__}")
    dist.init_process_group("nccl" if GPU else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    group = dist.group.WORLD
    made = torch.Generator().manual_seed(0)  # the same on all ranks

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=made).to(device, DTYPE)

    weight, rows = random(N, K), random(128 * ranks, K)
    q = random(2, Q_HEADS, HEAD_DIM)
    keys, values = (random(2, KV_HEADS, KV_LEN, HEAD_DIM) for _ in range(2))

    # Collective: the ranks look up their configs, agree, allocate and compile.
    layer = autotax.nn.AllGatherLinear(weight, group=group, max_m=128 * ranks)
    sizes = {"kv_heads": KV_HEADS, "q_heads": Q_HEADS, "head_dim": HEAD_DIM, "max_batch": 2, "max_kv_len": KV_LEN}
    attend = autotax.nn.FlashDecode(**sizes, group=group, dtype=DTYPE, device=device)
    if rank == 0:
        for module in (layer, attend):
            for choice in module.choices:
                print(type(module).__name__, choice.problem.key, "runs", choice.config or "bulk-synchronous")

    with torch.no_grad():
        # This rank's rows go in, the rows of all ranks times its columns come out.
        y = layer(rows[128 * rank : 128 * (rank + 1)])
        # Each rank holds some tokens of every sequence; every rank gets all heads.
        share = KV_LEN // ranks
        part = slice(share * rank, share * (rank + 1))
        lengths = torch.full((2,), share, dtype=torch.int32, device=device)
        o = attend(q, keys[:, :, part].contiguous(), values[:, :, part].contiguous(), lengths)

    whole = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
    for name, got, expected in (("layer", y, rows @ weight.T), ("attention", o, whole)):
        error = float((got.float() - expected.float()).norm() / expected.float().norm())
        assert error < 1e-2, f"rank {rank}: {name} is off by {error:.1e}"
        if rank == 0:
            print(f"{name}: {tuple(got.shape)}, relative error {error:.1e}")
    attend.close()
    layer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
