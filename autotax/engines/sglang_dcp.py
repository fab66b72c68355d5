"""Drop-ins for SGLang's decode context parallelism, `sglang/srt/layers/dcp/comm.py`: the same names, signatures and results.

They take O [tokens, heads, head_dim] and LSE [tokens, heads] of this rank, and `cp_group`, SGLang's GroupCoordinator. `ctx`,
`cuda_graph_buffers` and `comm_backend` are not used. See `autotax.engines.merge_calls` for what runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autotax.engines.merge_calls import merged


def dcp_a2a_lse_reduce(
    cp_attn_out: Tensor,
    cp_attn_lse: Tensor,
    cp_group: Any,
    is_lse_base_on_e: bool = True,
    cuda_graph_buffers: dict[str, Tensor] | None = None,
    comm_backend: str = "a2a",
) -> Tensor:
    """The merged O of the own heads [tokens, heads / ranks, head_dim]."""
    del cuda_graph_buffers, comm_backend
    return _own_heads(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e)[0]


def cp_lse_ag_out_rs_mha(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: Any, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The merge for natural logarithms, and with `return_lse` the merged LSE [tokens, heads / ranks]."""
    result, sums = _own_heads(cp_attn_out, cp_attn_lse, cp_group, True)
    return (result, sums) if return_lse else result


def cp_lse_ag_out_rs_mla(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: Any, ctx: Any = None, is_lse_base_on_e: bool = False
) -> Tensor:
    """The merged O of the own heads as SGLang's callers of this function take it: [heads / ranks, tokens, head_dim]."""
    del ctx
    if cp_group.world_size == 1:
        return cp_attn_out
    return _own_heads(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e)[0].transpose(0, 1)


def _own_heads(o: Tensor, lse: Tensor, cp_group: Any, base_on_e: bool) -> tuple[Tensor, Tensor]:
    ranks = cp_group.world_size
    if ranks == 1:
        return o, lse
    if o.shape[1] % ranks:
        raise ValueError(f"cp_attn_out has {o.shape[1]} heads on {ranks} ranks; they must be a multiple of these: give as many")
    return merged(o, lse, cp_group, output="head_scatter", base_on_e=base_on_e)
