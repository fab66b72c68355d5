"""Values that kernels take from other modules of the package. The kernels' digests do not cover them, so this file records them.

A changed value changes the kernels, but their shipped winners still count as valid. So change the kernels, too, until their
digests differ: a renamed property suffices. `python -m tests.test_what_kernels_take` prints the current values.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import autotax
from autotax.core.config import Config
from autotax.core.problem import Problem, ceil_div, power_of_two
from autotax.db import shipped

KERNELS = Path(autotax.__file__).parent / "kernels"
KEPT = Path(__file__).with_suffix(".json")


def attributes_of_kernels() -> set[str]:
    """The names of all attributes that kernel modules read, of problems and of anything else."""
    trees = (ast.parse(path.read_text()) for path in KERNELS.rglob("*.py"))
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def values_of(problem: Problem, names: set[str]) -> dict[str, object]:
    plain = (bool, int, float, str, tuple, type(None))
    public = [name for name in dir(type(problem)) if name in names and not name.startswith("_")]
    values = {name: getattr(problem, name) for name in {*public, *problem.to_dict()} & names}
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def digests() -> dict[str, str]:
    """A digest for each property of each operator's problems, over the problems of all shipped winners."""
    names = attributes_of_kernels()
    values: dict[str, dict[str, object]] = {}
    for problem in sorted({winner.problem for winner in shipped.winners()}, key=lambda problem: problem.key):
        for name, value in values_of(problem, names).items():
            values.setdefault(f"{problem.op}.{name}", {})[problem.key] = value
    values["ceil_div"] = {f"{a}/{b}": ceil_div(a, b) for a in range(40) for b in range(1, 12)}
    values["power_of_two"] = {str(n): power_of_two(n) for n in range(1, 70)}
    config = Config.of("push", block_m=64, order="zigzag")
    values["Config"] = {"block_m": config["block_m"], "order": config["order"], "values": config.values, "name": config.variant}
    return {name: hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16] for name, kept in values.items()}


def test_kernels_take_the_values_that_their_winners_were_proven_with() -> None:
    kept, now = json.loads(KEPT.read_text()), digests()
    assert len(now) > 50
    assert {name for name in {*kept, *now} if kept.get(name) != now.get(name)} == set()


if __name__ == "__main__":
    print(json.dumps(digests(), indent=1, sort_keys=True))
