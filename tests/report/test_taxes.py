"""The parts of bulk-synchronous time: they add up, and all of them were measured."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.report import taxes as compared
from autotax.report.taxes import bsp_us, taxes, won_back

PUBLISHED = sorted((Path(__file__).parents[2] / "results/h200x4").glob("*/compare.json.xz"))
assert PUBLISHED
GEMM, DECODE = AllGatherGemm(512, 7168, 8192, world_size=4), FlashDecode(1, 64, 8, 128, 32768, world_size=4)


def a_comparison(problem: AllGatherGemm | FlashDecode = GEMM, bound: dict[str, float] | None = None, **rows: float | None) -> Any:
    """Rows by name, `_` for `-`; a row without a latency failed."""
    entries = [{"name": name.replace("_", "-"), "latency_us": us, "verified": us is not None} for name, us in rows.items()]
    return {"problem": problem.to_dict(), "rows": entries} | (bound or {})


def parts_of(document: Any) -> dict[str, float]:
    return {tax.name: pytest.approx(tax.us) for tax in taxes(document)}


def test_a_gemm_pays_for_what_is_not_beside_it_and_for_its_library() -> None:
    document = a_comparison(GEMM, {"links_us": 17.0}, autotax=110.0, bsp_graph=150.0, bsp_eager=154.0, cublas=85.0)
    assert parts_of(document) == {"work": 85.0, "bulk-synchronous": 17.0, "library": 48.0, "launch": 4.0}
    assert won_back(document) == pytest.approx(40 / 65)


def test_links_that_take_longer_than_the_product_are_the_work() -> None:
    document = a_comparison(GEMM, {"links_us": 90.0}, bsp_graph=200.0, cublas=80.0)
    assert parts_of(document) == {"work": 90.0, "bulk-synchronous": 80.0, "library": 30.0}
    assert won_back(document) is None, "nothing was tuned"


def test_without_known_links_the_gather_is_one_part() -> None:
    assert parts_of(a_comparison(GEMM, bsp_graph=150.0, cublas=85.0)) == {"work": 85.0, "communication": 65.0}


def test_steps_of_the_ladder_are_what_decoding_pays() -> None:
    ladder = {"bsp": 28.0, "gather": 22.0, "fine_grained": 23.0, "fused": 19.0, "single": 20.0, "resident": 16.5, "compact": 17.0}
    rows = {"autotax": 16.0, "bsp_graph": 28.0, "bsp_eager": 30.0} | ladder
    document = a_comparison(DECODE, {"memory_us": 8.0}, **rows)
    document["rows"] = [row | {"name": row["name"].replace("fine-grained", "fine_grained")} for row in document["rows"]]
    assert parts_of(document) == {
        "work": 8.0, "left": 8.5, "rounds": 3.5, "kernels": -1.0, "locality": 4.0, "bulk-synchronous": -1.0, "library": 6.0,
        "launch": 2.0,
    }  # fmt: skip
    assert won_back(document) == pytest.approx(12 / 20)


def test_a_step_that_failed_is_part_of_the_next() -> None:
    document = a_comparison(DECODE, bsp_eager=28.0, gather=None, fused=20.0) | {"conditions": {"mode": "eager"}}
    assert parts_of(document) == {"left": 20.0, "rounds": 0.0, "locality": 8.0}
    assert won_back(document) is None, "on CPU ranks nobody knows the work"


def test_eager_calls_are_held_against_eager_ones() -> None:
    rows = {"autotax": 110.0, "bsp_graph": 150.0, "bsp_eager": 160.0, "cublas": 85.0}
    document = a_comparison(GEMM, {"links_us": 17.0}, **rows) | {"conditions": {"mode": "eager"}}
    assert parts_of(document) == {"work": 85.0, "bulk-synchronous": 17.0, "library": 58.0}
    assert (bsp_us(document), won_back(document)) == (160.0, pytest.approx(50 / 75))


def test_without_bsp_there_is_nothing_to_tell() -> None:
    document = a_comparison(GEMM, bsp_graph=None, autotax=1.0, cublas=1.0)
    assert (taxes(document), bsp_us(document), won_back(document)) == ([], None, None)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_parts_of_published_comparisons_add_up(path: Path) -> None:
    documents = compared.read(path)
    assert len(documents) == len(json.loads(lzma.decompress(path.read_bytes()))) > 10
    for document in documents:
        eager = next(row["latency_us"] for row in document["rows"] if row["name"] == "bsp-eager")
        assert sum(tax.us for tax in taxes(document)) == pytest.approx(eager)
