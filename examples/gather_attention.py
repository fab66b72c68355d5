"""Attention over a sequence whose tokens lie on several ranks: torchrun --nproc-per-node 2 examples/gather_attention.py"""

import torch
import torch.distributed as dist

import autotax

GPU = torch.cuda.is_available()
Q_HEADS, KV_HEADS, HEAD_DIM, TOKENS = (64, 8, 128, 8192) if GPU else (4, 2, 16, 64)

dist.init_process_group("nccl" if GPU else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if GPU else torch.device("cpu")
if GPU:
    torch.cuda.set_device(device)
made = torch.Generator().manual_seed(0)  # the same on all ranks
whole = [
    torch.randn(1, TOKENS, heads, HEAD_DIM, generator=made).to(device, torch.bfloat16) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's tokens: one chunk from the front and one from the back, so that all ranks have equal work."""
    chunks = tensor.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


# Collective: the ranks look up their configs, agree, allocate and compile.
attend = autotax.nn.GatherAttention(KV_HEADS, Q_HEADS, HEAD_DIM, TOKENS, dist.group.WORLD, layout="zigzag", device=device)
q, k, v = (own(tensor).requires_grad_() for tensor in whole)
o = attend(q, k, v)
o.float().square().mean().backward()  # gradients of q, k and v on their ranks

q_all, k_all, v_all = (tensor.float().transpose(1, 2) for tensor in whole)
right = torch.nn.functional.scaled_dot_product_attention(q_all, k_all, v_all, is_causal=True, enable_gqa=True).transpose(1, 2)
error = (o.float() - own(right)).norm() / own(right).norm()
assert error < 1e-2 and all(tensor.grad.isfinite().all() for tensor in (q, k, v))
print(f"rank {rank}: {attend.choices[0].config or 'bulk-synchronous'}, relative error {error:.1e}")
attend.close()
dist.destroy_process_group()
