"""The vendor's attention, by torch's operators that return log-sum-exps. Without Triton.

These operators take no output tensor: they allocate one with torch's caching allocator, in a capture from the graph's pool.
Q and O are [batch, queries, q_heads, head_dim], K and V [batch, keys, kv_heads, head_dim]. Log-sum-exps have base
e: float32 [batch, q_heads, queries]. A library is a name of the space: "cudnn", "flash" or "cpu".
"""

from __future__ import annotations

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]
"""O and its log-sum-exps, which may have any strides."""


def attend(library: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Partial:
    """Attention of q to k and v. With `causal` there are as many queries as keys, and the i-th sees the keys up to the i-th."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    aten = torch.ops.aten
    if library == "cudnn":
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    elif library == "flash":
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        o, lse, *_ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o.transpose(1, 2).contiguous(), lse.reshape(q.shape[:3])
