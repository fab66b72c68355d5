"""WHERE TORCH HOOKS IN: its fused operators of tensor parallelism, run by tuned kernels.

`install()` takes `symm_mem::fused_all_gather_matmul` and `symm_mem::fused_matmul_reduce_scatter`, which Inductor's micro-pipeline
pass, torchtitan and SGLang call. What has no winner, or cannot be served, stays torch's; `status()` says which and why.
"""

from autotax.torch.registration import OPERATORS, install, uninstall
from autotax.torch.status import CallStatus, Status, status

__all__ = ["OPERATORS", "CallStatus", "Status", "install", "status", "uninstall"]
