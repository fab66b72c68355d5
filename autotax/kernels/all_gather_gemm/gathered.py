"""The gathered A that a call leaves behind, for callers that want it too, or multiply it by more than one B.

Read it on the stream of the call, before the next call of the same kernel: until that one begins no peer writes there again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def keeps_gathered(kernel: Any) -> bool:
    """Whether calls of a kernel leave the whole of A, or all but the own shard of its rows, where it can be read."""
    if kernel.config.variant == "decomposed":
        return kernel.whole or kernel.problem.shard == "m"
    return kernel.config.variant in ("bsp", "push_words")


def gathered(kernel: Any, a: Tensor, *, own: bool) -> Tensor:
    """A [m, k] as the last call gathered it, whose shard was `a`. With `own` in memory of its own, else perhaps a workspace."""
    problem = kernel.problem
    if kernel.config.variant == "bsp":
        whole: Tensor = kernel.whole
    elif kernel.config.variant == "push_words":
        whole = kernel.landing
    else:
        inbox: Tensor = kernel.inbox[(kernel.calls - 1) % 2]
        if not kernel.whole:  # the own shard was multiplied where it was
            inbox = inbox.clone()
            inbox[kernel.context.rank].copy_(a)
            return inbox.view(-1, problem.k)[: problem.m]
        whole = inbox.view(-1, problem.k)
    whole = whole[: problem.m]
    return whole.clone() if own else whole
