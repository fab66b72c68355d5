"""Every variant on CPU ranks: sizes that no tile divides, each type, both shardings, ragged and empty sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from autotax.core.config import Config, Value
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.kernels.all_gather_gemm import peers
from autotax.kernels.offline import known_hardware
from autotax.operators import all_gather_gemm, of
from autotax.operators.problems import (
    AllGatherGemm,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    GemmReduceScatter,
    HeadGather,
)
from autotax.operators.verification import TOLERANCE
from autotax.runner.ranks import Ranks
from autotax.spaces import Space, space_for
from tests.conformance import calls as conformance
from tests.spaces.drawing import drawn

CALLS = 3
"""Odd ones are ragged, with empty sequences and such of one token; slots of an inbox are used again from the third on."""
PROBLEMS: dict[int, list[Problem]] = {
    2: [
        AllGatherGemm(37, 45, 72, "bf16", "m", 2),
        AllGatherGemm(5, 20, 1152, "fp32", "m", 2),  # eight K groups, the last ones empty
        AllGatherGemm(1, 1, 1, "fp16", "m", 2),  # more ranks than rows
        AllGatherGemm(20, 17, 800, "fp16", "k", 2),  # two K groups, one shorter
        AllGatherGemm(21, 35, 26, "bf16", "k", 2),
        FlashDecode(3, 3, 1, 40, 91, "bf16", 2),
        FlashDecode(2, 2, 2, 9, 49, "fp32", 2),
        FlashDecode(2, 4, 2, 16, 75, "bf16", 2, "head_scatter", 16),
        FlashDecode(2, 4, 1, 9, 40, "fp32", 2, "head_scatter"),  # a KV head serves heads of both ranks
        FlashDecode(1, 2, 1, 9, 150, "fp16", 2, "replicated", 64),
        GatherAttention(2, 4, 2, 32, 96, "bf16", 2, layout="zigzag"),
        GatherAttention(1, 3, 1, 16, 44, "fp16", 2),  # of 22 tokens no block divides
        GatherAttention(2, 2, 2, 24, 36, "bf16", 2, "none"),
        GatherAttention(2, 4, 2, 32, 96, "bf16", 2, window=11),
        GatherAttention(1, 4, 2, 32, 88, "fp16", 2, window=57),  # more than a rank has
        GatherAttention(2, 4, 2, 32, 96, "bf16", 2, layout="zigzag", window=1),
        GatherAttention(2, 4, 2, 48, 96, "bf16", 2, layout="zigzag", window=31, v_dim=32),
        GatherAttention(2, 4, 4, 48, 96, "bf16", 2, "none", v_dim=32),
        GemmReduceScatter(37, 45, 72, "bf16", "scattered", 2),
        GemmReduceScatter(21, 96, 400, "fp32", "replicated", 2, "kn"),
        GemmReduceScatter(1, 1, 1, "fp16", "replicated", 2),  # more ranks than rows
        DecodeMerge(5, 6, 40, "bf16", 2, "head_scatter", "2"),
        DecodeMerge(1, 1, 512, "fp16", 2),  # one row, as wide as there are
        HeadGather(5, 6, 21, "bf16", 2),
        AllReduceNorm(5, 264, "bf16", 2, offset=1),
        AllReduceNorm(3, 384, "fp16", 2, "none", "block"),
        AllReduceNorm(9, 8, "fp32", 2),
        AllReduceNorm(5, 264, "bf16", 2, k=72),  # behind a product
        AllReduceNorm(5, 272, "bf16", 2, k=80, scales="row", quantize="row"),  # behind one of e4m3
        AllReduceNorm(9, 384, "fp16", 2, "none", "block", k=256, scales="block", quantize="block"),
        AllReduceNorm(9, 400, "bf16", 2, k=48, scales="tensor"),
    ],
    3: [
        AllGatherGemm(38, 33, 40, "fp16", "m", 3),
        AllGatherGemm(4, 35, 33, "bf16", "m", 3),  # a rank without rows
        AllGatherGemm(19, 20, 60, "fp32", "k", 3),
        FlashDecode(2, 5, 1, 16, 100, "fp16", 3),
        FlashDecode(2, 4, 2, 32, 1, "bf16", 3),  # ranks without tokens
        GatherAttention(1, 3, 3, 16, 54, "bf16", 3, layout="zigzag"),
        GatherAttention(1, 4, 1, 64, 3, "bf16", 3),  # a token on a rank
        GatherAttention(1, 3, 3, 16, 54, "bf16", 3, layout="zigzag", window=15),
        GatherAttention(1, 6, 3, 24, 54, "fp16", 3, window=20, v_dim=16),
        GemmReduceScatter(4, 70, 33, "fp16", "scattered", 3, "kn"),  # a rank without rows
        GemmReduceScatter(50, 33, 40, "bf16", "replicated", 3),
        DecodeMerge(2, 5, 9, "fp32", 3),
        HeadGather(3, 24, 64, "fp16", 3),  # whole tiles of words
        AllReduceNorm(4, 96, "fp32", 3, "none"),
        AllReduceNorm(7, 1048, "bf16", 3, quant="row"),
        AllReduceNorm(1, 8, "bf16", 3, quant="tensor"),  # a rank adds up nothing
        AllReduceNorm(3, 384, "fp16", 3, "none", "block", k=33),
        AllReduceNorm(3, 272, "fp16", 3, quant="row", k=80, scales="tensor", quantize="static"),
        AllReduceNorm(17, 144, "bf16", 3, k=384, scales="block"),
    ],
}
CASES = [(problem, variant) for world in PROBLEMS.values() for problem in world for variant in space_for(problem, detect("cpu")).variants]  # noqa: E501  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    with Ranks(2) as two, Ranks(3) as three:
        yield {2: two, 3: three}


def _semantics(problem: Problem, variant: str) -> dict[str, object]:
    """Each variant, and each type and number of ranks of an operator."""
    return {"variant": (problem.op, variant), "ranks": (problem.op, problem.world_size), "dtype": (problem.op, problem.dtype)}


@pytest.mark.sampled(by=_semantics)
@pytest.mark.parametrize(("problem", "variant"), CASES, ids=str)
def test_is_right_at_every_call(ranks: dict[int, Ranks], problem: Problem, variant: str) -> None:
    for config in some_configs(problem, variant)[:1]:
        for errors in ranks[problem.world_size].run(conformance.errors_of, problem, config, CALLS):
            assert max(errors) <= TOLERANCE[problem.out_dtype], config


def _ends(problem: Problem, variant: str) -> dict[str, object]:
    """Of each operator the least values of a variant, the greatest of one, and any of one."""
    return {"end": (problem.op, _turn(problem, variant))}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not when the file is imported, as each rank does: finding the greatest config of a variant takes a while."""
    if metafunc.function is test_other_configs_are_right_at_every_call:
        several = [case for case in CASES if len(some_configs(*case)) > 1]
        metafunc.parametrize(("problem", "variant"), several, ids=str)


@pytest.mark.sampled(by=_ends)
def test_other_configs_are_right_at_every_call(ranks: dict[int, Ranks], problem: Problem, variant: str) -> None:
    for config in some_configs(problem, variant)[1:]:
        for errors in ranks[problem.world_size].run(conformance.errors_of, problem, config, CALLS):
            assert max(errors) <= TOLERANCE[problem.out_dtype], config


@pytest.mark.parametrize("variant", ["push", "copy_engine"])
def test_orders_for_dies_are_right(ranks: dict[int, Ranks], variant: str) -> None:
    """CPU ranks have none to choose from, so spaces there lack them."""
    problem = AllGatherGemm(95, 190, 72, "bf16", "m", 2)
    usual = space_for(problem, detect("cpu")).default(variant).values
    many = {"dies": 3, "comm_dies": 2, "signals": "die", "comm": 3, "pieces": 4} if variant == "push" else {"dies": 3}
    config = Config.of(variant, usual | many | {"block_m": 16, "block_n": 32, "splits": 1})
    for errors in ranks[2].run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= TOLERANCE["bf16"]


@pytest.mark.sampled
@pytest.mark.parametrize("output", ["replicated", "head_scatter"])
@pytest.mark.parametrize(
    ("variant", "way"),
    [
        ("resident", {"splits": 1}),
        ("resident", {"splits": 2}),
        ("compact", {"splits": 1}),
        ("compact", {"splits": 2}),
    ],
)
def test_rows_that_are_merged_in_parts_are_right(
    ranks: dict[int, Ranks], output: str, variant: str, way: dict[str, Value]
) -> None:
    problem = FlashDecode(2, 4, 2, 32, 75, "bf16", 2, output)
    space = space_for(problem, detect("cpu"))
    config = Config.of(variant, space.default(variant).values | {"attend": "by_block", "block_s": 16, "parts": 2} | way)
    assert config in space
    for errors in ranks[2].run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= TOLERANCE[problem.dtype]


@pytest.mark.sampled(by=lambda attend, **_: {"attend": attend})
@pytest.mark.parametrize(
    ("problem", "block_s"),
    [
        (FlashDecode(2, 12, 1, 80, 700, "bf16", 2, "replicated", 16), 128),
        (FlashDecode(2, 6, 2, 128, 530, "fp16", 2), 64),
        (FlashDecode(1, 8, 8, 64, 600, "bf16", 2, "head_scatter", 64), 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("attend", ["by_block", "by_warp"])
@pytest.mark.parametrize("splits", [1, 4])
def test_both_attention_cores_are_right(
    ranks: dict[int, Ranks], problem: FlashDecode, block_s: int, attend: str, splits: int
) -> None:
    """Several blocks, the last of them masked, with splits of which some are empty in some calls."""
    space = space_for(problem, detect("cpu"))
    config = Config.of("bsp", space.default("bsp").values | {"attend": attend, "block_s": block_s, "splits": splits})
    assert config in space
    for errors in ranks[2].run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= TOLERANCE[problem.dtype]


@pytest.mark.parametrize(("comm", "splits"), [(1, 1), (2, 1), (2, 2)])
def test_tiles_that_are_dealt_out_in_part_or_not_at_all_are_right(ranks: dict[int, Ranks], comm: int, splits: int) -> None:
    """A rank has 18 tiles, 9 of its own shard. 9 (all local ones), 6 or none are dealt out; in the last case two are split."""
    problem = AllGatherGemm(70, 80, 32, "fp32", "m", 2)
    usual = space_for(problem, detect("cpu")).default("push").values
    config = Config.of("push", usual | {"block_m": 16, "block_n": 32, "comm": comm, "splits": splits})
    for errors in ranks[2].run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= TOLERANCE["fp32"]


@pytest.mark.sampled
@pytest.mark.parametrize("shard", ["m", "k"])
@pytest.mark.parametrize("variant", ["copy_engine", "pull", "push", "push_two_kernel"])
def test_tiles_of_two_products_are_right(ranks: dict[int, Ranks], variant: str, shard: str) -> None:
    """256 and 64 columns side by side; of the second tile of a row only 10 columns are there."""
    problem = AllGatherGemm(40, 330, 96, "fp32", shard, 2)
    config = Config.of(variant, space_for(problem, detect("cpu")).default(variant).values | {"block_n": 320})
    assert config in space_for(problem, detect("cpu"))
    for errors in ranks[2].run(conformance.errors_of, problem, config, CALLS):
        assert max(errors) <= TOLERANCE["fp32"]


def some_configs(problem: Problem, variant: str) -> list[Config]:
    """The default, and one that problems take in turn: least values, greatest values, any."""
    space = space_for(problem, detect("cpu"))
    ways = (_least, _greatest, lambda *of: drawn(*of, f"{problem} {variant}"))
    another = ways[_turn(problem, variant)](space, variant)
    if variant in ("gather", "fine_grained"):  # steps from `bsp` to `fused`, which share their code
        return [another]
    return list(dict.fromkeys([space.default(variant), another]))


def _turn(problem: Problem, variant: str) -> int:
    return [case for case in CASES if case[1] == variant].index((problem, variant)) % 3


def _least(space: Space, variant: str) -> Config:
    return next(space.variants[variant].configs())


def _greatest(space: Space, variant: str) -> Config:
    """The greatest value of each parameter in turn that leaves a config possible."""
    *_, last = space.variants[variant].configs()
    return last


def test_flashinfer_is_an_alternative_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole tiles, with the symmetric memory that it needs. It gets this rank's rows in such memory, and [k, n]."""
    problem, gpu = AllGatherGemm(512, 256, 128, "bf16", "m", 2), known_hardware("cuda:90")
    where = of(problem).peers["flashinfer"].where
    monkeypatch.setenv("TORCH_SYMMMEM", "NVSHMEM")
    assert not where(problem, gpu)
    monkeypatch.setattr(all_gather_gemm, "find_spec", lambda _: True)
    assert where(problem, gpu) and not where(problem, known_hardware("hip:gfx942"))
    assert not any(where(other, gpu) for other in (replace(problem, m=384), replace(problem, n=192), replace(problem, shard="k")))
    monkeypatch.delenv("TORCH_SYMMMEM")
    assert not where(problem, gpu)

    shard = torch.empty(256, 128)
    monkeypatch.setattr(peers, "symmetric", lambda _, shape, dtype: shard.view(shape).to(dtype))
    comm = SimpleNamespace(all_gather_matmul=lambda rows, b, group: torch.cat([rows, rows]) @ b if group == "group" else None)
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    context: Any = MagicMock(dry=False, dtype=lambda _: torch.float32, world=SimpleNamespace(data="group"))
    a, b = torch.randn(256, 128), torch.randn(256, 128)
    product = peers.FlashInfer(problem, Config("flashinfer"), context)(a, b, torch.empty(512, 256))
    assert torch.equal(product, torch.cat([a, a]) @ b.t()) and torch.equal(shard, a)
