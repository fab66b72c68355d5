"""`autotax report`: the file it writes, what it says of it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotax.core.conditions import Conditions
from autotax.hardware import detect
from autotax.operators.problems import AllGatherGemm
from tests.cli.conftest import BSP, GPUS, PUSH, Run, keep_winner
from tests.report.test_ladder import DOCUMENTS

pytestmark = pytest.mark.usefixtures("one_renderer")
PROBLEM = AllGatherGemm(64, 96, 64, "fp32", world_size=2)


@pytest.fixture
def comparisons(tmp_path: Path) -> Path:
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(DOCUMENTS[:2]))
    return path


def test_a_page_of_what_is_kept(run: Run, db: Path, tmp_path: Path) -> None:
    keep_winner(db, PROBLEM, detect("cpu"), PUSH, BSP)
    keep_winner(db, PROBLEM, GPUS, PUSH, BSP, Conditions())
    before = db.read_bytes()
    file = tmp_path / "report.html"
    assert f"{file} shows 2 winners, 2 trials and 0 comparisons" in run("report", "-o", file).out.replace("\n", "")
    content = file.read_text()
    assert "CPU ranks on the Triton interpreter" in content and "4 x NVIDIA H200" in content and db.name in content
    assert str(db.parent) not in content, "whoever reads it need not know where it lay"
    assert run("report", "-o", file, "--backend", "cuda").code == 0
    assert "CPU ranks" not in file.read_text() and "4 x NVIDIA H200" in file.read_text()
    assert db.read_bytes() == before and list(tmp_path.glob("*.part")) == []


def test_comparisons_need_no_database(run: Run, db: Path, tmp_path: Path, comparisons: Path) -> None:
    file = tmp_path / "report.html"
    document = run("report", comparisons, comparisons, "--json", "-o", file).document
    assert document == {"file": str(file), "winners": 0, "trials": 0, "comparisons": 4}
    assert "B 1, 64/8 heads, KV 32K" in file.read_text() and not db.exists()


def test_goes_where_the_user_is_unless_told_otherwise(
    run: Run, tmp_path: Path, comparisons: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("report", comparisons).code == 0
    assert (tmp_path / "autotax-report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("no JSON", "is not what `autotax compare --json` prints"),
        ("[1]", "is not what `autotax compare --json` prints"),
        ('[{"problem": {"op": "all-reduce"}}]', "is not what `autotax compare --json` prints"),
        (json.dumps(DOCUMENTS[0] | {"hardware": {}}), "is not what `autotax compare --json` prints"),
        (json.dumps(DOCUMENTS[0] | {"rows": [{"name": "bsp", "verified": True, "latency_us": "1", "rounds_us": []}]}), "got str"),
    ],
)
def test_a_file_that_is_no_comparison(run: Run, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "compare.json"
    if content is not None:
        path.write_text(content)
    complaint = run("report", path, "-o", tmp_path / "report.html").complaint
    assert str(path) in complaint and said in complaint
    assert not (tmp_path / "report.html").exists()


def test_nothing_to_show_or_nowhere_to_put_it(run: Run, tmp_path: Path, comparisons: Path) -> None:
    assert "holds no trials" in run("report", "-o", tmp_path / "report.html").complaint
    assert "it is a folder" in run("report", comparisons, "-o", "/").complaint
    assert "cannot be written" in run("report", comparisons, "-o", tmp_path).complaint
    assert "cannot be written" in run("report", comparisons, "-o", tmp_path / "no" / "such" / "report.html").complaint
    assert sorted(tmp_path.iterdir()) == [comparisons]
