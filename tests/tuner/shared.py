"""Helpers of the tuner's tests: a store, problems, a landscape, and one call that tunes."""

from __future__ import annotations

from functools import partial
from typing import Any

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import Hardware, detect
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.software import environment
from autotax.tuner import Listener, Progress, Settings, Verdict, tune
from autotax.tuner.finalists import Measure
from tests.tuner.synthetic import SyntheticRunner

CPU = detect("cpu")
H200 = Hardware("cuda", "NVIDIA H200", "cuda:90", 4, 140, 132, 232448, 60 << 20, "peer access 12/12 pairs")
GEMM = AllGatherGemm(512, 7168, 8192, "bf16", "m", 4)
DECODE = FlashDecode(1, 64, 8, 128, 32768, "bf16", 4)


class Ear:
    """Records the events of a run."""

    def __init__(self) -> None:
        self.heard: list[Progress] = []
        self.notices: list[str] = []

    def progress(self, progress: Progress) -> None:
        self.heard.append(progress)

    def notice(self, text: str) -> None:
        self.notices.append(text)


def run(
    store: Store, runner: SyntheticRunner, problem: Problem = GEMM, hardware: Hardware = H200, *,
    listener: Listener | None = None, sampler: str | None = "tpe", **settings: Any,
) -> Verdict:  # fmt: skip
    """Made-up landscapes are not those of a prior: unless a test asks for it, no model searches them."""
    return tune(
        problem,
        hardware=hardware,
        runner=runner,
        store=store,
        environment=environment("cpu"),
        settings=Settings(sampler=sampler, **settings),
        listener=listener,
    )


def measuring(runner: SyntheticRunner) -> Measure:
    return partial(runner.measure, GEMM)


def gemm_landscape(config: Config) -> float | str:
    """Push with 128 x 256 tiles is best; a fifth of the space fails in some way."""
    if config.variant == "bsp":
        return 130.0
    if config.variant == "decomposed":
        return 128.0 + config["comm"] / 64
    if config["block_m"] == 256:
        return "compile_error"
    if config.values.get("block_k") == 128:
        return "wrong_result"
    base = {"copy_engine": 125.0, "push": 100.0}.get(config.variant, 400.0)
    tiles = abs(config["block_m"] - 128) / 128 + abs(config["block_n"] - 256) / 256 + abs(config["num_stages"] - 3) / 8
    comm = abs(config["comm"] - 16) / 64 if config.variant == "push" else 0.0
    return base * (1 + tiles + comm)
