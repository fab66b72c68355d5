"""Constraints, shipped winners and published figures name one set of versions."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

import autotax
from autotax.db import formats

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((Path(autotax.__file__).parent / "shipped").glob("*.json"))
REMEDY = "prove winners and figures again with the set of constraints-gpu.txt, or name their set there"


def pins(name: str) -> dict[str, str]:
    """The pinned versions of a constraints file and of the files it includes."""
    text = (ROOT / name).read_text()
    constraints = {pin[1].lower(): pin[2] for pin in re.finditer(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)}
    for included in re.findall(r"^-c (\S+)$", text, re.MULTILINE):
        constraints |= pins(included)
    return constraints


def versions(environment: dict[str, str]) -> tuple[str, str]:
    return environment["torch"].partition("+")[0], environment["triton"]


MEASURED = (pins("constraints-gpu.txt")["torch"], pins("constraints-gpu.txt")["triton"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_winners_are_of_the_pinned_set(path: Path) -> None:
    pairs = {versions(entry.winner.environment.to_dict()) for entry in formats.read(path)}
    assert pairs == {MEASURED}, f"{path.name} was proven with {pairs}, pinned is {MEASURED}: {REMEDY}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*/landscapes.json.gz")), ids=lambda path: path.parent.name)
def test_published_trials_are_of_the_pinned_set(path: Path) -> None:
    pairs = set(map(versions, json.loads(gzip.decompress(path.read_bytes()))["environments"].values()))
    assert pairs == {MEASURED}, f"{path} has {pairs}, pinned is {MEASURED}: {REMEDY}"


def test_the_readme_names_the_pinned_set() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "torch {}, Triton {}".format(*MEASURED) in text


def test_both_sets_differ_in_torch_and_triton_alone() -> None:
    cpu, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    assert cpu.keys() == gpu.keys() and {name for name in cpu if cpu[name] != gpu[name]} <= {"torch", "triton"}
