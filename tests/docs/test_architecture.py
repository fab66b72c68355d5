"""docs/architecture.md names every folder and every module at the top of the package, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import autotax

PACKAGE = Path(autotax.__file__).parent
PAGE = (PACKAGE.parent / "docs/architecture.md").read_text()
HOUSE = PAGE.partition("## The house")[2].partition("\n## ")[0]


def test_the_map_names_what_is_in_the_tree() -> None:
    entries = {name for line in re.findall(r"^- (.*?):", HOUSE, re.M | re.S) for name in re.findall(r"`([^`]+)`", line)}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert entries == folders | modules


def test_modules_on_the_ways_exist() -> None:
    ways = PAGE.partition("## The way of")[2].partition("```")[2].partition("```")[0]
    named = re.findall(r"\b([a-z]+/[a-z_]+)\b", ways)
    assert len(named) > 10
    assert [name for name in named if not (PACKAGE / f"{name}.py").is_file()] == []
