"""All-reduce, residual, RMSNorm and e4m3 rows behind a product: torchrun --nproc-per-node 2 examples/all_reduce_norm.py"""

import torch
import torch.distributed as dist

import autotax

GPU = torch.cuda.is_available()
HIDDEN, DTYPE = (8192, torch.bfloat16) if GPU else (256, torch.float32)

dist.init_process_group("nccl" if GPU else "gloo")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if GPU else torch.device("cpu")
if GPU:
    torch.cuda.set_device(device)
made = torch.Generator().manual_seed(0)  # the same on all ranks
x, residual, weight = (torch.randn(size, generator=made).to(device, DTYPE) for size in ((16, HIDDEN), (16, HIDDEN), (HIDDEN,)))

# Collective: the ranks look up their configs, agree, allocate and compile.
norm = autotax.nn.AllReduceNorm(HIDDEN, 64, dist.group.WORLD, DTYPE, quant="row", device=device)
with torch.no_grad():
    y, new_residual, scales = norm(x, weight, residual)  # e4m3, the dtype of x, float32 [16]

total = dist.get_world_size() * x.float() + residual.float()
right = torch.nn.functional.rms_norm(total, (HIDDEN,), weight.float(), 1e-6)
error = (y.float() * scales[:, None] - right).norm() / right.norm()
assert error < 0.05 and torch.allclose(new_residual.float(), total, rtol=1e-2, atol=1e-2)
print(f"rank {dist.get_rank()}: {norm.choices[4].config or 'bulk-synchronous'}, relative error {error:.1e}")
norm.close()
dist.destroy_process_group()
