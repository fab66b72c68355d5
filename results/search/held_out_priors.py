"""Held-out priors and surrogates for replays, from a folder that results/search/train.py wrote.

Each prior of this folder was trained without one group of problems. `OP.json` gives the group of each problem.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.tuner.model import Prior, Trees


def held_out(folder: Path, problem: Problem, hardware: Hardware) -> Prior | None:
    """A prior trained without any trial of this problem, on any number of ranks; None if the folder has none. Raises UsageError
    for an invalid folder.
    """
    number = _groups(folder, problem.op).get(group_of(problem))
    return None if number is None else Prior(problem, hardware, trees_of(folder, problem.op, str(number)))


def group_of(problem: Problem) -> str:
    """The problem without its number of ranks: problems on 2 and 4 GPUs are left out together."""
    return json.dumps({name: value for name, value in problem.to_dict().items() if name != "world_size"}, sort_keys=True)


@lru_cache(maxsize=64)
def trees_of(folder: Path, op: str, name: str) -> Trees:
    """The trees `OP-NAME.npz`. Raises UsageError."""
    try:
        return Trees.load(folder / f"{op}-{name}.npz")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"folder {folder} has no trees {op}-{name}.npz ({error}): run results/search/train.py") from None


@lru_cache(maxsize=16)
def _groups(folder: Path, op: str) -> dict[str, int]:
    path = folder / f"{op}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}
