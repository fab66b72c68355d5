"""results/carry.py: winners stay valid only after edits that leave their machine code unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from autotax.operators.registry import variant_digest

ROOT = Path(__file__).parents[1]


@pytest.mark.volume
def test_only_winners_whose_machine_code_is_the_same_are_carried_over(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(ROOT / "autotax", old / "autotax", ignore=shutil.ignore_patterns("__pycache__"))
    both, one = (old / "autotax/kernels/flash_decode" / name for name in ("attention.py", "compact.py"))
    both.write_text(both.read_text().replace("g = tl.arange(0, BLOCK_G)", "g = 0 + tl.arange(0, BLOCK_G)"))  # the same code
    assert "(1 << 13)" in one.read_text()
    one.write_text(one.read_text().replace("(1 << 13)", "(1 << 12)"))

    document = json.loads((ROOT / "autotax/shipped/h200x4.json").read_text())
    winners = {winner["config"]["variant"]: winner for winner in document["winners"]}
    resident = winners["resident"]  # the two have the same parameters
    document["winners"] = [resident, resident | {"config": resident["config"] | {"variant": "compact"}}]
    for winner in document["winners"]:
        variant = winner["config"]["variant"]
        code = f"from autotax.operators.registry import variant_digest; print(variant_digest('flash-decode', '{variant}'))"
        winner["kernel_digest"] = subprocess.check_output([sys.executable, "-c", code], cwd=old, text=True).strip()
        assert winner["kernel_digest"] != variant_digest("flash-decode", variant)
        winner["environment"] = winner["environment"] | {"triton": version("triton")}  # winners of others are refused
    source, target = tmp_path / "old.json", tmp_path / "new.json"
    source.write_text(json.dumps(document))

    output = subprocess.check_output([sys.executable, ROOT / "results/carry.py", old, source, target, "flash-decode"], text=True)

    resident, compact = json.loads(target.read_text())["winners"]
    assert resident["kernel_digest"] == variant_digest("flash-decode", "resident")
    assert compact["kernel_digest"] == document["winners"][1]["kernel_digest"]
    assert [line.split()[:2] for line in output.splitlines()] == [["carried", "resident"], ["DIFFERS", "compact"]]
