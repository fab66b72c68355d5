"""ENGINES bring hosts and run one worker on each. They schedule; autotax does not. Neither is imported until it is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from autotax.core.errors import UsageError
from autotax.fleet.messages import Order

MOST_STARTS = 5
"""A slot whose worker was lost so often is given up."""
ENGINES = {"ray": "ray", "slurm": "submitit"}
"""What each needs to be installed."""


@dataclass(frozen=True)
class Asked:
    """What an engine is asked for."""

    engine: str
    address: str = ""
    hosts: int | None = None
    """None: as many as the engine has."""
    backend: str | None = None
    parameters: Mapping[str, str | bool] = field(default_factory=dict)
    """Handed on to Slurm, for instance `partition`."""
    logs: Path = Path("fleet-logs")
    wait_s: float = 600.0
    """How long hosts are waited for at the start."""


@dataclass(frozen=True)
class Notice:
    """Something became of the worker in a slot. `lost`: it ended without a word; another one may start in its slot."""

    slot: int
    lost: bool
    text: str = ""


class Engine(Protocol):
    def start(self, order: Order) -> int:
        """Starts one worker a host, each with the order and a slot of its own; how many slots there are."""
        ...

    def watch(self) -> list[Notice]:
        """What ended since the last call. A worker that was lost is started again, MOST_STARTS times at most."""
        ...

    @property
    def running(self) -> int:
        """Slots whose worker runs, or waits to run."""
        ...

    def close(self) -> None:
        """Ends all workers that are left, at once. Safe to call twice."""
        ...


def open_engine(asked: Asked) -> Engine:
    """Raises UsageError for an engine that is unknown or not installed."""
    if asked.engine not in ENGINES:
        raise UsageError(f"engine is {asked.engine!r}; allowed are {', '.join(ENGINES)}: give one of these as --on")
    package = ENGINES[asked.engine]
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"--on {asked.engine} needs the Python package {package!r}, which is not installed: "
            f"pip install 'autotax[{asked.engine}]' here and on the hosts"
        )
    if asked.engine == "ray":
        from autotax.fleet.ray_engine import RayEngine

        return RayEngine(asked)
    from autotax.fleet.slurm_engine import SlurmEngine

    return SlurmEngine(asked)
