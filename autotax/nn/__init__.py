"""Torch modules for models: they run tuned kernels, or bulk-synchronous code (BSP) where no winner is valid.

Making a module is collective over its group: the ranks look up their configs, agree on them, allocate and compile. A call only
enqueues.
"""

from autotax.nn.attention import FlashDecode, kv_scales, seen_tokens
from autotax.nn.gather_attention import GatherAttention
from autotax.nn.linear import AllGatherLinear, LinearAllReduce, LinearReduceScatter
from autotax.nn.merge import DecodeMerge
from autotax.nn.norm import AllReduceNorm
from autotax.nn.tuned import Tuned

__all__ = [
    "AllGatherLinear",
    "AllReduceNorm",
    "DecodeMerge",
    "FlashDecode",
    "GatherAttention",
    "LinearAllReduce",
    "LinearReduceScatter",
    "Tuned",
    "kv_scales",
    "seen_tokens",
]
