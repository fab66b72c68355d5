"""The gathered A that a call leaves behind, for callers that want it too, or multiply it by more than one B.

Ask for it on the stream of the call, before the next call of the same kernel: see `handing_out`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.kernels.all_gather_gemm.handing_out import hand_out, hands_out


def keeps_gathered(kernel: Any) -> bool:
    """Whether the gathered A of the last call can be had from a kernel."""
    if kernel.problem.shard == "k":
        return kernel.config.variant == "bsp" or (kernel.config.variant == "decomposed" and kernel.whole)
    return kernel.config.variant in ("bsp", "push_words") or hands_out(kernel)


def gathered(kernel: Any, a: Tensor, *, own: bool) -> Tensor:
    """A [m, k] as the last call gathered it, whose shard was `a`. With `own` in memory of its own, else perhaps a workspace."""
    problem = kernel.problem
    if kernel.config.variant == "bsp":
        whole: Tensor = kernel.whole
    elif kernel.config.variant == "push_words":
        whole = kernel.landing
    elif problem.shard == "k":
        whole = kernel.inbox[(kernel.calls - 1) % 2].view(-1, problem.k)
    else:
        whole = a.new_empty(problem.world_size * len(a), problem.k)
        hand_out(kernel, a, whole)
        return whole[: problem.m]
    whole = whole[: problem.m]
    return whole.clone() if own else whole
