"""Alternatives of Iris, on a stand-in whose operators compute by gloo: that they are called as Iris wants it, and chosen between.

tests/gpu/test_iris.py runs the operators of Iris itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotax import hardware
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.heap import World
from autotax.kernels.offline import known_hardware
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, GemmReduceScatter
from autotax.operators.verification import TOLERANCE
from autotax.runner.ranks import RankFailure, Ranks
from tests.conformance import calls as conformance
from tests.volume import volume

WORLD = 2
COLUMNS = AllGatherGemm(512, 48, 64, "bf16", "k", WORLD)
ROWS = AllGatherGemm(32, 48, 64, "bf16", "m", WORLD)
SCATTERED = GemmReduceScatter(512, 48, 64, "bf16", "scattered", WORLD)
REPLICATED = GemmReduceScatter(16, 48, 64, "bf16", "replicated", WORLD, "kn")
NORM = AllReduceNorm(5, 96, "bf16", WORLD)
NAMES = ("iris", "iris.ops", "iris.ccl", "iris.ccl.config", "iris.ccl.all_gather", "iris.ccl.all_reduce")
CASES = [
    (COLUMNS, "iris_all_gather_matmul_tuned"),
    (SCATTERED, "iris_matmul_reduce_scatter"),
    (REPLICATED, "iris_all_reduce_tuned"),
    *volume(
        (COLUMNS, "iris_all_gather_matmul"),
        (COLUMNS, "iris_all_gather_matmul_hbm_buffer"),
        (COLUMNS, "iris_all_gather_matmul_hbm_buffer_tuned"),
        (ROWS, "iris_all_gather"),
        (ROWS, "iris_all_gather_tuned"),
        (SCATTERED, "iris_matmul_reduce_scatter_tuned"),
        (REPLICATED, "iris_matmul_all_reduce"),
        (REPLICATED, "iris_matmul_all_reduce_tuned"),
        (REPLICATED, "iris_all_reduce"),
        (NORM, "iris_all_reduce"),
        (NORM, "iris_all_reduce_tuned"),
    ),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as ranks:
        yield ranks


@pytest.mark.parametrize(("problem", "name"), CASES, ids=str)
def test_calls_are_right_between_barriers(ranks: Ranks, problem: Problem, name: str) -> None:
    for errors in ranks.run(errors_of, problem, name):
        assert max(errors) <= TOLERANCE["bf16"]


def test_the_tuned_row_takes_the_fastest_setting_that_works(ranks: Ranks) -> None:
    taken = ranks.run(choice_of, COLUMNS, "iris_all_gather_matmul_tuned")
    assert taken == [{"block_size_m": 64, "block_size_n": 128, "group_size_m": 8}] * WORLD


def test_all_ranks_say_in_one_line_why_iris_fails() -> None:
    with Ranks(WORLD) as ranks, pytest.raises(RankFailure) as raised:
        ranks.run(choice_of, SCATTERED, "iris_matmul_reduce_scatter", True)
    assert str(raised.value).count("RuntimeError: Iris fails: has no tile") == WORLD


@pytest.mark.parametrize("names", [(), ("iris",), ("iris/ops", "iris"), ("iris/ops", "iris", "tritonblas")])
def test_rows_exist_where_amds_iris_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]) -> None:
    """The package index has another project called iris."""
    for name in names:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
    here = [str(tmp_path)] if names else []
    monkeypatch.setattr(sys, "path", [*here, *(p for p in sys.path if not (Path(p) / "iris").is_dir())])
    sys.modules.pop("iris", None)
    assert hardware.has_iris() is (len(names) == 3)
    for problem in (COLUMNS, ROWS, SCATTERED, REPLICATED, NORM):
        peers = registry.of(problem).peers.values()
        rows = [peer for peer in peers if peer.name.startswith("iris_") and peer.where(problem, known_hardware("cuda:90"))]
        assert bool(rows) is (len(names) == 3)
    assert "iris" not in sys.modules


# Functions that the ranks run, and the stand-in.


def errors_of(world: World, problem: Problem, name: str) -> list[float]:
    with iris_of_gloo() as calls:
        errors = conformance.errors_of(world, problem, Config(name), 3)
    assert calls.count("barrier") >= 2 * (len(calls) - calls.count("barrier"))
    return errors


def choice_of(world: World, problem: Problem, name: str, failing: bool = False) -> dict[str, Any]:
    with iris_of_gloo(failing):
        return dict(conformance.ready(world, problem, Config(name))[1].choice)


@contextmanager
def iris_of_gloo(failing: bool = False) -> Iterator[list[str]]:
    """Lists the calls and barriers. Every operator refuses the tiles of 128 rows, and is slow but for those of 64 rows."""
    calls: list[str] = []

    def begin(name: str, config: Any) -> None:
        if failing:
            raise ValueError("has no tile")
        settings = vars(config) if config else {}
        if settings.get("block_size_m") == 128:
            raise AssertionError("tiles of 128 rows")
        calls.append(name)
        if settings.get("block_size_m") != 64:
            time.sleep(0.02)

    def product(_: Any, out: Tensor, a: Tensor, b: Tensor, *, async_op: bool, config: Any, workspace: Any = None) -> Any:
        assert async_op and b.shape == (64, 48)
        begin("product", config)
        shards = [torch.empty_like(a) for _ in range(WORLD)]
        dist.all_gather(shards, a.contiguous())
        out.copy_(torch.cat(shards, 1).float() @ b.float())
        return workspace

    def sums(iris: Any, out: Tensor, a: Tensor, b: Tensor, *, async_op: bool, config: Any, workspace: Any) -> str:
        assert async_op
        begin("sums", config)
        iris.barrier()  # as their preambles do
        total = a.float() @ b.float()
        dist.all_reduce(total)
        out.copy_(total)
        return workspace or "workspace"

    def all_gather(whole: Tensor, shard: Tensor, _: Any, *, async_op: bool, config: Any) -> None:
        assert async_op
        begin("gather", config)
        dist.all_gather_into_tensor(whole, shard)

    def all_reduce(total: Tensor, part: Tensor, iris: Any, *, async_op: bool, config: Any, workspace: Any) -> str:
        assert async_op
        begin("sum", config)
        iris.barrier()
        exact = part.float()
        dist.all_reduce(exact)
        total.copy_(exact)
        return workspace or "workspace"

    class Context:
        def __init__(self, nbytes: int) -> None:
            self.left = nbytes

        def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            self.left -= torch.Size(shape).numel() * dtype.itemsize
            assert self.left >= 0
            return torch.zeros(shape, dtype=dtype)

        def device_barrier(self) -> None:
            calls.append("barrier")
            dist.barrier()

        def barrier(self) -> None:
            raise AssertionError("synchronises on the host")

    modules: dict[str, Any] = {name: ModuleType(name) for name in NAMES}
    modules["iris"].iris = Context
    modules["iris"].ops = modules["iris.ops"]
    modules["iris.ccl.config"].Config = SimpleNamespace
    modules["iris.ccl.all_gather"].all_gather = all_gather
    modules["iris.ccl.all_reduce"].all_reduce = all_reduce
    for name, function in (
        ("FusedConfig", SimpleNamespace), ("all_gather_matmul", product), ("all_gather_matmul_hbm_buffer", product),
        ("matmul_reduce_scatter", sums), ("matmul_all_reduce", sums),
    ):  # fmt: skip
        setattr(modules["iris.ops"], name, function)
    with mock.patch.dict(sys.modules, modules):
        yield calls
