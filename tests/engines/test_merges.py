"""The drop-ins for serving engines: their signatures, and their results on two ranks, for calls as engines make them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from autotax.engines import merges, sglang, vllm
from autotax.heap.world import World
from autotax.runner.ranks import Ranks
from tests.torch.conftest import ranks  # noqa: F401 - the same processes

HEADS, DIM, TOKENS = 6, 16, 5
VLLM = (
    "cp_attn_out, cp_attn_lse, cp_group, ctx=None, return_lse=False, is_lse_base_on_e=True, seq_lens=None, query_start_loc=None"
)
SIGNATURES = {
    # vLLM 0.33, vllm/v1/attention/ops/dcp.py
    vllm.dcp_a2a_lse_reduce: VLLM,
    vllm.cp_lse_ag_out_rs: VLLM,
    vllm.cp_lse_ag_out_ar: VLLM,
    # SGLang 0.5.23, sglang/srt/layers/dcp/comm.py
    sglang.dcp_a2a_lse_reduce: (
        "cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e=True, cuda_graph_buffers=None, comm_backend='a2a'"
    ),
    sglang.cp_lse_ag_out_rs_mha: "cp_attn_out, cp_attn_lse, cp_group, return_lse=False",
    sglang.cp_lse_ag_out_rs_mla: "cp_attn_out, cp_attn_lse, cp_group, ctx=None, is_lse_base_on_e=False",
}


@pytest.mark.parametrize(("function", "signature"), SIGNATURES.items(), ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures_are_those_of_the_engines(function: Callable[..., Any], signature: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters) == signature


@dataclass
class Coordinator:
    """The attributes of an engine's GroupCoordinator that the drop-ins use."""

    device_group: Any
    world_size: int


def brought(rank: int, dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    o = torch.randn(tokens, HEADS, DIM, generator=generator).to(dtype)
    return o, 3 * torch.randn(HEADS, tokens, generator=generator).t()  # as FlashAttention lays it out


def right(world: World, base: float = math.e, empty: tuple[int, ...] = (), tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """All heads; tokens in `empty` have no weight on rank 1."""
    pairs = [brought(rank, tokens=tokens) for rank in range(world.size)]
    lse = torch.stack([pair[1].double() for pair in pairs]) * math.log(base)
    lse[1, list(empty)] = -math.inf
    whole = (torch.softmax(lse, 0)[..., None] * torch.stack([pair[0].double() for pair in pairs])).sum(0)
    return whole.float(), (torch.logsumexp(lse, 0) / math.log(base)).float()


def own(whole: Tensor, world: World) -> Tensor:
    share = HEADS // world.size
    return whole[:, world.rank * share : (world.rank + 1) * share]


def close(output: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def calls_of_vllm(world: World) -> int:
    group = Coordinator(world.data, world.size)
    o, lse = brought(world.rank)
    whole, sums = right(world)
    for function in (vllm.dcp_a2a_lse_reduce, vllm.cp_lse_ag_out_rs):
        out, merged = function(o, lse, group, None, True)
        close(out, own(whole, world))
        close(merged, own(sums, world))
    out, merged = vllm.cp_lse_ag_out_ar(o, lse, group, ctx=None, return_lse=True)
    close(out, whole)
    close(merged, sums)
    alone = vllm.dcp_a2a_lse_reduce(o, lse, group, is_lse_base_on_e=False)
    assert isinstance(alone, Tensor)
    close(alone, own(right(world, 2.0)[0], world))
    # Two sequences of two tokens, the second without tokens on rank 1; a token behind the last sequence is padding everywhere.
    lens, starts = torch.tensor([7, 0 if world.rank else 3]), torch.tensor([0, 2, 4])
    before = lse.clone()
    out = vllm.dcp_a2a_lse_reduce(o, lse, group, seq_lens=lens, query_start_loc=starts)
    assert isinstance(out, Tensor) and torch.equal(lse, before)
    close(out[:4], own(right(world, empty=(2, 3))[0], world)[:4])
    assert not out[4].any()
    with pytest.raises(ValueError, match="belong together"):
        vllm.dcp_a2a_lse_reduce(o, lse, group, seq_lens=lens)
    modules = len(merges.modules_of(group))
    merges.forget(group)
    return modules


def calls_of_sglang(world: World) -> None:
    group = Coordinator(world.data, world.size)
    merges.prepare(group, HEADS, DIM, TOKENS, torch.float32, "cpu")
    o, lse = brought(world.rank)
    whole, sums = right(world)
    close(sglang.dcp_a2a_lse_reduce(o, lse, group, True, None, "a2a"), own(whole, world))
    out, merged = sglang.cp_lse_ag_out_rs_mha(o, lse, group, return_lse=True)
    close(out, own(whole, world))
    close(merged, own(sums, world))
    with mock.patch.object(merges, "capturing", lambda _: True):  # nothing is made: torch's operators
        by_heads = sglang.cp_lse_ag_out_rs_mla(o, lse, group)
    close(by_heads.transpose(0, 1).view(-1, HEADS // world.size, DIM), own(right(world, 2.0)[0], world))
    more = brought(world.rank, tokens=TOKENS + 4)  # than it was prepared for
    close(sglang.dcp_a2a_lse_reduce(*more, group), own(right(world, tokens=TOKENS + 4)[0], world))
    odd = Coordinator(world.data, 4)
    with pytest.raises(ValueError, match="6 heads on 4 ranks"):
        sglang.dcp_a2a_lse_reduce(o, lse, odd)
    assert len(merges.modules_of(group)) == 1
    merges.forget(group)


def test_calls_as_vllm_makes_them(ranks: Ranks) -> None:  # noqa: F811
    # Own heads and all heads of natural logarithms, own heads of base 2.
    assert ranks.run(calls_of_vllm) == [3, 3]


def test_calls_as_sglang_makes_them(ranks: Ranks) -> None:  # noqa: F811
    ranks.run(calls_of_sglang)


def test_one_rank_gets_back_what_it_brings() -> None:
    o, lse = brought(0)
    alone = Coordinator(None, 1)
    assert vllm.dcp_a2a_lse_reduce(o, lse, alone, return_lse=True) == (o, lse)
    assert sglang.dcp_a2a_lse_reduce(o, lse, alone) is o
    assert sglang.cp_lse_ag_out_rs_mla(o, lse, alone) is o
