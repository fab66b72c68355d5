"""A comparison: its rows, their common conditions, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotax.core.problem import Problem
from autotax.hardware import links_us
from autotax.operators import named
from autotax.report import documents, tables, taxes
from autotax.runner import Candidate, Effort, Measurement, Overlap
from autotax.runner.measurement import TimeIsUp
from autotax.spaces import space_for
from autotax.tuner import Comparison, compare
from autotax.tuner.comparison import Choice, shown_variants
from autotax.tuner.tuning import TimeLimit
from tests.report.test_tables import seen
from tests.tuner.shared import DECODE, GEMM, H200
from tests.tuner.synthetic import Landscape, SyntheticRunner


def compared(
    landscape: Landscape | SyntheticRunner, problem: Problem = GEMM, variants: tuple[str, ...] = (),
    limit: TimeLimit | None = None,
) -> Comparison:  # fmt: skip
    space = space_for(problem, H200)
    chosen = {variant: Choice(space.default(variant), "default") for variant in space.variants}
    return compare(
        problem,
        hardware=H200,
        runner=landscape if isinstance(landscape, SyntheticRunner) else SyntheticRunner(landscape, noise=0.0),
        tuned=chosen["push" if problem is GEMM else "single"],
        baseline=chosen["bsp"],
        variants=[chosen[variant] for variant in variants],
        limit=limit,
    )


def test_the_ladder_of_flash_decode_has_a_row_a_step() -> None:
    admitted = list(space_for(DECODE, H200).variants)
    shown = shown_variants(DECODE, H200, admitted, every=False)
    rungs = [rung.name for rung in named(DECODE.op).ladder if rung.name in admitted]
    assert shown == rungs and {"bsp", "fused", "single"} <= set(shown)
    assert shown_variants(GEMM, H200, ["bsp", "push"], every=False) == []
    assert shown_variants(GEMM, H200, ["bsp", "push"], every=True) == ["bsp", "push"]
    us = {"bsp": 30.0, "fused": 25.0, "single": 20.0}
    runner = SyntheticRunner(lambda config: us.get(config.variant, 27.0), noise=0.0)
    comparison = compared(runner, DECODE, tuple(shown))
    assert [row.name for row in comparison.rows] == ["autotax", "bsp-graph", "bsp-eager", *shown]
    rows = {row.name: row for row in comparison.rows}
    assert rows["single"].measurement is rows["autotax"].measurement
    assert sum(runner.asked.values()) == len(shown) + 1, "each is measured once, and BSP eager too"
    assert rows["bsp"].measurement is rows["bsp-graph"].measurement is not rows["bsp-eager"].measurement
    assert (rows["single"].speedup, rows["single"].source) == (pytest.approx(1.5), "default")


class Endless(SyntheticRunner):
    """Stands in for ranks that measure until the time is up."""

    def measure(
        self, problem: Problem, candidates: Sequence[Candidate], effort: Effort, overlap: Overlap | None = None
    ) -> list[Measurement]:
        assert effort.within_s is not None and effort.within_s <= 0.1
        self.asked.update(["job"])
        raise TimeIsUp("rank 1 at 'compile'")


def test_a_time_limit_leaves_one_line() -> None:
    runner = Endless(lambda _: 1.0)
    comparison = compared(runner, limit=TimeLimit(0.1))
    assert runner.asked == {"job": 1} and comparison.rows == () and not comparison.ok
    assert comparison.error == "the time limit of 0.1 s came first (rank 1 at 'compile'): give it more time"
    assert seen(tables.comparison(comparison), 300).count("\n") == 1 and seen(tables.taxes(comparison), 300).count("\n") == 1


def test_the_bound_is_the_greater_of_the_product_and_the_links() -> None:
    us: dict[str, float | str] = {"push": 110.0, "bsp": 140.0, "torch": 120.0, "product": 100.0}
    document = documents.of_comparison(compared(lambda config: us.get(config.variant, 150.0)))
    assert document["best_peer"] in ("torch-graph", "torch-eager")
    assert document["speedup_vs_best_peer"] == pytest.approx(120 / 110)
    assert document["bound_us"] == pytest.approx(100.0) and document["over_bound"] == pytest.approx(1.1)
    assert document["above_bound_us"] == pytest.approx(10.0)
    assert document["links_us"] == pytest.approx(0.75 * 512 * 8192 * 2 / 375e3)
    us["product"] = 10.0
    assert documents.of_comparison(compared(lambda config: us.get(config.variant, 150.0)))["bound_us"] == document["links_us"]
    us["product"] = "crash"
    assert taxes.bound_of(compared(lambda config: us.get(config.variant, 150.0))) is None
    assert taxes.bound_of(compared(lambda _: 10.0, DECODE)) is None


def test_the_bound_of_flash_decode_is_the_cache_at_the_slowest_ranks_copy_rate() -> None:
    comparison = compared(lambda _: 10.0, DECODE)
    rated = [
        replace(row, measurement=replace(row.measurement, conditions={"copy_gbps": [4200, 4000]})) for row in comparison.rows
    ]
    nbytes = 2 * DECODE.batch * DECODE.kv_heads * DECODE.shard_len * DECODE.head_dim * 2
    document = documents.of_comparison(replace(comparison, rows=tuple(rated)))
    assert document["bound_us"] == document["memory_us"] == pytest.approx(nbytes / 4000e3)


def test_means_are_geometric_and_leave_out_what_failed() -> None:
    def made(push: float | str, bsp: float) -> Comparison:
        us: dict[str, float | str] = {"push": push, "bsp": bsp, "torch": 1000.0, "product": 10.0}
        return compared(lambda config: us.get(config.variant, 1000.0))

    count, over_bsp, over_peer = taxes.means([made(100.0, 200.0), made(100.0, 800.0), made("hang", 100.0)], GEMM.op)
    assert count == 2 and over_bsp == over_peer == pytest.approx(4.0)
    assert not made("hang", 100.0).ok and taxes.means([], GEMM.op) == (0, None, None)


def test_no_row_is_below_a_bound_that_is_shown() -> None:
    """A comparison omits a bound that some row beats.

    A fused kernel may be faster than the product alone. Caches that hold the inputs may exceed the links' rate.
    """
    us: dict[str, float | str] = {"push": 90.0, "bsp": 140.0, "torch": 120.0, "product": 100.0}
    comparison = compared(lambda config: us.get(config.variant, 150.0))
    assert taxes.bound_of(comparison) is None and documents.of_comparison(comparison)["bound_us"] is None
    us["push"] = us["product"] = 5.0
    fast = compared(lambda config: us.get(config.variant, 150.0))
    assert taxes.known_us(fast) == {} and documents.of_comparison(fast)["links_us"] is None
    us["bsp"], us["push"] = 4.0, 200.0
    assert taxes.bound_of(compared(lambda config: us.get(config.variant, 150.0))) is None, "whichever row it is"


def test_links_of_h100_are_known() -> None:
    h100 = replace(H200, device="NVIDIA H100 80GB HBM3")
    assert links_us(375_000, 1, h100) == {"links": pytest.approx(1.0)} and links_us(1, 1, replace(h100, device="none")) == {}


def test_rows_of_graphs_are_in_place_and_tell_both_figures() -> None:
    class Both(SyntheticRunner):
        def one(self, candidate: Candidate, common: list[float]) -> Measurement:
            measurement = super().one(candidate, common)
            more = {"back_to_back_us": 80.0, "between_us": 17.0} if candidate.conditions.in_place else {}
            return replace(measurement, conditions=measurement.conditions | more)

    comparison = compared(Both(lambda _: 100.0, noise=0.0))
    rows = {row["name"]: row for row in documents.of_comparison(comparison)["rows"]}
    assert (rows["autotax"]["back_to_back_us"], rows["bsp-eager"]["back_to_back_us"]) == (80.0, None)
    assert (rows["bsp-graph"]["speedup_vs_bsp"], rows["bsp-eager"]["speedup_vs_bsp"]) == (1.0, None), "no ratio of two kinds"
    assert comparison.peer and comparison.peer.name == "bsp-graph"
    assert rows["bsp-graph"]["interval_us"] == pytest.approx([100.0, 100.0])
    text = seen(tables.comparison(comparison), 200)
    assert "in place us [95 %]" in text and "back to back us" in text
    assert "100.0 [100.0, 100.0]" in text and "80.00" in text and "100.0 (eager)" in text
