"""Our parallel styles on two CPU ranks: outputs and gradients are those of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.runner.ranks import Ranks
from tests.styles import checks
from tests.torch.conftest import ranks  # noqa: F401 - the same processes
from tests.torch.models import DIM, HIDDEN
from tests.torch.winners import WORLD, database, gather, scatter, usual
from tests.volume import volume


def winners(rows: int) -> dict[Problem, Config]:
    """Winners for the products of an MLP, forward and backward."""
    problems: list[Problem] = [gather(rows, HIDDEN // WORLD, DIM)]
    problems += [scatter(rows, DIM, HIDDEN // WORLD, weight) for weight in ("nk", "kn")]
    return {problem: usual(problem, "bsp") for problem in problems}


@pytest.mark.parametrize(("bias", "dtensors", "dim"), [(True, True, 1), *volume((False, False, 0), (True, False, 1))])
def test_an_mlp_trains_as_the_whole_one(ranks: Ranks, tmp_path: Path, bias: bool, dtensors: bool, dim: int) -> None:  # noqa: F811
    db = database(tmp_path / "a.db", winners(checks.ROWS * (4 if dim else 1)))
    for status, classes in ranks.run(checks.mlp, db, bias, dtensors, dim):
        assert classes == ["ColumnLinear", "RowLinear"]
        assert status.taken >= 6, str(status)  # of two turns: forward of both, and backward of the first
        assert status.taken + status.left == 8, str(status)


@pytest.mark.parametrize("compiled", [False, *volume(True)])
def test_a_llama_block_trains_as_the_whole_one(ranks: Ranks, compiled: bool) -> None:  # noqa: F811
    for status in ranks.run(checks.block, compiled, timeout=100):
        assert status.left == 14, str(status)  # seven layers, forward and backward


def test_what_is_not_fused_is_torchs_own_style(ranks: Ranks) -> None:  # noqa: F811
    assert ranks.run(checks.left_to_torch) == [["Linear"] * 4] * 2


def test_rows_that_ranks_do_not_divide_are_scattered_as_torch_scatters_them(ranks: Ranks) -> None:  # noqa: F811
    ranks.run(checks.rows_that_ranks_do_not_divide)


def test_a_layer_follows_autocast(ranks: Ranks) -> None:  # noqa: F811
    assert ranks.run(checks.autocast) == [torch.bfloat16] * 2
