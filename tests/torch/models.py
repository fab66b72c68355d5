"""Models as their users write them, made parallel by torch's interface, and how their results compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

DIM, HIDDEN, HEADS = 32, 64, 4


class Mlp(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, HIDDEN, bias=bias), nn.Linear(HIDDEN, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.relu(self.w1(x)))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Block(nn.Module):
    """A Llama block: RMS norms, causal attention, SwiGLU; x [batch, sequence, DIM] sharded along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (self.heads(layer(normed)) for layer in (self.wq, self.wk, self.wv))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(mixed)
        normed = self.ffn_norm(x)
        return x + self.w2(silu(self.w1(normed)) * self.w3(normed))

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        """As many heads as this rank has."""
        return x.unflatten(2, (-1, DIM // HEADS)).transpose(1, 2)
