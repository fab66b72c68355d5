"""Torch's fused operators of tensor parallelism on tuned kernels.

`install()` replaces `symm_mem::fused_all_gather_matmul` and `symm_mem::fused_matmul_reduce_scatter`. Inductor's micro-pipeline
pass, torchtitan and SGLang call these operators. Calls without a winner stay torch's; `status()` lists them with the reason.
"""

from autotax.torch.plans import CallStatus, Status, status
from autotax.torch.registration import OPERATORS, install, uninstall

__all__ = ["OPERATORS", "CallStatus", "Status", "install", "status", "uninstall"]
