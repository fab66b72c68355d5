"""Torch's fused operators of tensor parallelism on tuned kernels.

`install()` replaces `symm_mem::fused_all_gather_matmul`, `symm_mem::fused_matmul_reduce_scatter` and their scaled editions, which
Inductor's micro-pipeline pass, torchtitan and SGLang call, and the attention of context parallelism. Calls without a winner stay
torch's; `status()` lists them with the reason.
"""

from autotax.torch.plans import CallStatus, Status, status
from autotax.torch.registration import OPERATORS, install, uninstall

__all__ = ["OPERATORS", "CallStatus", "Status", "install", "status", "uninstall"]
