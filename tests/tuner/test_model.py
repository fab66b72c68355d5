"""The model that chooses configs: a prior, a Gaussian process on measurements, and the expected gain of more trials."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy
from sqlalchemy.engine import Engine

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.runner import Candidate, Measurement
from autotax.spaces import space_for
from autotax.tuner import Settings
from autotax.tuner.model import Model, Prior, Trees, prior_for, usual_sampler
from autotax.tuner.search import ENOUGH, SLOW, Search
from tests.tuner.shared import CPU, DECODE, GEMM, H200, Ear, gemm_landscape, run
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("without_syncing")
SCATTER = GemmReduceScatter(512, 7168, 2048, world_size=4)
PUSH = space_for(GEMM, H200).only(["bsp", "push"])


def smooth(config: Config) -> float:
    """Best where push has 64 x 128 tiles, 4 programs that send and 2 stages: no seed."""
    if config.variant == "bsp":
        return 200.0
    sizes = config["block_m"] / 64, config["block_n"] / 128, config["comm"] / 4
    steps = [*np.log2(sizes), config["num_stages"] - 2]
    return 100.0 * (1 + 0.05 * float(np.abs(steps).sum()))


def test_what_is_measured_leads_to_better_configs_than_chance_does() -> None:
    model = Model(PUSH, Prior(GEMM, H200, None), 0, PUSH.seeds())
    trials: list[Config] = []
    for _ in range(30):
        config = model.suggest([config not in trials for config in model.configs], [])
        assert config and config not in trials
        model.tell(config, smooth(config))
        trials.append(config)
    drawn = [config for config in model.configs[:300] if config.variant == "push"]
    assert min(map(smooth, trials)) < np.quantile([smooth(config) for config in drawn], 0.02)
    assert np.mean([smooth(c) for c in trials[20:]]) < np.mean([smooth(c) for c in trials[:10]])


def test_what_is_pending_is_believed_so_that_others_are_asked_for() -> None:
    model = Model(PUSH, Prior(GEMM, H200, None), 0, PUSH.seeds())
    model.tell(PUSH.default("push"), 100.0)
    pending: list[Config] = []
    for _ in range(4):
        config = model.suggest([config not in pending for config in model.configs], pending)
        assert config
        pending.append(config)
    first, *others = pending
    again = model.suggest(np.ones(len(model.configs), bool), [])
    assert again == first, "nothing was told"
    assert not set(others) & set(PUSH.neighbours(first)), "what is near tells the same"


def test_little_is_expected_once_all_is_as_predicted() -> None:
    model = Model(PUSH, prior_for(GEMM, H200), 0, PUSH.seeds())
    free = lambda: np.array([config not in trials for config in model.configs])  # noqa: E731
    trials: set[Config] = set()
    gains = []
    prior = prior_for(GEMM, H200)
    for _ in range(24):
        config = model.suggest(free(), [])
        assert config
        trials.add(config)
        model.tell(config, float(np.exp(prior([config])[0])))
        gains.append(model.gain(free()))
    assert gains[-1] < 0.01 and gains[-1] < gains[0]


def test_what_was_expected_in_vain_is_expected_no_longer() -> None:
    model = Model(PUSH, Prior(GEMM, H200, None), 0, PUSH.seeds())
    trials: set[Config] = set()
    free = lambda: np.array([config not in trials for config in model.configs])  # noqa: E731
    gains = []
    for us in (100.0, *range(101, 125)):
        config = model.suggest(free(), [])
        assert config
        trials.add(config)
        model.tell(config, us)
        gains.append(model.gain(free()))
    assert gains[1] > 0.3, "nothing is known yet, and one trial is no reason to give up"
    assert gains[-1] < 0.2, "0.83 if nothing were learnt of it"
    doubted = model.tempered(0.1)
    config = model.suggest(free(), [])
    assert config
    model.tell(config, 50.0)
    assert model.tempered(0.1) > 2 * doubted, "what was won makes more likely that there is more"


def test_trees_predict_as_they_are_written(tmp_path: Path) -> None:
    """One tree of two leaves: at most 4 rows of a tile or more."""
    def tree(*rows: list[float]) -> np.ndarray:
        return np.array(rows)

    trees = Trees(
        ("c.block_m", "variant=push"), ("NVIDIA H200",), tree([0, 0, 0]).astype(np.int16), tree([4.0, 0, 0]),
        tree([1, 1, 2]).astype(np.int16), tree([2, 1, 2]).astype(np.int16), tree([0.0, 0.5, -0.5]), 1, 0.1,
    )  # fmt: skip
    trees.save(tmp_path / "trees.npz")
    read = Trees.load(tmp_path / "trees.npz")
    assert read.predict(np.array([[3.0, 1], [5.0, 0]], np.float32)).tolist() == [0.5, -0.5]
    assert (read.names, read.error) == (trees.names, 0.1)


H100 = replace(H200, device="NVIDIA H100 80GB HBM3", memory_gib=79, l2_bytes=50 << 20)
FP8 = AllGatherGemm(512, 7168, 8192, "e4m3", world_size=2, scales="row")
SUMS = GemmReduceScatter(512, 8192, 4096, "e4m3", world_size=2, scales="block")

LEARNT = GEMM, DECODE, FP8, replace(SCATTER, world_size=2), SUMS, replace(SUMS, scales="row")


@pytest.mark.parametrize("problem", LEARNT, ids=str)
def test_the_shipped_prior_ranks_configs_of_a_problem_and_says_nothing_of_other_devices(problem: Problem) -> None:
    """GEMM + Reduce-Scatter was recorded on H100 alone."""
    for hardware in (H100,) if isinstance(problem, GemmReduceScatter) else (H200, H100):
        space, prior = space_for(problem, hardware), prior_for(problem, hardware)
        logs = prior(space.seeds())
        assert not prior.flat and np.isfinite(logs).all() and 1.0 < np.exp(logs).min() < 1000.0 and logs.std() > 0.01
    amd = replace(H200, backend="rocm", device="AMD Instinct MI300X", target="hip:gfx942")
    assert prior_for(problem, amd).flat


@pytest.mark.parametrize("problem", [FP8, SUMS, replace(SUMS, scales="tensor", operand="e5m2")], ids=str)
def test_winners_in_e4m3_are_judged_at_other_sizes(problem: Problem) -> None:
    """A look-up of other rows asks for the roofline of those, which took an All-Gather + GEMM in e4m3 without scales."""
    assert registry.of(problem).roofline_us(problem) < registry.of(problem).roofline_us(replace(problem, m=65536))  # type: ignore


@pytest.mark.volume
def test_the_sampler_gp_learns(store: Store) -> None:
    """Optuna's Gaussian process knew the variant alone, and drew the rest at random."""
    def landscape(config: Config) -> float:
        return smooth(config) if config.variant in ("bsp", "push") else 300.0

    means = {}
    for sampler in ("gp", "random"):
        latest: list[float] = []
        for seed in range(4):
            runner = SyntheticRunner(landscape, noise=0.001)
            run(store, runner, trials=50, sampler=sampler, resume=False, variants=("push",), soak=0, seed=seed)
            latest += [landscape(config) for config in runner.searched[-15:]]
        means[sampler] = np.mean(latest)
    assert means["gp"] < 0.95 * means["random"]


def test_most_of_what_the_model_asks_for_was_foreseen() -> None:
    """Idle compilers would have compiled these configs in advance."""
    prior = prior_for(DECODE, H200)
    search = Search(space_for(DECODE, H200), Settings(sampler="gp"))
    foreseen: set[Config] = set()
    held = []
    for at in range(24):
        config = search.ask()
        assert config
        if at >= 4:
            held.append(config in foreseen)
        search.tell(Measurement(Candidate(config), "ok", None, ((float(np.exp(prior([config])[0])),),)))
        upcoming = list(search.upcoming(16))
        assert len(upcoming) == len(set(upcoming)) > 8 and not {suggestion.digest for suggestion in upcoming} & search.seen
        foreseen |= set(upcoming)
    assert np.mean(held) > 0.8


def test_a_search_ends_by_itself_and_says_so(store: Store) -> None:
    prior = prior_for(DECODE, H200)

    def landscape(config: Config) -> float:
        return float(np.exp(prior([config])[0]))

    ear, runner = Ear(), SyntheticRunner(landscape, noise=0.001)
    verdict = run(store, runner, DECODE, trials=60, sampler="gp", ends_below=0.007, listener=ear)
    assert 12 <= len(runner.searched) < 60 and verdict.winner
    (message,) = [notice for notice in ear.notices if "ended after" in notice]
    assert f"after {len(runner.searched)} trials" in message and "less than 0.7%" in message
    assert verdict.accounts["gain"] < 0.007 and ear.heard[-1].gain == verdict.accounts["gain"]
    assert store.runs()[-1].settings["ends_below"] == 0.007
    more = SyntheticRunner(landscape, noise=0.001)
    run(store, more, DECODE, trials=30, sampler="gp", resume=False)
    assert len(more.searched) == 30, "trials that are asked for are all measured"


@pytest.mark.parametrize("skips", [True, False])
def test_what_the_prior_says_is_slow_is_left_out(skips: bool) -> None:
    space, prior = space_for(GEMM, H200), prior_for(GEMM, H200)
    search = Search(space, Settings(sampler="gp"))
    search.slow = SLOW if skips else math.inf
    latencies: list[float] = []
    late: list[float] = []
    for at in range(40):
        config = search.ask()
        assert config
        us = float(np.exp(prior([config])[0]))
        if at >= ENOUGH and config.variant != "bsp" and prior.knows(config.variant):
            late.append(us / min(latencies))
        latencies.append(us)
        search.tell(Measurement(Candidate(config), "ok", None, ((us,),)))
    assert (max(late) < 1.4) is skips
    assert not Prior(GEMM, H200, None).knows("push") and prior.knows("push") and not prior.knows("mine")


def test_the_model_searches_where_a_prior_was_learnt(store: Store) -> None:
    for problem, hardware, sampler in ((GEMM, H200, "gp"), (GEMM, CPU, "tpe"), (SCATTER, H200, "gp"), (SCATTER, CPU, "tpe")):
        assert usual_sampler(problem, hardware) == sampler
    run(store, SyntheticRunner(gemm_landscape), trials=2, sampler=None, soak=0)
    assert store.runs()[-1].settings["sampler"] == "gp"


def test_efforts() -> None:
    assert (Settings.of_effort("quick").trials, Settings.of_effort("full").ends_below) == (24, None)
    assert Settings.of_effort("normal", trials=7).trials == 7
    assert Settings.from_dict(Settings.of_effort("quick").to_dict()).ends_below == 0.015
    with pytest.raises(UsageError, match="effort is 'most'; allowed are quick, normal, full"):
        Settings.of_effort("most")


@pytest.mark.usefixtures("optunas_tables")
def test_the_database_work_of_a_trial_does_not_grow_with_the_run(store: Store) -> None:
    """Optuna on SQLite read the trials before it at every suggestion."""
    statements: list[int] = []
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    class Counting(SyntheticRunner):
        def expect(self, *arguments: object) -> int:
            statements.append(count)
            return super().expect(*arguments)  # type: ignore[arg-type]

    sqlalchemy.event.listen(Engine, "before_cursor_execute", note)
    try:
        run(store, Counting(gemm_landscape), trials=60, sampler="tpe", soak=0)
    finally:
        sqlalchemy.event.remove(Engine, "before_cursor_execute", note)
    counts = [after - before for before, after in pairwise(statements)]
    early, late = max(counts[: len(counts) // 3]), max(counts[len(counts) // 3 :])  # of variants with the most parameters
    assert late <= 1.25 * early, (early, late)
