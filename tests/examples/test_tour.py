"""The notebook, cell by cell, on CPU ranks: without Jupyter, and in its kernel where nbclient is installed."""

from __future__ import annotations

import ast
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[2] / "examples/tour.ipynb"
EXPECTED = {
    "tune": "<Verdict all-gather-gemm/", "rows": "'variant': 'bsp'", "plot(verdict)": "<Plot: all-gather-gemm",
    "trials(": "<Trials: ", "plot(trials)": "the search>",
    "tune_callable": "<Verdict notebook-make/", "compare(": "<Comparison all-gather-gemm/",
}  # fmt: skip
"""The output of a cell with this text, or the beginning of it."""


def cells() -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cell(number: int, source: str, names: dict[str, Any]) -> object:
    """Executes a cell as a kernel does: Python finds its source, and the value of its last expression is returned."""
    name = f"<cell {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    exec(compile(ast.Module(body, []), name, "exec"), names)
    return eval(compile(last, name, "eval"), names) if last else None


def main() -> None:
    """Prints the value of each cell as JSON. Runs with `python -c`, so that its main module has no file, as in a kernel."""
    names = vars(sys.modules["__main__"])
    print(json.dumps([repr(run_cell(number, source, names)) for number, source in enumerate(cells())]), file=sys.__stdout__)


def in_jupyter(folder: Path) -> list[str]:
    """The texts that the cells display in a kernel."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(TOUR, 4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    shown = [[output.get("data", {}) for output in cell["outputs"]] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum("<svg" in data.get("text/html", "") for outputs in shown for data in outputs) >= 1
    return ["\n".join(data.get("text/plain", "") for data in outputs) for outputs in shown]


@pytest.mark.volume
@pytest.mark.parametrize("jupyter", [False, True], ids=["cells", "jupyter"])
def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jupyter: bool) -> None:
    for name in ("XDG_CACHE_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(TOUR.parents[1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if jupyter:
        shown = in_jupyter(tmp_path)
    else:
        line = [sys.executable, "-c", "from tests.examples import test_tour; test_tour.main()"]
        ran = subprocess.run(line, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=240, check=False)
        assert ran.returncode == 0, ran.stderr
        shown = json.loads(ran.stdout.splitlines()[-1])
    for words, expected in EXPECTED.items():
        assert any(words in source and expected in text for source, text in zip(cells(), shown, strict=True)), (words, shown)
    assert len(list((tmp_path / "XDG_CACHE_HOME/autotax/cells").glob("cells_*.py"))) == 1
