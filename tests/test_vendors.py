"""Variants that others wrote, on CPU ranks: tuned, soaked, stored, exported, looked up, run by modules and plugins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autotax
from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.db import Store, formats, lookup
from autotax.engines import vllm as vllm_plugin
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import LinearAllReduce, LinearReduceScatter
from autotax.operators.declaration import ONLY_OURS_VARIABLE
from autotax.operators.problems import GemmReduceScatter
from autotax.operators.verification import relative_error
from autotax.runner import Candidate, Measurement
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from autotax.tuner.finalists import CHALLENGERS, choose_finalists
from tests.engines import stand_ins
from tests.engines.checks import asking, summed
from tests.nn.checks import normal
from tests.torch.winners import database

N, K, WORLD = 24, 40, 2
VENDOR = Config("all_to_all")


def problem_of(m: int, output: str = "replicated") -> GemmReduceScatter:
    return GemmReduceScatter(m, N, K, "fp32", output, WORLD)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as pool:
        yield pool


def test_a_search_verifies_soaks_stores_and_exports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, problem = f"sqlite:///{tmp_path}/tuned.db", problem_of(16)
    verdict = autotax.tune(problem, variants=("all_to_all",), trials=2, soak=3, db=db, backend="cpu")
    (standing,) = (finalist for finalist in verdict.standings if finalist.measurement.config == VENDOR)
    assert standing.measurement.verified and standing.measurement.conditions["soak"] == 3
    with Store.open(database(tmp_path / "won.db", {problem: VENDOR})) as store:
        formats.write(tmp_path / "won.json", store.entries([problem.op], ["cpu"]))
    (entry,) = formats.read(tmp_path / "won.json")
    assert entry.winner.config == VENDOR
    monkeypatch.setenv(ONLY_OURS_VARIABLE, "1")
    assert "all_to_all" not in space_for(problem, detect("cpu")).variants


def test_look_ups_answer_it_and_with_only_ours_leave_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, here = database(tmp_path / "won.db", {problem_of(16): VENDOR}), detect("cpu")
    lookup.reload()
    assert lookup.lookup(problem_of(16), hardware=here, db=db, conditions=ON_CPU) == VENDOR
    assert lookup.lookup(problem_of(14), hardware=here, db=db, conditions=ON_CPU).match == "nearest"
    monkeypatch.setenv(ONLY_OURS_VARIABLE, "1")
    lookup.reload()
    answer = lookup.lookup(problem_of(16), hardware=here, db=db, conditions=ON_CPU)
    assert answer.variant == "bsp" and "allowed are bsp, " in answer.reason


def served(world: World, db: str) -> list[tuple[str, float]]:
    """The variant that ran, and the worst error of calls of several sizes, of both row-parallel layers."""
    outcomes = []
    for layer_of in (LinearReduceScatter, LinearAllReduce):
        weights = [normal(N, K, seed=rank, dtype=torch.float32) for rank in range(world.size)]
        layer = layer_of(weights[world.rank], None, 16, db=db, sizes=[16])
        errors = []
        for rows in (16, 14, 2, 16):
            xs = [normal(rows, K, seed=100 * rows + rank, dtype=torch.float32) for rank in range(world.size)]
            right = torch.stack([x @ weight.t() for x, weight in zip(xs, weights, strict=True)]).sum(0)
            right = right.chunk(world.size)[world.rank] if layer_of is LinearReduceScatter else right
            errors.append(relative_error(layer(xs[world.rank]), right))
        outcomes.append((str(layer.choices[-1].config), max(errors)))
        layer.close()
    return outcomes


def test_modules_run_it_for_all_sizes_of_its_bucket(ranks: Ranks, tmp_path: Path) -> None:
    db = database(tmp_path / "won.db", {problem_of(16, output): VENDOR for output in ("scattered", "replicated")})
    for outcomes in ranks.run(served, db):
        assert [name for name, _ in outcomes] == [str(VENDOR)] * 2
        assert max(error for _, error in outcomes) < 1e-5


def in_vllm(world: World, db: str) -> int:
    """Sums that vLLM did itself in calls of a layer."""
    with asking(db), stand_ins.vllm():
        vllm_plugin.register()
        layer = stand_ins.RowParallelLinear(K * world.size, N, bias=False, return_bias=False)
        for tokens in (16, 14, 16):
            x = normal(tokens, K, seed=world.rank, dtype=torch.float32)
            torch.testing.assert_close(layer(x), summed(layer, x), rtol=1e-4, atol=1e-4)
        return int(stand_ins.the_group().sums)


def test_a_plugin_runs_it(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(in_vllm, database(tmp_path / "won.db", {problem_of(16): VENDOR})) == [0, 0]


def test_the_fastest_of_others_is_always_a_finalist() -> None:
    def measured(name: str, us: float) -> Measurement:
        return Measurement(Candidate(Config(name)), "ok", samples=((us,) * 3,) * 2)

    ours = [measured(f"ours{number}", 100.0 + number) for number in range(CHALLENGERS + 2)]
    others = [measured("bsp", 200.0), measured("vendor", 150.0), measured("slow_vendor", 160.0)]
    finalists, reserves = choose_finalists([*ours, *others], (), Conditions(), vendors=("vendor", "slow_vendor"))
    names = [candidate.config.variant for candidate in finalists]
    assert names == ["bsp", *(f"ours{number}" for number in range(CHALLENGERS - 1)), "vendor"]
    assert [candidate.config.variant for candidate in reserves][-2:] == [f"ours{CHALLENGERS + 1}", "slow_vendor"]
