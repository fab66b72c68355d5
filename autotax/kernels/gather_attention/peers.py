"""Alternatives that a tuned config is compared with: torch's context parallelism. And the attention alone, a bound."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.kernels.context import Context
from autotax.kernels.gather_attention.vendor import Bsp
from autotax.kernels.kernel import Kernel
from autotax.operators.gather_attention import GatherAttention


class TorchContextParallel(Kernel[GatherAttention]):
    """The context parallelism of torch.distributed.tensor.experimental, with cuDNN's attention. Its first step gathers all keys."""

    ROTATION: ClassVar[str] = "ALL_GATHER"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        if self.context.dry:
            return out
        from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

        options = context_parallel._cp_options
        before = options.enable_load_balance, options.rotate_method
        options.enable_load_balance = self.problem.layout == "zigzag"
        options.rotate_method = context_parallel._RotateMethod[self.ROTATION]
        how: dict[str, Any] = {"is_causal": self.problem.mask == "causal", "attn_bias": None, "compute_log_sumexp": True}
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        try:
            # Torch's own function, even where autotax.torch.install has put ours in its place.
            attention = context_parallel._templated_ring_attention
            o, *_ = getattr(attention, "torchs", attention)(
                self.context.world.data, 2, torch.ops.aten._scaled_dot_product_cudnn_attention,
                query, key, value, **how,
            )  # fmt: skip
        finally:
            options.enable_load_balance, options.rotate_method = before
        return o.transpose(1, 2).contiguous()


class TorchContextParallelRing(TorchContextParallel):
    """The same; each step sends keys and values to the next rank by an all-to-all, in place of a gather of all."""

    ROTATION = "ALL_TO_ALL"


class AttentionAlone(Bsp):
    """The baseline on K and V that were gathered at the first call with them: their contents must not change afterwards."""

    def __init__(self, problem: GatherAttention, config: Config, context: Context) -> None:  # noqa: ARG002
        super().__init__(problem, Config.of("bsp", library="cudnn", squares=1), context)
        self.whole = self.gathered
        self._gathered: dict[int, list[Tensor]] = {}

    def gather(self, k: Tensor, v: Tensor) -> None:
        if k.data_ptr() not in self._gathered and not self.context.dry:
            self.gathered = [torch.empty_like(tensor) for tensor in self.whole]
            super().gather(k, v)
            self._gathered[k.data_ptr()] = self.gathered
        self.gathered = self._gathered.get(k.data_ptr(), self.whole)
