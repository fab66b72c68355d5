"""A tensor-parallel MLP layer pair in FP8: weights in e4m3 with scales of rows, inputs quantised on the way.

    torchrun --nproc-per-node 2 examples/fp8_in_torch.py          # one process a GPU, or CPU ranks
"""

import torch
import torch.distributed as dist

import autotax

GPU = torch.cuda.is_available()
HIDDEN, WIDE, ROWS = (8192, 14336, 256) if GPU else (256, 128, 16)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [n, k] in e4m3 and one scale for each row, [1, n]."""
    scales = weight.abs().amax(1, keepdim=True).float() / 448
    return (weight / scales).to(torch.float8_e4m3fn), scales.t().contiguous()


def main() -> None:
    """Runs on every rank of the job."""
    dist.init_process_group("nccl" if GPU else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    up, down = (torch.randn(n, k, device=device) / k**0.5 for n, k in ((WIDE, HIDDEN), (HIDDEN, WIDE)))
    (up8, of_up), (down8, of_down) = quantised(up), quantised(down)
    first = autotax.nn.AllGatherLinear(up8, max_m=ROWS, scales=of_up, quantize="row")
    second = autotax.nn.LinearReduceScatter(down8, max_m=ROWS, scales=of_down, quantize="row")
    x = torch.randn(ROWS // ranks, HIDDEN, device=device).bfloat16()
    with torch.no_grad():
        y = second(first(x))
    print(f"rank {rank}: {tuple(x.shape)} to {tuple(y.shape)}, {y.dtype}, finite: {bool(y.isfinite().all())}")


if __name__ == "__main__":
    main()
