"""README and docs: short lines, short sentences, links that lead somewhere, figures that come from the records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from autotax.core.problem import Problem
from autotax.db import shipped
from autotax.operators import operators
from autotax.operators.problem_files import read_shapes
from tests.docs import commands, prose

ROOT = Path(__file__).parents[2]
OURS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), ROOT / "results/README.md"])
RECORDS = sorted(path for path in (ROOT / "results").glob("**/*.md") if path not in OURS)
README = ROOT / "README.md"
HELP = "`python -m tests.docs.prose --fill FILE` breaks lines, `python -m tests.docs.prose FILE` counts; see CONTRIBUTING.md"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", OURS, ids=named)
def test_lines_and_sentences_are_short(path: Path) -> None:
    if complaints := prose.complaints(path.read_text()):
        pytest.fail("\n".join([f"{named(path)}:", *complaints, HELP]), pytrace=False)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120, "README.md may have 120 lines: move something to docs/"
    glossary = (ROOT / "docs/glossary.md").read_text().splitlines()
    assert len(glossary) <= 20, "docs/glossary.md may have 20 lines"


@pytest.mark.parametrize("path", [*OURS, *RECORDS], ids=named)
def test_relative_links_lead_somewhere(path: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = unquote(target).partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists():
            dead.append(f"{target}: there is no such file")
        elif heading and there.suffix == ".md" and heading not in headings(there):
            dead.append(f"{target}: no such heading; there are {', '.join(headings(there))}")
    if dead:
        pytest.fail("\n".join([f"dead links in {named(path)}: correct or remove them", *dead]), pytrace=False)


def headings(path: Path) -> list[str]:
    """The anchors of a file, as GitHub makes them."""
    titles = [line.lstrip("#").strip().lower() for line in path.read_text().splitlines() if line.startswith("#")]
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in titles]


def test_what_a_package_index_shows_has_no_relative_links() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    shown = re.search(r'^readme = "(.+)"$', settings, re.MULTILINE)
    assert shown
    assert not re.findall(r"\]\((?!https:)", (ROOT / shown[1]).read_text()), "links of a package index must be absolute"


def test_the_commands_are_those_of_the_program() -> None:
    made = commands.document()
    assert (ROOT / "docs/cli.md").read_text() == made, "run `python -m tests.docs.commands > docs/cli.md`"


def test_every_variant_is_described() -> None:
    """Headings are operators in their order, items their variants. Alternatives are named in their rows of a comparison."""
    text = (ROOT / "docs/variants.md").read_text()
    ours = [op for op in operators().values() if op.examples]
    lacking = [name for op in ours for name in op.variants if f"- `{name}`" not in text]
    rows = {peer.row or name.removesuffix("_tuned") for op in ours for name, peer in op.peers.items()}
    lacking += [row for row in sorted(rows) if f"`{row}`" not in text]
    assert not lacking, f"docs/variants.md does not describe {lacking}: say what each does"


def test_plot_and_tables_are_those_of_the_records(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "results/speedups.py", tmp_path / "speedups.svg"]
    rows = subprocess.check_output(command, text=True, timeout=280).splitlines()
    drawn = (tmp_path / "speedups.svg").read_text()
    assert drawn == (ROOT / "docs/speedups.svg").read_text(), f"run {command[1:]}"
    assert "times faster than BSP, in place, 4 x H100" in drawn, "a figure says how it was measured"
    for page, of_page in (README, rows[:8]), (ROOT / "results/README.md", rows[8:]):
        there = [line for line in page.read_text().splitlines() if re.match(r"\| [^|`]+ \| [1-9]\d* \| \d", line)]
        assert len(of_page) == 8 and there == of_page, f"{page}: run results/speedups.py"


TABLES = {
    "results/reach.md": ["results/reach.py", "h100x2", "h200x2"],
    "results/h200x2/fp8/README.md": ["results/over_bf16.py"],
    "docs/search.md": ["results/search/shipped_coverage.py"],
}
"""Pages with a table that a script prints from the records."""


@pytest.mark.parametrize("page", TABLES)
def test_a_table_is_that_of_the_records(page: str) -> None:
    command = [sys.executable, *TABLES[page]]
    printed = subprocess.check_output(command, text=True, timeout=280, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "| " in printed and printed.strip() in (ROOT / page).read_text(), f"{page}: run {command[1:]}"


SUMS, NORMS = {"op": "gemm-reduce-scatter", "dtype": "bf16"}, {"op": "all-reduce-norm"}
COUNTS: list[tuple[str, str, str, dict[str, str]]] = [
    ("CHANGELOG.md", r"ship: (\d+) of 2 H100", "2 H100", {}),
    ("CHANGELOG.md", r"ship: \d+ of 2 H100, (\d+) of 2 H200", "2 H200", {}),
    ("CHANGELOG.md", r"(\d+) of 4 H100 and \d+ of 4 H200", "4 H100", {}),
    ("CHANGELOG.md", r"\d+ of 4 H100 and (\d+) of 4 H200", "4 H200", {}),
    ("docs/all-reduce-norm.md", r"(\d+) winners of 2 H100 ship", "2 H100", NORMS),
    ("docs/all-reduce-norm.md", r"ship and (\d+) of \[2 H200", "2 H200", NORMS),
    ("docs/decode-merge.md", r"(\d+) winners ship", "2 H100", {"op": "decode-merge|head-gather"}),
    ("docs/fp8.md", r"(\d+) winners ship. 21 ", "2 H100", {"dtype": "e4m3"}),
    ("docs/fp8.md", r"On 2 H200 (\d+) winners ship", "2 H200", {"dtype": "e4m3", "accumulate": "exact"}),
    ("docs/fp8.md", r"(\d+) more winners ship", "2 H200", {"dtype": "e4m3", "accumulate": "fast"}),
    ("docs/gemm-reduce-scatter.md", r"(\d+) winners of 2 H100", "2 H100", SUMS),
    ("docs/gemm-reduce-scatter.md", r"(\d+) winners ship", "2 H200", SUMS),
]
"""A page, its words around a number, and what it counts: GPUs, and fields of problems with their values."""


@cache
def in_place(gpus: str) -> set[Problem]:
    """The problems that ship with a winner in place, of `2 H100` for instance."""
    winners = [winner for winner in shipped.winners() if winner.conditions.in_place]
    return {w.problem for w in winners if f"{w.problem.world_size} {w.hardware.device.split()[1]}" == gpus}


@pytest.mark.parametrize(("page", "words", "gpus", "values"), COUNTS)
def test_pages_count_the_problems_that_ship(page: str, words: str, gpus: str, values: dict[str, str]) -> None:
    of_page = [p for p in in_place(gpus) if all(re.fullmatch(value, getattr(p, name, "")) for name, value in values.items())]
    numbers = re.findall(words, " ".join((ROOT / page).read_text().split()))
    assert numbers == [str(len(of_page))], f"{page}: the files in autotax/shipped have another number"


def test_the_shapes_of_the_readme_can_be_read(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.+?)```", README.read_text(), re.DOTALL)
    assert block
    (tmp_path / "shapes.toml").write_text(block[1])
    assert [problem.op for problem in read_shapes(tmp_path / "shapes.toml", 4)] == ["all-gather-gemm"] * 2 + ["flash-decode"]


@pytest.mark.parametrize("path", OURS, ids=named)
def test_filling_changes_no_word_and_only_once(path: Path) -> None:
    once = prose.filled(path.read_text())
    assert once.split() == path.read_text().split() and prose.filled(once) == once


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("One two. Three `four five` six.", [2, 3]),
        ("- One item: two\n  lines\n- Another one.", [4, 2]),
        ("# A heading of five words\n\n```\nsome code here\n```\n\nText [with a link](there.md).", [4]),
        ("Before it.\n\n    indented code of some words\n", [2]),
        ("About 3.5 us, e.g. so.", [5]),
    ],
)
def test_counting_words_of_sentences(text: str, words: list[int]) -> None:
    blocks = [block for block in prose.blocks(text) if block.kind in ("text", "item")]
    counts = [number for block in blocks for passage in block.passages for number in prose.sentences(passage)]
    assert counts == words


def test_complaints_name_the_line_and_the_remedy() -> None:
    long = " ".join(["word"] * 41)
    assert [c.partition(":")[0] for c in prose.complaints(f"Fine.\n\n{prose.filled(long + '.')}")] == ["line 3"]
    assert "41 words; 40 are allowed" in prose.complaints(f"Fine.\n\n| {long} |")[-1]
    assert prose.complaints("a " + "b" * 87) == ["line 1 is wider than 88 columns: break it, or shorten a table"]
    assert not prose.complaints("https://" + "b" * 99)
    some = ". ".join([" ".join(["Word"] * 30)] * 3) + "."
    assert "30.0 words on average; 25 are allowed" in prose.complaints(prose.filled(some))[-1]
