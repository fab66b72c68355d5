"""Unchanged models, torch.compile and the micro-pipeline pass: every operator that the pass emits comes to us."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.runner.ranks import Ranks
from tests.torch.models import DIM, HIDDEN
from tests.torch.winners import WORLD, database, gather, scatter, usual

BACKENDS = ["passes", pytest.param("inductor", marks=pytest.mark.volume)]


def winners(tmp_path: Path, rows: int) -> str:
    own = HIDDEN // WORLD
    problems: list[Problem] = [gather(rows, own, DIM)]
    problems += [scatter(rows, DIM, own, weight) for weight in ("nk", "kn")]
    return database(tmp_path / "a.db", {problem: usual(problem, "bsp") for problem in problems})


@pytest.mark.volume
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_mlp_of_two_layers_trains_as_the_whole_one(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    from tests.torch import compiled  # only now: what it imports takes seconds, and all processes list all tests

    for status, emitted in ranks.run(compiled.trained, winners(tmp_path, compiled.ROWS), "mlp", backend, timeout=200):
        assert emitted == 8, "four layers, forward and backward"
        assert status.taken + status.left == emitted, str(status)
        assert status.taken >= 6, str(status)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchaos_training_in_fp8_has_the_losses_of_products_in_float32(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    from tests.torch import compiled

    kept: dict[Problem, Config] = {}
    sizes = compiled.FP8_ROWS, compiled.FP8_HIDDEN // WORLD, compiled.FP8_DIM, "e4m3"
    for operand in ("e4m3", "e5m2"):
        gathered = AllGatherGemm(*sizes, "m", WORLD, scales="tensor", operand=operand)
        scattered = GemmReduceScatter(*sizes, "scattered", WORLD, scales="tensor", operand=operand)
        kept |= {gathered: usual(gathered, "scaled_decomposed"), scattered: usual(scattered, "scaled_words")}
    db = database(tmp_path / "a.db", kept)
    for status, emitted, losses, right in ranks.run(compiled.trained_in_fp8, db, backend, timeout=200):
        assert emitted == 4, "two layers, forward and backward"
        assert (status.taken, status.left) == (4 * compiled.STEPS, 0), str(status)
        assert losses == pytest.approx(right, rel=2e-3) and losses[1] < losses[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_graph_in_fp8_by_rows_has_the_values_of_products_in_float32(
    ranks: Ranks, tmp_path: Path, backend: str
) -> None:
    from tests.torch import compiled

    gathered = AllGatherGemm(compiled.FP8_ROWS, compiled.FP8_HIDDEN, compiled.FP8_DIM, "e4m3", "m", WORLD, scales="row")
    sizes = compiled.FP8_ROWS, compiled.FP8_DIM, compiled.FP8_HIDDEN
    scattered = GemmReduceScatter(*sizes, "e4m3", "scattered", WORLD, scales="row")
    kept: dict[Problem, Config] = {gathered: usual(gathered, "scaled_decomposed"), scattered: usual(scattered, "scaled_words")}
    for status, emitted, (right, ours) in ranks.run(compiled.two_layers_by_rows, database(tmp_path / "a.db", kept), backend):
        assert (emitted, status.taken, status.left) == (2, 2, 0), str(status)
        assert (len(right), right.shape) == (compiled.FP8_ROWS // WORLD, ours.shape)
        assert float((ours.float() - right.float()).norm() / right.float().norm()) < 1e-2


@pytest.mark.volume
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_llama_block_trains_as_the_whole_one(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    from tests.torch import compiled

    for status, emitted in ranks.run(compiled.trained, winners(tmp_path, 2 * compiled.ROWS), "block", backend, timeout=200):
        assert emitted >= 8, str(status)
        assert status.taken + status.left == emitted, str(status)
        assert status.taken >= 2, str(status)
