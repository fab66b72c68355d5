"""Torch's fused operators of e4m3, installed on two CPU ranks: torch's results, by tuned kernels where there is a winner."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor

import autotax.torch
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.heap.world import World
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.scaled import quantised, scales_of
from autotax.runner.ranks import Ranks
from autotax.torch import plans, registration, scaled
from autotax.torch.plans import Status
from tests.torch.checks import OPS, ended, group
from tests.torch.winners import WORLD, database, usual

M, N, K = 32, 96, 256
LIMIT = 1e-2


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes(rows: int, columns: int, seed: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scales(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def error(output: Tensor, right: Tensor) -> float:
    assert output.shape == right.shape and output.dtype is torch.bfloat16
    return float((output.float() - right).norm() / right.norm())


def gathers(world: World, db: str, layout: str, dtype: torch.dtype = E4M3) -> tuple[Status, list[float]]:
    """Calls with two Bs, with the scales of a shard and of all rows; the gathered A has the bits of all shards."""
    autotax.torch.install(db)
    shards = [codes(M // WORLD, K, rank, dtype) for rank in range(WORLD)]
    of_a = scales(M, 1, seed=9) if layout == "row" else scales(1, seed=9)
    bs = [codes(n, K, 20 + n + world.rank) for n in (N, 48)]
    of_b = [scales(1, n, seed=n) if layout == "row" else scales(1, seed=n).view(()) for n in (N, 48)]
    own = of_a[world.rank * M // WORLD :][: M // WORLD]
    whole = torch.cat(shards)
    errors = []
    for given in (own, of_a) if layout == "row" else (of_a.view(()),):
        gathered, results = OPS.fused_all_gather_scaled_matmul(
            shards[world.rank], [b.t() for b in bs], given, of_b, 0, group(), *[[None] * 2] * 2, [torch.bfloat16] * 2, [True] * 2
        )
        assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))
        for result, b, scale in zip(results, bs, of_b, strict=True):
            errors.append(error(result, whole.float() * of_a @ (b.float().t() * scale)))
    return ended(), errors


def scatters(world: World, db: str, layout: str, dtype: torch.dtype = E4M3) -> tuple[Status, list[float]]:
    """Calls of two and three dimensions, with sums and averages."""
    autotax.torch.install(db)
    a, b = ([codes(rows, K, seed + rank, of) for rank in range(WORLD)] for rows, seed, of in ((M, 0, dtype), (N, 50, E4M3)))
    of_a = scales(M, 1, seed=9) if layout == "row" else scales(1, seed=9)
    of_b = scales(1, N, seed=8) if layout == "row" else scales(1, seed=8)
    right = sum(x.float() * of_a @ (w.float().t() * of_b) for x, w in zip(a, b, strict=True))
    errors = []
    for shape, how in (([M, N], "sum"), ([M, N], "avg"), ([8, 4, N], "sum")):
        given = (of_a, of_b) if layout == "row" else (of_a.view(()), of_b.view(()))
        y = OPS.fused_scaled_matmul_reduce_scatter(
            a[world.rank], b[world.rank].t(), *given, how, 0, 0, group(), shape, None, None, torch.bfloat16, False
        )
        mine = right.view(shape).chunk(WORLD)[world.rank]
        errors.append(error(y, mine / (WORLD if how == "avg" else 1)))
    return ended(), errors


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["row", "tensor"])
@pytest.mark.parametrize("variant", ["bsp", "scaled_decomposed", "two", "scaled_packets"])
def test_gathering(ranks: Ranks, tmp_path: Path, layout: str, variant: str) -> None:
    problem = AllGatherGemm(M, N, K, "e4m3", "m", WORLD, scales=layout)
    config = usual(problem, "scaled_decomposed" if variant == "two" else variant)
    if variant == "two":
        config = Config.of("scaled_decomposed", config.values | {"products": "two"})
    for status, errors in ranks.run(gathers, database(tmp_path / "a.db", {problem: config}), layout):
        assert status.left == 0 and status.taken == len(errors) // 2, str(status)
        assert max(errors) < LIMIT


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["row", "tensor"])
@pytest.mark.parametrize("variant", ["bsp", "scaled_decomposed", "scaled_words"])
def test_scattering(ranks: Ranks, tmp_path: Path, layout: str, variant: str) -> None:
    problem = GemmReduceScatter(M, N, K, "e4m3", "scattered", WORLD, scales=layout)
    db = database(tmp_path / "a.db", {problem: usual(problem, variant)})
    for status, errors in ranks.run(scatters, db, layout):
        assert (status.left, status.taken) == (0, 3), str(status)
        assert max(errors) < LIMIT


GRADIENTS = [
    (gathers, AllGatherGemm(M, N, K, "e4m3", "m", WORLD, scales="tensor", operand="e5m2"), "scaled_decomposed"),
    (gathers, AllGatherGemm(M, N, K, "e4m3", "m", WORLD, scales="tensor", operand="e5m2"), "scaled_packets"),
    (scatters, GemmReduceScatter(M, N, K, "e4m3", "scattered", WORLD, scales="tensor", operand="e5m2"), "scaled_decomposed"),
    (scatters, GemmReduceScatter(M, N, K, "e4m3", "scattered", WORLD, scales="row", operand="e5m2"), "scaled_words"),
]


@pytest.mark.parametrize(("call", "problem", "variant"), GRADIENTS)
def test_gradients_in_e5m2(ranks: Ranks, tmp_path: Path, call: Any, problem: Any, variant: str) -> None:
    db = database(tmp_path / "a.db", {problem: usual(problem, variant)})
    for status, errors in ranks.run(call, db, problem.scales, E5M2):
        assert (status.left, status.taken > 0) == (0, True), str(status)
        assert max(errors) < LIMIT


def fast_and_exact(_: World, db: str) -> dict[str, int]:
    """How often each config runs a gather whose caller permits fast accumulation for all Bs, for one of two, and for none."""
    autotax.torch.install(db)
    a, of_a = codes(M // WORLD, K, 1), scales(M // WORLD, 1, seed=9)
    b, of_b = codes(N, K, 2).t(), scales(1, N, seed=3)
    for fast in ([True, True], [True, False], [False, False]):
        OPS.fused_all_gather_scaled_matmul(a, [b, b], of_a, [of_b] * 2, 0, group(), *[[None] * 2] * 2, [torch.bfloat16] * 2, fast)
    ran = Counter[str]()
    for call in ended().calls:
        ran[call.runs] += call.calls
    return ran


def test_fast_accumulation_is_a_problem_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    exact = AllGatherGemm(M, N, K, "e4m3", "m", WORLD, scales="row")
    of_exact, of_fast = usual(exact, "scaled_decomposed"), usual(exact, "scaled_packets")
    both = {exact: of_exact, replace(exact, accumulate="fast"): of_fast}
    for ran in ranks.run(fast_and_exact, database(tmp_path / "both.db", both)):
        assert ran == {str(of_fast): 1, str(of_exact): 2}
    for ran in ranks.run(fast_and_exact, database(tmp_path / "exact.db", {exact: of_exact})):
        assert ran == {str(of_exact): 3}


@pytest.mark.parametrize("call", [gathers, scatters])
def test_calls_without_a_winner_stay_torchs(ranks: Ranks, tmp_path: Path, call: Any) -> None:
    for status, errors in ranks.run(call, database(tmp_path / "none.db", {}), "row"):
        assert status.taken == 0 and status.left > 0
        assert max(errors) < LIMIT


def weights_at_one_address(_: World, db: str) -> list[Tensor]:
    """Products of two weights at the same address; an engine's layer serves the first one, which is gone by the second call."""
    autotax.torch.install(db)
    x, memory, scale = torch.ones(4, K).bfloat16(), codes(N, K, 1), torch.ones(1, N)
    first = memory.view(N, K)
    scaled.run_by(first, scaled.Layer(lambda A: A.new_full((len(A), N), 7.0), lambda _: None))
    results = [scaled.quantised_matmul(x, first, None, scale, "row", "all_reduce", group())]
    del first
    results.append(scaled.quantised_matmul(x, memory.view(N, K), None, scale, "row", "all_reduce", group()))
    ended()
    return [*results, memory.float()]


def test_a_layers_own_call_ends_with_its_weight(ranks: Ranks, tmp_path: Path) -> None:
    for served, plain, memory in ranks.run(weights_at_one_address, str(tmp_path / "none.db")):
        assert torch.equal(served, torch.full((4, N), 7.0).bfloat16())
        assert error(plain, WORLD * torch.ones(4, K) @ memory.t()) < LIMIT


def bounded(world: World, db: str) -> list[float]:
    """Errors of sums of 8 rows, which have a winner, and of 3, each with an upper bound of scales and then without."""
    autotax.torch.install(db)
    weight, of_weight, errors = codes(N, K, world.rank), scales(1, N, seed=world.rank), []
    for rows in (8, 3):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(world.rank)).bfloat16()
        for scale_ub in (1.5, None):
            of_x = scales_of(x, "row", scale_ub or math.inf)
            right = (quantised(x, of_x, "row").float() * of_x) @ (weight.float() * of_weight.t()).t()
            dist.all_reduce(right)
            more = () if scale_ub is None else (scale_ub,)
            output = torch.ops.autotax.fused_quantised_matmul(x, weight, None, of_weight, "row", "all_reduce", group(), *more)
            errors.append(error(output, right))
    with pytest.raises(UsageError, match="scale_ub is given with quantize 'block'"):
        torch.ops.autotax.fused_quantised_matmul(x, weight, None, of_weight, "block", "all_reduce", group(), 1.5)
    assert [call.calls for call in autotax.torch.status().calls if call.taken] == [2]
    ended()
    return errors


def test_calls_of_one_kernel_have_bounds_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    problem = GemmReduceScatter(8, N, K, "e4m3", "replicated", WORLD, scales="row", quantize="row", accumulate="fast")
    for errors in ranks.run(bounded, database(tmp_path / "a.db", {problem: usual(problem, "scaled_words")})):
        assert max(errors) < LIMIT


def forked(world: World, db: str) -> int:
    """The plans of a forked process, after a tuned call of its parent."""
    outcome = gathers(world, db, "row")
    assert outcome[1]
    autotax.torch.install(db)
    plans.plans_of(group(), torch.device("cpu"))
    child = os.fork()
    if not child:
        os._exit(len(plans._groups))
    left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended()
    return left


def test_a_forked_process_has_no_plans(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(forked, str(tmp_path / "none.db")) == [0] * WORLD


def test_schemas_are_those_of_this_torch() -> None:
    assert [registration.lack(name) for name in scaled.ARGUMENTS] == ["", ""]
    assert all(hasattr(torch_symm_mem, name) for name in (*scaled.FALLBACKS.values(), *scaled.TORCHS.values()))
