"""torchtitan on two CPU ranks, by its documented override. It runs where torchtitan is installed:

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser
    python -m pytest tests/engines/test_torchtitan.py
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.runner.ranks import Ranks

if importlib.util.find_spec("torchtitan") is None:  # before what takes long to import
    pytest.skip("torchtitan is not installed", allow_module_level=True)

from tests.engines import titan
from tests.engines.titan import DIM, HIDDEN, LAYERS, QKV, ROWS, STEPS
from tests.torch.conftest import ranks  # noqa: F401 - the same processes
from tests.torch.test_documented import lines_of
from tests.torch.winners import ONE, WORLD, database, gather, scatter, usual

CALLS_OF_A_LAYER = 10
"""QKV and w1 with w3: forward, and the gradients of input and weight; attention output and w2: forward, and that of the input."""


def test_the_documented_options_name_the_override() -> None:
    from torchtitan.config.override import parse_cli_imports

    written = [shlex.split(line) for line in lines_of("torchtitan").splitlines()]
    assert {option for option, _ in written} == {"--override.imports"}
    named = "autotax.engines.torchtitan.tuned"
    assert [parse_cli_imports([target]) for _, target in written] == [[named], [(named, {"db": "winners.db"})]]


def test_a_small_llama_trains_as_with_torchtitans_own_collectives(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    forward: list[Problem] = [scatter(ROWS, DIM, DIM // WORLD), scatter(ROWS, DIM, HIDDEN)]
    kept: dict[Problem, Config] = {gather(ROWS, columns, DIM): ONE for columns in (QKV, HIDDEN)}
    kept |= {problem: usual(problem, "decomposed") for problem in forward}
    for default, fused, status in ranks.run(titan.trained, database(tmp_path / "a.db", kept), timeout=250):
        assert fused == pytest.approx(default, rel=1e-5)
        assert fused[-1] < fused[0] - 0.1, "it learns"
        assert status.taken + status.left == CALLS_OF_A_LAYER * LAYERS * STEPS, str(status)
        assert status.taken == 4 * LAYERS * STEPS, f"all products of the forward, {status}"
