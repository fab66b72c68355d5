"""The ladder of Flash Decode: what a reader of its table and its plot sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.report import ladder
from tests.report.test_tables import GPUS


def a_row(name: str, *rounds: float, verified: bool = True) -> dict[str, Any]:
    return {"name": name, "verified": verified, "latency_us": sorted(rounds)[len(rounds) // 2], "rounds_us": list(rounds)}


def a_document(batch: int, *rows: dict[str, Any], page: int = 0) -> dict[str, Any]:
    problem = FlashDecode(batch, 64, 8, 128, 32768, world_size=4, page=page)
    return {"problem": problem.to_dict(), "hardware": GPUS.to_dict(), "rows": list(rows)}


DOCUMENTS = [
    a_document(1, a_row("autotax", 9, 9, 9), a_row("bsp", 40, 44, 42), a_row("fused", 20, 22, 21), a_row("single", 10, 11, 10.5)),
    a_document(8, a_row("bsp", 60, 60, 60), a_row("fused", 1, 1, 1, verified=False), a_row("single", 20, 20, 20), page=16),
    {
        "problem": AllGatherGemm(512, 7168, 8192, world_size=4).to_dict(),
        "hardware": GPUS.to_dict(),
        "rows": [a_row("bsp", 1.0)],
    },
]


def test_what_each_step_won(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "compare.json", tmp_path / "made" / "here"
    file.write_text(json.dumps(DOCUMENTS))
    assert ladder.main([str(file), "-o", str(folder)]) == 0
    table = capsys.readouterr().out
    assert table == (folder / "ladder.md").read_text()
    head, _, first, second, means = table.splitlines()
    assert head == "| shape | bsp | fused | single | all steps |"
    assert first == "| B 1, 64/8 heads, KV 32K | 42.00 | 21.00 (2.00x) | 10.50 (2.00x) | 4.00x |"
    assert second == "| B 8, 64/8 heads, KV 32K, page 16 | 60.00 | - | 20.00 (3.00x) | 3.00x |"
    assert means == "| geometric mean | - | 2.00x | 2.45x | 3.46x |"
    picture = ElementTree.parse(folder / "ladder.svg").getroot()
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert [title.rpartition(", ")[2] for title in titles if title and "us" in title.split()] == [
        "bsp: 42.00 us", "fused: 21.00 us", "single: 10.50 us", "bsp: 60.00 us", "single: 20.00 us",
    ]  # fmt: skip


@pytest.mark.parametrize("nothing", [0.0, -1.0])
def test_a_step_that_took_no_time_is_left_out(nothing: float) -> None:
    """In place the time of a call is a difference, so noise may leave nothing of a short one."""
    (only,) = ladder.of([a_document(1, a_row("bsp", 40.0), a_row("fused", 20.0), a_row("single", nothing))])
    assert [step.variant for step in only.steps] == ["bsp", "fused"] and only.whole == 2.0
    assert ladder.of([a_document(1, a_row("bsp", nothing), a_row("fused", 20.0))]) == []


@pytest.mark.parametrize("content", ["not JSON", "[1]", "[]", json.dumps(DOCUMENTS[2:])])
def test_a_file_without_a_ladder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    file = tmp_path / "compare.json"
    file.write_text(content)
    assert ladder.main([str(file), "-o", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"autotax: file {file}") and output.err.count("\n") == 1
    assert not (tmp_path / "ladder.svg").exists()


def test_a_comparison_without_the_variants_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compare.json"
    file.write_text(json.dumps(a_document(1, a_row("autotax", 9, 9), a_row("bsp-eager", 9, 9))))
    assert ladder.main([str(file), "-o", str(tmp_path)]) == 2
    assert "run `autotax compare --variants --json`" in capsys.readouterr().err
