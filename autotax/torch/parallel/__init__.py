"""STYLES for torch's `parallelize_module`, whose linear layers run tuned kernels, forward and backward."""

from autotax.torch.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel"]
