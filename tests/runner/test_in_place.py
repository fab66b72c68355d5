"""Figures in place, on CPU ranks: what calls add to the work around them."""

from __future__ import annotations

import statistics

import pytest
import torch

from autotax.core.conditions import ON_CPU, Conditions
from autotax.hardware import detect
from autotax.operators.problems import GemmReduceScatter
from autotax.runner import Effort, LiveRunner
from autotax.runner.benchmark import Batch, InputCache
from autotax.runner.surroundings import Surroundings
from tests.runner.small import CPU, GEMM, measure

IN_PLACE = Conditions("in-place", "warm")
EFFORT = Effort(samples=12, seconds=5.0, fewest=12)
ATTEMPTS = 8
"""A busy machine disturbs some of them."""
HASTE_S = 5.0
DAWDLES_US = 20_000.0
"""Microseconds that a call of the candidate `dawdles` sleeps."""


def test_a_figure_is_what_calls_add(runner: LiveRunner) -> None:
    for _ in range(ATTEMPTS):
        quick, slow = measure(runner, "bsp", "dawdles", effort=EFFORT, conditions=IN_PLACE)
        if (slow.latency_us or 0.0) >= 0.9 * DAWDLES_US and all(m.conditions["between_us"] < DAWDLES_US for m in (quick, slow)):
            break
    assert (quick.status, slow.status) == ("ok", "ok"), (quick.error, slow.error)
    assert slow.latency_us and quick.latency_us
    assert slow.latency_us >= 0.9 * DAWDLES_US, "all of a call is in the difference"
    assert slow.latency_us > quick.latency_us
    assert slow.back_to_back_us and slow.back_to_back_us >= DAWDLES_US
    for measurement in (quick, slow):
        assert measurement.conditions.items() >= IN_PLACE.to_dict().items() and measurement.conditions["behind"] == "norm"
        assert 0 < measurement.conditions["between_us"] < DAWDLES_US, "the work around the calls"
        assert measurement.latency_us == statistics.median(measurement.rounds) and len(measurement.rounds) == 12


def test_both_kinds_and_eager_calls_share_a_job(runner: LiveRunner) -> None:
    from autotax.core.config import Config
    from autotax.runner import Candidate

    candidates = [Candidate(Config("bsp"), conditions) for conditions in (IN_PLACE, ON_CPU)]
    placed, alone = runner.measure(GEMM, candidates, EFFORT)
    assert "back_to_back_us" in placed.conditions and not {"back_to_back_us", "behind"} & alone.conditions.keys()
    assert len(placed.rounds) == len(alone.rounds) and alone.back_to_back_us is None


@pytest.mark.parametrize(("variant", "status"), [("wrong_element", "wrong_result"), ("does_not_compile", "compile_error")])
def test_what_is_wrong_is_so_in_place(runner: LiveRunner, variant: str, status: str) -> None:
    bad, good = measure(runner, variant, "bsp", conditions=IN_PLACE)
    assert (bad.status, good.status) == (status, "ok"), (bad.error, good.error)


def test_a_soak_follows_figures_in_place(runner: LiveRunner) -> None:
    (measurement,) = measure(runner, "bsp", effort=Effort(samples=4, seconds=0.05, soak=8), conditions=IN_PLACE)
    assert measurement.status == "ok" and measurement.conditions["soak"] == 8, measurement.error


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("late", "crash", "rank 1 failed at 'candidate 0: rehearse'"),
        ("exits_late", "crash", "rank 1 exited with code 3"),
        ("sleeps_late", "hang", "rank 1 at 'sampling'"),
    ],
)
def test_a_rank_that_fails_leaves_no_peer_in_the_sum_around_its_calls(
    runner: LiveRunner, fault: str, status: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if status == "hang":
            patch.setattr(runner, "deadline_s", HASTE_S)
        (bad,) = measure(runner, fault, effort=Effort(samples=60, seconds=0.1, fewest=60), conditions=IN_PLACE)
    assert bad.status == status and cause in (bad.error or ""), bad.error
    (after,) = measure(runner, "bsp", conditions=IN_PLACE)
    assert after.status == "ok", after.error


class Calls:
    """An operator that notes its calls."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, *_: torch.Tensor) -> None:
        self.log.append("call")


def test_a_product_stands_before_each_call_and_after_the_last() -> None:
    log: list[str] = []
    inputs = InputCache(GEMM, 0, torch.device("cpu"), CPU)

    def around(number: int) -> None:
        log.append(f"product {number}")

    Batch(Calls(log), inputs, [0, 2], False, around).run()  # type: ignore[arg-type]
    assert log == ["product 0", "call", "product 1", "call", "product 2"]
    log.clear()
    Batch(None, inputs, [0, 2], False, around).run()
    assert log == ["product 0", "product 1", "product 2"]


def test_gathers_stand_behind_a_sum_and_a_norm() -> None:
    """Nothing collective runs at construction, where another rank may fail; then each call of the surroundings sums once."""
    sums: list[tuple[torch.Size, torch.Size]] = []

    def reduce_scatter(own: torch.Tensor, partial: torch.Tensor) -> None:
        sums.append((own.shape, partial.shape))

    problems = {True: GEMM, False: GemmReduceScatter(48, 40, 32, "fp32", world_size=2)}
    for behind_norm, problem in problems.items():
        sums.clear()
        inputs = InputCache(problem, 0, torch.device("cpu"), CPU, reduce_scatter)
        around = inputs.surroundings
        assert not sums
        for number in range(3):
            around(number)
        assert sums == [((4, 64), (8, 64))] * 3 * behind_norm
    assert len(Surroundings(torch.device("cpu"), 0, reduce_scatter, world_size=3)._partial) == 9, "equal parts of 3 ranks"


def test_the_product_before_a_sum_leaves_nothing_of_it_in_the_cache() -> None:
    """All weights take three times the cache. With a reduce-scatter one product alone reads more than the cache holds."""
    square, cache = 64 * 64 * 4, 7 * 64 * 64 * 4
    alone = Surroundings(torch.device("cpu"), 3 * cache)._weights
    summed = Surroundings(torch.device("cpu"), 3 * cache, lambda *_: None)._weights
    assert {weight.nbytes for weight in alone} == {square} and len(alone) == 21
    assert len(summed) == 6 and all(cache < weight.nbytes == 11 * square for weight in summed)


def test_weights_rotate_and_are_not_in_the_cache() -> None:
    around = Surroundings(torch.device("cpu"), nbytes=5 * 64 * 64 * 4)
    weights = around._weights
    assert len(weights) == 5 and len({weight.data_ptr() for weight in weights}) == 5
    outputs = []
    for number in range(6):
        around(number)
        outputs.append(around._out.clone())
    assert torch.equal(outputs[0], outputs[5]) and not any(torch.equal(outputs[0], other) for other in outputs[1:5])
    assert detect("cpu").cache_bytes == 0 and len(Surroundings(torch.device("cpu"), 0)._weights) == 2
