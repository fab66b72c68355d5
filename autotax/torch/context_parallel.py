"""The attention of torch's context parallelism on tuned kernels of gather + attention.

Torch has one function for the forward of all its attention kernels under `context_parallel`. `install` puts `attention` in its
place. The backward stays torch's: it takes the output and the log-sum-exps of all keys, which are the same.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.errors import UsageError
from autotax.nn.consensus import DTYPES
from autotax.nn.gather_attention import GatherAttention
from autotax.operators.problems import GatherAttention as AttentionProblem
from autotax.torch.plans import Call, NotTaken, plan_of

ATTENTION = "context_parallel_attention"
FUNCTION = "_templated_ring_attention"
OPS = ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_cudnn_attention")
OPS_OF_CPUS = ("aten._scaled_dot_product_flash_attention_for_cpu",)
ARGUMENTS = ("group", "seq_dim", "op", "query", "key", "value", "is_causal", "kwargs")
"""Names of the arguments of torch's function in torch 2.11 to 2.15."""


class AttentionKernels(GatherAttention):
    """The kernels for one problem."""

    @classmethod
    def of(cls, problem: AttentionProblem, group: dist.ProcessGroup, **settings: Any) -> Self:
        sizes = problem.kv_heads, problem.q_heads, problem.head_dim, problem.seq_len
        dtype = next(dtype for dtype, name in DTYPES.items() if name == problem.dtype)
        causal, layout = problem.mask == "causal", problem.layout
        return cls(*sizes, group, dtype, max_batch=problem.batch, causal=causal, layout=layout, **settings)

    def kernel_for(self, problem: AttentionProblem) -> Any:
        """The module itself, whose `config` is that of its kernel."""
        return self if self._choose(problem)[0].KEEPS_LSE else None

    @property
    def config(self) -> Any:
        return self._choose(self._most)[0].config


@dataclass(frozen=True)
class AttentionCall(Call):
    """One kind of call of torch's function."""

    KERNELS: ClassVar[Any] = AttentionKernels
    problem: AttentionProblem

    @classmethod
    def of(
        cls, op: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool, kwargs: dict[str, Any], ranks: int
    ) -> AttentionCall:  # fmt: skip
        """`q`, `k` and `v` are [batch, heads, tokens, head_dim]. With `balanced` a rank has two chunks of the sequence."""
        if str(op) not in (*OPS, *OPS_OF_CPUS):
            raise NotTaken(f"torch chose {op}; ours stands in for {' and '.join(OPS)}")
        if q.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
            raise NotTaken("q, k and v have different numbers of sequences, tokens or elements")
        if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
            raise NotTaken(f"q is {q.dtype}; kernels take torch.bfloat16 and torch.float16")
        scale = kwargs.get("scale")
        if kwargs.get("dropout_p") or kwargs.get("attn_bias") is not None or kwargs.get("return_debug_mask"):
            raise NotTaken("dropout, a bias or a debug mask is given")
        if scale is not None and not math.isclose(scale, q.shape[3] ** -0.5):
            raise NotTaken("the scale is another one than 1 / sqrt(head_dim)")
        (batch, q_heads, tokens, dim), layout = q.shape, "zigzag" if causal and balanced else "contiguous"
        mask = "causal" if causal else "none"
        try:
            return cls(AttentionProblem(batch, q_heads, k.shape[1], dim, tokens * ranks, DTYPES[q.dtype], ranks, mask, layout))
        except UsageError as error:
            raise NotTaken(str(error)) from None

    def sizes(self) -> tuple[AttentionProblem]:
        return (self.problem,)

    def run(self, kernel: AttentionKernels, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = kernel.run_recorded(*(tensor.transpose(1, 2) for tensor in (q, k, v)))
        return o.transpose(1, 2), lse


def attention(
    torchs: Callable[..., Any], module: ModuleType, group: dist.ProcessGroup, seq_dim: int, op: Any, query: Tensor, key: Tensor,
    value: Tensor, is_causal: bool = False, **kwargs: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Torch's function: the output [batch, heads, tokens, head_dim], the log-sum-exps, and the other results of `op`.

    `torchs` is torch's own function and `module` has it.
    """
    balanced = module._cp_options.enable_load_balance
    shapes, how = (query.shape, key.shape, value.shape), tuple(map(str, kwargs.items()))
    kind = (ATTENTION, str(op), *shapes, query.dtype, is_causal, balanced, how)
    plan = plan_of(
        kind, str(group.group_name), query.device,
        lambda ranks: AttentionCall.of(op, query, key, value, is_causal, balanced, kwargs, ranks),
    )  # fmt: skip
    if not plan.counted():
        return cast(tuple[Any, ...], torchs(group, seq_dim, op, query, key, value, is_causal, **kwargs))
    output, lse = plan.run(query.device, query, key, value)
    dims, others = _other_results(op, query.shape, key.shape, query.dtype, query.device)
    return output, lse[..., None] if dims == 4 else lse, *others


@cache
def _other_results(
    op: Any, shape: torch.Size, of_keys: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[int, tuple[Any, ...]]:
    """The dimensions of the log-sum-exps of `op`, and its results behind them. Without dropout nobody reads random states."""
    q, k = (torch.empty(some, dtype=dtype, device="meta") for some in (shape, of_keys))
    more = {"attn_bias": None, "compute_log_sumexp": True} if "cudnn" in str(op) else {}
    _, lse, *others = op(q, k, k, is_causal=False, **more)
    return lse.dim(), tuple(torch.zeros_like(o, device=device) if isinstance(o, Tensor) else o for o in others)


def lack() -> str:
    """The reason why torch's function cannot be replaced, in one line; empty if it can."""
    try:
        function = getattr(torchs_module(), FUNCTION)
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no {FUNCTION}: {error}"
    names = tuple(inspect.signature(function).parameters)
    return "" if names == ARGUMENTS else f"torch {torch.__version__} declares {FUNCTION}({', '.join(names)})"


def torchs_module() -> ModuleType:
    """The module of torch that has the function."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


_torchs: Callable[..., Any] | None = None


def install() -> None:
    """Puts `attention` in the place of torch's function."""
    global _torchs
    module = torchs_module()
    _torchs = getattr(module, FUNCTION)
    ours = partial(attention, _torchs, module)
    ours.torchs = _torchs  # type: ignore[attr-defined]  # read by the alternative that is torch's own
    setattr(module, FUNCTION, ours)


def uninstall() -> None:
    """Restores torch's function. Safe to call twice."""
    global _torchs
    if _torchs is not None:
        setattr(torchs_module(), FUNCTION, _torchs)
        _torchs = None
