"""`batch_invariant`: rows of a result have the same bits for every number of rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autotax.core.conditions import ON_CPU
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import AllGatherLinear, AllReduceNorm, DecodeMerge, LinearAllReduce, LinearReduceScatter, linear
from autotax.nn.consensus import DTYPES, INVARIANT_VARIABLES
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.problems import AllReduceNorm as NormProblem
from autotax.runner.ranks import Ranks
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner
from tests.nn.checks import normal

N, K, MOST = 40, 72, 4096
NORMED = 64
"""The most rows of norms."""
ROWS = (2, 4, 6, 30, 64, 130, 510, 768, 1026, 4096)
LAYERS = (AllGatherLinear, LinearReduceScatter, LinearAllReduce)
PLACE = detect("cpu"), environment("cpu"), ON_CPU
PUSH = Config.of("push", space_for(GemmReduceScatter(64, N, K, "bf16", "replicated", 2), detect("cpu")).default("push").values)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


def everyones(world: World, own: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own.contiguous(), group=world.data)
    return gathered


def invariant_problem(layer_of: type[Any], size: int = 2, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """The problem of the most rows."""
    if layer_of is AllGatherLinear:
        return AllGatherGemm(MOST, N, K, DTYPES[dtype], "m", size)
    return GemmReduceScatter(MOST, N, K, DTYPES[dtype], layer_of.OUTPUT, size)


def changed(world: World, layer_of: type[Any], dtype: torch.dtype, options: dict[str, Any]) -> tuple[str, list[int]]:
    """The variant that serves, and the numbers of rows for which a row differs from the one among the most rows."""
    weight = normal(N, K, seed=world.rank, dtype=dtype).to(world.device)
    layer = layer_of(weight, None, MOST, db=options.pop("db", "/nowhere/none.db"), batch_invariant=True, **options)
    gathers, alone = layer_of is AllGatherLinear, layer_of is LinearReduceScatter
    x = normal(MOST // world.size if gathers else MOST, K, seed=10 + world.rank, dtype=dtype).to(world.device)

    def call(rows: int) -> torch.Tensor:
        """The rows of the result, those of rank 0 first."""
        y = layer(x[: rows // world.size if gathers else rows])
        return torch.cat(everyones(world, y)) if alone else y

    most, mismatches = call(MOST), []
    for rows in (*ROWS, *(() if gathers or alone else (1, 3, 257))):
        y = call(rows)
        same = most.view(world.size, -1, N)[:, : rows // world.size].reshape(rows, N) if gathers else most[:rows]
        mismatches += [] if torch.equal(y.view(torch.uint8), same.contiguous().view(torch.uint8)) else [rows]
    variant = layer.choices[-1].config.variant
    assert len(layer.choices) == 1
    layer.close()
    return variant, mismatches


def variants(layer_of: type[Any]) -> list[str]:
    """The variants that keep the bits of rows on CPU ranks. A look-up without a winner takes the first."""
    problem = invariant_problem(layer_of)
    operator = registry.of(problem)
    return [name for name in operator.spaces(problem, PLACE[0]) if operator.variants[name].invariant]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("layer_of", "variant"), [(layer, name) for layer in LAYERS for name in variants(layer)])
def test_rows_have_the_same_bits_whatever_their_number(
    ranks: Ranks, layer_of: type[Any], variant: str, dtype: torch.dtype
) -> None:
    config = space_for(invariant_problem(layer_of, dtype=dtype), PLACE[0]).default(variant)
    options = {"config": config} if variant != variants(layer_of)[0] else {}
    assert ranks.run(changed, layer_of, dtype, options, timeout=300) == [(variant, [])] * 2


def changed_norms(world: World, dtype: torch.dtype, db: str) -> list[int]:
    """The numbers of rows for which `normed` of a layer gives a row other bits than among the most rows, where the library's
    product, whose bits depend on the number of rows, and then the sum with its norm would be the fastest.
    """
    weight, of_norm = normal(N, K, seed=world.rank, dtype=dtype), normal(N, seed=3, dtype=dtype)
    norm = AllReduceNorm(N, NORMED, None, dtype, db=db, sizes=[NORMED], residual=False)
    with mock.patch.object(linear, "least_microseconds", side_effect=[1.0, 2.0]):
        layer = LinearAllReduce(weight, None, NORMED, norm=norm, db="/nowhere/none.db", batch_invariant=True)
    x, changed = normal(NORMED, K, seed=10 + world.rank, dtype=dtype), []
    whole = layer.normed(x, of_norm)
    torch.testing.assert_close(whole, norm(torch.nn.functional.linear(x, weight), of_norm), rtol=2e-2, atol=5e-2)
    for rows in (1, 2, 3, 14, 33):
        parts = layer.normed(x[:rows], of_norm)
        changed += [] if all(torch.equal(part, most[:rows]) for part, most in zip(parts, whole, strict=True)) else [rows]
    layer.close()
    norm.close()
    return changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_normed_rows_have_the_same_bits_whatever_their_number(ranks: Ranks, tmp_path: Any, dtype: torch.dtype) -> None:
    problem = NormProblem(NORMED, N, DTYPES[dtype], 2, "none")
    db = f"sqlite:///{tmp_path}/won.db"
    with Store.open(db) as store:
        keep_winner(store, problem, space_for(problem, PLACE[0]).default("one_shot"), *PLACE)
    assert ranks.run(changed_norms, dtype, db) == [[], []]


def warned(_: World, kind: str, value: str) -> list[str]:
    """The warnings of a module that chooses by the number of rows, where an engine's variable has a value."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv(INVARIANT_VARIABLES[0], value)
        warnings.simplefilter("always")
        if kind == "AllReduceNorm":
            module: Any = AllReduceNorm(N, 8, db="/nowhere/none.db")
        elif kind == "DecodeMerge":
            module = DecodeMerge(2, 16, 8, db="/nowhere/none.db")
        else:
            codes = torch.ones(16, 32).to(torch.float8_e4m3fn)
            module = LinearAllReduce(codes, None, 8, scales=torch.ones(1), quantize="row", db="/nowhere/none.db")
        module.close()
    return [str(warning.message) for warning in caught if "batch" in str(warning.message)]


@pytest.mark.parametrize("kind", ["AllReduceNorm", "DecodeMerge", "LinearAllReduce"])
def test_what_chooses_by_the_number_of_rows_warns_where_an_engines_variable_asks_otherwise(ranks: Ranks, kind: str) -> None:
    for (line,) in ranks.run(warned, kind, "1"):
        assert line.startswith(kind) and f"{INVARIANT_VARIABLES[0]} asks for results that no batch changes" in line
    assert ranks.run(warned, kind, "0") == [[], []]


def refused(world: World, options: dict[str, Any]) -> str:
    try:
        LinearAllReduce(normal(N, K, seed=world.rank, dtype=torch.bfloat16), None, 64, batch_invariant=True, **options).close()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": Config("bsp")}, "its rows depend on how many there are"),
        ({"config": Config.of("push", PUSH.values | {"splits": 2})}, "its rows depend on how many there are"),
    ],
    ids=str,
)
def test_what_depends_on_the_number_of_rows_is_refused(ranks: Ranks, options: dict[str, Any], message: str) -> None:
    assert all(message in text for text in ranks.run(refused, options))


def of_environment(world: World, db: str, value: str) -> list[str]:
    """The variants of a layer where an engine's variable has a value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INVARIANT_VARIABLES[0], value)
        layer = LinearAllReduce(normal(N, K, seed=world.rank, dtype=torch.bfloat16), None, 64, db=db, sizes=[64])
    variants = [choice.config.variant if choice.config else "bsp" for choice in layer.choices]
    layer.close()
    return variants


def test_an_engines_variable_asks_for_it_and_a_winner_of_another_size_answers(ranks: Ranks, tmp_path: Any) -> None:
    db = f"sqlite:///{tmp_path}/won.db"
    with Store.open(db) as store:
        keep_winner(store, GemmReduceScatter(16, N, K, "bf16", "replicated", 2), Config.of("pull_reduce", PUSH.values), *PLACE)
    assert ranks.run(of_environment, db, "1") == [["pull_reduce"]] * 2
    assert ranks.run(of_environment, db, "0") == [["bsp"]] * 2


def test_an_engines_variable_leaves_a_layer_of_one_rank_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INVARIANT_VARIABLES[0], "1")
    weight, x = normal(N, K, seed=0, dtype=torch.bfloat16), normal(3, K, seed=1, dtype=torch.bfloat16)
    assert torch.equal(AllGatherLinear(weight, max_m=4)(x), x @ weight.T)
    with pytest.raises(UsageError, match="one rank"):
        AllGatherLinear(weight, max_m=4, batch_invariant=True)
