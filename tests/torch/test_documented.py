"""The code of docs/integrations.md works, and has five lines at most for each framework, as the pages of engines have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotax.runner.ranks import Ranks

DOCS = Path(__file__).parents[2] / "docs"
FRAMEWORKS = {"Torch's fused operators": "integrations", "Parallel styles": "integrations", "Thresholds": "integrations"}
ENGINES = ("vllm", "sglang", "torchtitan")


def lines_of(section: str, page: str = "integrations") -> str:
    """The first block of code of a section of a page."""
    whole = (DOCS / f"{page}.md").read_text()
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", whole, re.MULTILINE | re.DOTALL)
    match = re.search(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert match
    return match[1]


@pytest.mark.parametrize(("section", "page"), [*FRAMEWORKS.items(), *(("Start", page) for page in ENGINES)])
def test_no_framework_takes_more_than_five_lines(section: str, page: str) -> None:
    assert 0 < len([line for line in lines_of(section, page).splitlines() if line.strip()]) <= 5


@pytest.mark.volume
def test_the_lines_for_torch_serve_a_compiled_model(ranks: Ranks) -> None:
    from tests.torch import documented  # only now: what it imports takes seconds, and all processes list all tests

    for status, emitted in ranks.run(documented.compiled, lines_of("Torch's fused operators"), timeout=100):
        products = ["all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter"]
        replaced = [*(f"fused_{product}" for product in products), "context_parallel_attention"]
        assert status.operators == dict.fromkeys(replaced, "autotax")
        assert status.taken + status.left == emitted == 4, str(status)


def test_the_lines_for_parallelize_module_make_a_model_parallel(ranks: Ranks) -> None:
    from tests.torch import documented

    assert ranks.run(documented.parallel, lines_of("Parallel styles")) == [["ColumnLinear", "RowLinear"]] * 2


def test_the_lines_for_thresholds_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTAX_DB", str(tmp_path / "none.db"))
    exec(lines_of("Thresholds"), {})
