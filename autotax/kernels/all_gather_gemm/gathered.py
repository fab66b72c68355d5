"""The gathered A that a call leaves behind, for callers that want it too, or multiply it by more than one B.

Ask for it on the stream of the call, before the next call of the same kernel: see `handing_out`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.kernels.all_gather_gemm.handing_out import hand_out, left_in


def keeps_gathered(kernel: Any) -> bool:
    """Whether the gathered A of the last call can be had from a kernel."""
    if kernel.problem.shard == "k":
        return left_in(kernel) == "whole" or (left_in(kernel) == "inboxes" and kernel.whole)
    return bool(left_in(kernel))


def gathered(kernel: Any, a: Tensor, *, own: bool) -> Tensor:
    """A [m, k] as the last call gathered it, whose shard was `a`. With `own` in memory of its own, else perhaps a workspace."""
    problem = kernel.problem
    if left_in(kernel) in ("whole", "landing"):
        whole: Tensor = getattr(kernel, left_in(kernel))
    elif problem.shard == "k":
        whole = kernel.inbox[(kernel.calls - 1) % 2].view(-1, problem.k)
    else:
        whole = a.new_empty(problem.world_size * len(a), problem.k)
        hand_out(kernel, a, whole)
        return whole[: problem.m]
    whole = whole[: problem.m]
    return whole.clone() if own else whole
