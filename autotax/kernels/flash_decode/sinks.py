"""Attention sinks: a learned logit for each query head, one more term of the softmax's denominator."""

import triton
import triton.language as tl


@triton.jit
def sink_of(sinks, head, split, g, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Base-2 sinks of the rows g of a KV head, float32 of the shape of g: those of the first split, else -inf.

    Of all ranks one is given the sinks, the others -inf (`shapes.DecodeBase`), so each is counted once.
    """
    HEADS: tl.constexpr = GROUP // QUERIES
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.load(sinks + head * HEADS + g // QUERIES, mask=(g < GROUP) & (split == 0), other=float("-inf")) * LOG2_E
