"""The code of docs/integrations.md works, and has five lines at most for each framework."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotax.runner.ranks import Ranks
from tests.torch import documented

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
FRAMEWORKS = ("Torch's fused operators", "Parallel styles", "torchtitan", "vLLM", "SGLang", "Thresholds")


def lines_of(section: str) -> str:
    """The first block of code of a section; empty if it has none."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found = re.search(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize("section", FRAMEWORKS)
def test_no_framework_takes_more_than_five_lines(section: str) -> None:
    written = [line for line in lines_of(section).splitlines() if line.strip()]
    assert len(written) <= 5
    assert written or section in ("vLLM", "SGLang"), "they need none: the wheel has entry points"


def test_the_lines_for_torch_serve_a_compiled_model(ranks: Ranks) -> None:
    for told, emitted in ranks.run(documented.compiled, lines_of("Torch's fused operators"), timeout=100):
        assert told.operators == {"fused_all_gather_matmul": "autotax", "fused_matmul_reduce_scatter": "autotax"}
        assert told.taken + told.left == emitted == 4, str(told)


def test_the_lines_for_parallelize_module_make_a_model_parallel(ranks: Ranks) -> None:
    assert ranks.run(documented.parallel, lines_of("Parallel styles")) == [["ColumnLinear", "RowLinear"]] * 2


def test_the_lines_for_thresholds_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTAX_DB", str(tmp_path / "none.db"))
    exec(lines_of("Thresholds"), {})
