"""The page of `autotax report`: its content is right for any texts, and it loads no other file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import RunRecord, TrialRecord, WinnerRecord
from autotax.hardware import Hardware
from autotax.operators import operators
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.report import charts, formatting
from autotax.report.formatting import CPU_NOTE
from autotax.report.page import page
from tests.db.conftest import ENVIRONMENT, HARDWARE, PUSH, a_trial, a_winner
from tests.report.test_ladder import DOCUMENTS

pytestmark = pytest.mark.usefixtures("one_renderer")
MADE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
GEMM, SMALL = AllGatherGemm(512, 7168, 8192, world_size=4), AllGatherGemm(64, 7168, 8192, world_size=4)
ROW = {"name": "autotax", "variant": "push", "verified": True, "latency_us": 80.0, "speedup_vs_bsp": 1.5, "rounds_us": [80.0]}
COMPARED = {
    "problem": GEMM.to_dict(), "hardware": HARDWARE.to_dict(), "best_peer": "torch-graph", "speedup_vs_best_peer": 0.9,
    "rows": [ROW, *(ROW | {"name": name, "latency_us": us} for name, us in (("bsp-graph", 100.0), ("cublas", 70.0)))],
    "bound_us": 70.0, "over_bound": 80 / 70,
}  # fmt: skip
CPUS = replace(HARDWARE, backend="cpu", target="interpreter")


class Page(HTMLParser):
    """The cells of each table, the headings, and all text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self.opened: list[str] = []
        self.in_cell = False
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def row(self, *firsts: str) -> list[str]:
        """The only row that begins with these cells."""
        (row,) = [row for row in self.rows if row[: len(firsts)] == list(firsts)]
        return row


def a_run(problem: Problem = GEMM, hardware: Hardware = HARDWARE) -> RunRecord:
    return RunRecord(1, problem, hardware, ENVIRONMENT, {}, "done", MADE)


def some_trials(problem: Problem = GEMM) -> list[TrialRecord]:
    failed = a_trial(2, Config.of("pull"), status="hang", latency_us=None, verified=False, error="rank 1 <waited>\nfor 2")
    trials = [a_trial(0), a_trial(1, PUSH, latency_us=99.0), failed, replace(failed, number=3)]
    finalist = a_trial(4, latency_us=1.0, conditions={"mode": "graph", "l2": "cold", "stage": "finalists"})
    return [replace(trial, run=a_run(problem)) for trial in [*trials, finalist]]


def made(winners: Sequence[WinnerRecord] = (), trials: Sequence[TrialRecord] = (), compared: Sequence[Any] = ()) -> str:
    return page("my.db", MADE, winners, trials, compared)


def pictures(content: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", content, re.DOTALL)]


def titles(picture: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]


def test_winners_against_bsp() -> None:
    win = a_winner(1, speedup=1.25)
    loss = a_winner(2, problem=SMALL, speedup=0.97, interval_low=0.95, interval_high=0.99, tie=True, created_at=MADE)
    content = made([win, loss], some_trials())
    document = Page(content)
    assert "1 of 2 problems beat BSP. Geometric mean of the winners: 1.10x faster than BSP, from 0.97x to 1.25x." in document.text
    assert "2 winners and 5 trials of my.db, 0 comparisons; 2026-01-02 03:04 UTC" in document.text
    assert "all-gather-gemm, 4 ranks: 4 x NVIDIA H200 (cuda:90, peer access 12/12 pairs); graph calls, cold L2" in document.text
    won = document.row("m 512 x 7168 x 8192")
    assert won[1] == "push block_m=64 comm_ctas=16 order=zigzag"
    assert "push</summary> block_m=64" in content, "folded"
    assert won[2:] == ["120.5", "150.0", "1.25x [1.20, 1.29]", "-", ""]
    assert document.row("m 64 x 7168 x 8192")[4:] == ["0.97x [0.95, 0.99]", "2026-01-02", "a tie"]
    assert 'class="figure loss">0.97x' in content and 'class="figure loss">1.2' not in content
    assert f"geometric mean: {math.sqrt(1.25 * 0.97):.2f}x faster than BSP" in document.text
    order = [row[0] for row in document.rows if row[0].startswith("m ")]
    assert order == ["m 64 x 7168 x 8192", "m 512 x 7168 x 8192"], "by sizes, as numbers"
    assert any("push: 120.5 us" in title for title in titles(pictures(content)[0]))


def test_how_a_search_went() -> None:
    content = made([a_winner(1)], some_trials())
    document = Page(content)
    assert "m 512 x 7168 x 8192: 4 trials, 2 ok, 2 hang" in document.text, "finalists are no trials of the search"
    assert document.row("push", "2")[2:4] == ["2", "99.00"]
    assert document.row("pull", "2")[2:] == ["0", "-", ""]
    assert document.row("2", "hang") == ["2", "hang", "rank 1 <waited> for 2"]
    name, *labels = titles(pictures(content)[1])
    assert name == "Latency of each trial, and the best so far"
    assert sorted(labels) == ["1. ok 120.5 us: push", "2. ok 99.00 us: push", "3. hang: pull", "4. hang: pull"]


def test_a_search_tells_pruned_and_failed_apart_and_shows_its_last_steps() -> None:
    latencies = [100.0, 400.0, 90.0, 101.0, 86.0, 85.0]
    trials = [a_trial(number, latency_us=us) for number, us in enumerate(latencies)]
    trials[1] = replace(trials[1], status="pruned")
    failed = a_trial(9, Config.of("pull"), status="wrong_result", latency_us=None, verified=False)
    (drawn,) = pictures(made([], [replace(trial, run=a_run()) for trial in [*trials, failed]]))
    marks = {
        mark[0].text or "": mark for mark in drawn.iter() if len(mark) and mark[0].tag.endswith("title") and mark is not drawn
    }
    assert [marks[name].tag.partition("}")[2] for name in sorted(marks)] == ["circle", "path", *["circle"] * 4, "path"]
    assert marks["2. pruned 400.0 us: push"].get("fill") is None, "hollow"
    assert marks["7. wrong_result: pull"].get("d") != marks["2. pruned 400.0 us: push"].get("d")
    height = {name: float(mark.get("cy", 0)) for name, mark in marks.items() if mark.tag.endswith("circle")}
    last = height["6. ok 85.00 us: push"] - height["3. ok 90.00 us: push"]
    assert last > 0.2 * charts.SEARCH_HEIGHT, "the last 6 % before the best, on a scale that reaches to +370 %"
    (line,) = (path.get("d", "") for path in drawn.iter() if path.get("d", "").count("L") > 6)
    corners = [tuple(map(float, corner.split(","))) for corner in re.findall(r"[ML]([^ML]+)", line)]
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in pairwise(corners)), "steps, no slopes"
    assert corners == sorted(corners), "never up"
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"85 us (best)", "89.25 us (+5%)", "wrong_result", "trial"} <= set(words)


def test_a_trial_beyond_the_scale_is_marked() -> None:
    trials = [replace(a_trial(number, latency_us=us), run=a_run()) for number, us in enumerate((100.0, 2000.0, 150.0))]
    trials[1] = replace(trials[1], status="pruned")
    marks = {mark[0].text: mark.get("d") for mark in pictures(charts.search(trials))[0].iter() if len(mark) and mark[0].text}
    assert "2. pruned 2,000.0 us: push, beyond the scale" in marks and "3. ok 150.0 us: push" in marks
    assert str(marks["2. pruned 2,000.0 us: push, beyond the scale"]).count("L") == 2, "a triangle"


def test_a_bound_that_a_row_beats_is_not_shown() -> None:
    (row,) = [row for row in Page(made([], [], [COMPARED | {"bound_us": 90.0, "over_bound": 80 / 90}])).rows if "80.00" in row]
    assert row[6:] == ["-", "-", "-"]


def test_bars_of_calls_far_apart_are_in_charts_of_their_own() -> None:
    calls = [charts.Taxed(f"call {us}", us / 2, us * 0.7, us) for us in (2000.0, 20.0, 100.0, 500.0)]
    named = [re.findall(r"(call [\d.]+), work", drawn) for drawn in charts.taxed(calls)]
    assert named == [["call 20.0", "call 100.0"], ["call 2000.0", "call 500.0"]]


def test_a_variant_has_one_colour_everywhere() -> None:
    names = {variant for operator in operators().values() for variant in operator.variants}
    colours = {formatting.colour_of(variant) for variant in names}
    assert len(colours) == len(names), "a page may show all operators"
    assert not {formatting.WORK, formatting.STILL_PAID, formatting.WON_BACK} & colours
    content = made([a_winner(1)], some_trials())
    own, pulls = formatting.colour_of("push"), formatting.colour_of("pull")
    winners, search = [
        re.findall(r'(?:fill|stroke)="(#\w+)"', drawn) for drawn in re.findall(r"<svg.*?</svg>", content, re.DOTALL)
    ]
    assert set(winners) == {own} and set(search) == {own, pulls}
    assert f'background:{own}"></i>push' in content


def test_a_problem_that_nothing_won_is_there() -> None:
    document = Page(made([], some_trials()))
    assert document.row("m 512 x 7168 x 8192") == ["m 512 x 7168 x 8192", "nothing yet", "-", "-", "-", "-", ""]


def test_winners_of_other_sources_are_marked_and_give_way() -> None:
    old, new = a_winner(1, kernel_digest="0" * 16), a_winner(2, PUSH)
    assert "stale" in Page(made([old])).row("m 512 x 7168 x 8192")[-1]
    for order in ([old, new], [new, old]):
        assert Page(made(order)).row("m 512 x 7168 x 8192")[-1] == ""


def test_what_is_measured_elsewhere_or_otherwise_has_a_table_of_its_own() -> None:
    trial = replace(a_trial(0, conditions={"mode": "eager", "l2": "warm"}), run=a_run(FlashDecode(1, 2, 1, 64, 99), CPUS))
    document = Page(made([a_winner(1)], [trial]))
    assert document.opened.count("h2") == 3, "and the glossary"
    assert f"flash-decode, 1 rank: {CPU_NOTE}; eager calls, warm L2" in document.text
    assert document.row("B 1, 2/1 heads, KV 99, dim 64")[1] == "nothing yet"


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "a & b", '"><img src=x>'])
def test_texts_are_texts(hostile: str) -> None:
    trial = replace(a_trial(0, status="crash", latency_us=None, verified=False, error=hostile), run=a_run())
    content = page(hostile, MADE, [], [trial], [])
    document = Page(content)
    assert document.row("1", "crash")[2] == hostile and hostile in document.text
    assert not {"script", "img", "link"} & set(document.opened)


def test_the_page_needs_nothing_else_and_its_pictures_are_whole() -> None:
    content = made([a_winner(1)], some_trials(), DOCUMENTS)
    assert set(re.findall(r"(?:https?:)?//[\w.]+", content)) == {"http://www.w3.org"}, "the name of SVG itself"
    assert not re.search(r"\bsrc\s*=|\bhref\s*=\s*[\"']?[^\"'#]", content) and "script" not in Page(content).opened
    assert len(pictures(content)) == 3
    assert "`" not in content and "Run <code>autotax refresh</code> to" in content


def test_comparisons_are_beside_their_like() -> None:
    failed = COMPARED | {"problem": SMALL.to_dict(), "rows": [ROW | {"verified": False}], "error": "no ranks"}
    failed["speedup_vs_best_peer"] = None
    elsewhere = COMPARED | {"hardware": replace(HARDWARE, count=8).to_dict(), "speedup_vs_best_peer": 2.0}
    content = made([], some_trials(), [COMPARED, failed, elsewhere, *DOCUMENTS[:2]])
    document = Page(content)
    assert ["m 512 x 7168 x 8192", "push", "80.00", "1.50x", "torch-graph", "0.90x", "70.00", "1.14x", "67 %"] in document.rows
    bars = [[bar.partition(", ")[2] for bar in titles(drawn)[1:]] for drawn in pictures(content) if "Where" in titles(drawn)[0]]
    assert bars == [["work: 70.00 us of 100.0", "still paid: 10.00 us of 100.0", "won back: 20.00 us of 100.0"]] * 2
    assert 'class="figure loss">0.90x' in content
    assert document.row("m 64 x 7168 x 8192", "not verified: no ranks")[2:4] == ["-", "-"]
    four, eight = "1.11x slower than the best alternative", "2.00x faster than the best alternative"
    for means in (four, eight):  # each machine by itself
        assert f"geometric means: 1.50x faster than BSP, {means}" in document.text
    assert document.row("B 1, 64/8 heads, KV 32K", "42.00")[-1] == "4.00x", "the ladder"


@pytest.mark.parametrize(("low", "high"), [(1e-12, 1e14), (0.9, 9.9e14), (1.0, 1.3)])
def test_an_axis_is_short_whatever_is_on_it(low: float, high: float) -> None:
    picture = pictures(page("a database", MADE, [a_winner(1, interval_low=low, interval_high=high)], [], []))[0]
    assert 5 <= len(list(picture.iter("{http://www.w3.org/2000/svg}text"))) <= 80
