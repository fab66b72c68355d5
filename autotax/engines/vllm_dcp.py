"""Drop-ins for vLLM's decode context parallelism, `vllm/v1/attention/ops/dcp.py`: the same names, signatures and results.

All three take O [tokens, heads, head_dim] and LSE [tokens, heads] of this rank, and `cp_group`, vLLM's GroupCoordinator. `ctx`
is not used. With `seq_lens` and `query_start_loc` tokens of sequences of which this rank holds nothing have no weight; the
kernels that send find out by themselves. See `autotax.engines.merge_calls` for what runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.engines.merge_calls import merged


def dcp_a2a_lse_reduce(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The merged O of the own heads [tokens, heads / ranks, head_dim], and with `return_lse` their LSE."""
    del ctx
    return _merge(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc, "head_scatter")


def cp_lse_ag_out_rs(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same as `dcp_a2a_lse_reduce`: vLLM makes it of an all-gather and a reduce-scatter."""
    del ctx
    return _merge(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc, "head_scatter")


def cp_lse_ag_out_ar(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The merged O of all heads [tokens, heads, head_dim], and with `return_lse` their LSE."""
    del ctx
    return _merge(cp_attn_out, cp_attn_lse, cp_group, return_lse, is_lse_base_on_e, seq_lens, query_start_loc, "replicated")


def _merge(
    o: Tensor,
    lse: Tensor,
    cp_group: Any,
    return_lse: bool,
    base_on_e: bool,
    seq_lens: Tensor | None,
    query_start_loc: Tensor | None,
    output: str,
) -> Tensor | tuple[Tensor, Tensor]:
    if cp_group.world_size == 1:
        return (o, lse) if return_lse else o
    _require_shared_heads(o, cp_group.world_size, output)
    held = _both(seq_lens, query_start_loc)
    result, sums = merged(o, lse, cp_group, output=output, base_on_e=base_on_e, held=held)
    return (result, sums) if return_lse else result


def _require_shared_heads(o: Tensor, ranks: int, output: str) -> None:
    if output == "head_scatter" and o.shape[1] % ranks:
        raise ValueError(f"cp_attn_out has {o.shape[1]} heads on {ranks} ranks; they must be a multiple of these: give as many")


def _both(seq_lens: Tensor | None, query_start_loc: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if seq_lens is None and query_start_loc is None:
        return None
    if seq_lens is None or query_start_loc is None:
        raise ValueError("seq_lens and query_start_loc belong together; one of them is not given: give both, or neither")
    if seq_lens.dim() != 1 or query_start_loc.shape != (len(seq_lens) + 1,):
        raise ValueError(
            f"query_start_loc is {list(query_start_loc.shape)} for seq_lens {list(seq_lens.shape)}; it must have one element "
            "more: give the first token of each sequence, and the end"
        )
    return seq_lens, query_start_loc
