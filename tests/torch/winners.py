"""Databases of winners for the problems of torch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.software import environment
from autotax.spaces import space_for
from tests.db.conftest import keep_winner

WORLD = 2
ONE = Config.of("decomposed", products="one", comm=1, warm=0)
TWO = Config.of("decomposed", products="two", comm=0, warm=0)


def gather(m: int, n: int, k: int, **more: str) -> AllGatherGemm:
    return AllGatherGemm(m, n, k, "fp32", more.pop("shard", "m"), WORLD, **more)


def scatter(m: int, n: int, k: int, weight: str = "nk") -> GemmReduceScatter:
    return GemmReduceScatter(m, n, k, "fp32", "scattered", WORLD, weight)


def usual(problem: Problem, variant: str, backend: str = "cpu") -> Config:
    return space_for(problem, detect(backend)).default(variant)


def database(path: Path, winners: Mapping[Problem, Config], backend: str = "cpu") -> str:
    """A database with winners as if tuned on these ranks."""
    here = detect(backend)
    with Store.open(f"sqlite:///{path}") as store:
        for problem, config in winners.items():
            assert space_for(problem, here).why_not(config) is None, config
            keep_winner(store, problem, config, here, environment(backend), Conditions.usual(here.on_gpu))
    return str(path)
