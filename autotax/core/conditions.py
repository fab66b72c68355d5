"""Conditions under which a call is made in deployment, and therefore tuned. Figures of different conditions do not compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autotax.core.errors import UsageError

MODES = ("in-place", "graph", "eager")
CACHES = ("cold", "warm")
LONGEST_SKEW_US = 10_000.0


@dataclass(frozen=True)
class Conditions:
    """How calls are made. Raises UsageError for values that are not allowed."""

    mode: str = "graph"
    """`in-place`: captured in a CUDA graph, each between products that read other weights from memory, gathers also behind a sum
    over the ranks and a norm. The figure is the time that the calls add to the same graph without them. `graph`: captured back to
    back. `eager`: launched one by one. CPU ranks capture no graphs: they support `eager`, and `in-place` with small products.
    """
    l2: str = "cold"
    """`cold`: inputs rotate, so that no call finds its inputs in the L2. `warm`: all calls take the same inputs."""
    skew_us: float = 0.0
    """Each rank arrives at each sample late by a random time of up to so many microseconds, to six digits; 0: all together."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode is {self.mode!r}; allowed are {', '.join(MODES)}: give one of these as --mode")
        if self.l2 not in CACHES:
            raise UsageError(f"l2 is {self.l2!r}; allowed are {', '.join(CACHES)}: give one of these as --l2")
        if not isinstance(self.skew_us, int | float):
            raise UsageError(f"skew is {self.skew_us!r}; it must be a number of microseconds: give another --skew")
        if not 0.0 <= self.skew_us <= LONGEST_SKEW_US:
            raise UsageError(f"skew is {self.skew_us:g} us; it must be from 0 to {LONGEST_SKEW_US:g}: give another --skew")
        if self.in_place and self.skew_us:
            raise UsageError(f"skew is {self.skew_us:g} us in place, where ranks arrive together: give --mode graph or no --skew")
        object.__setattr__(self, "skew_us", float(f"{self.skew_us:g}"))

    @classmethod
    def usual(cls, on_gpu: bool) -> Conditions:
        """The default conditions to tune for."""
        return cls().proven if on_gpu else ON_CPU

    @property
    def in_place(self) -> bool:
        return self.mode == "in-place"

    @property
    def launch(self) -> str:
        """How calls are launched in deployment: `graph` or `eager`. Calls in place are captured, too."""
        return "eager" if self.mode == "eager" else "graph"

    @property
    def searched(self) -> Conditions:
        """The conditions of a search: the same, but back to back, which takes a third of the time."""
        return replace(self, mode=self.launch)

    @property
    def proven(self) -> Conditions:
        """The conditions under which such calls are proven: in place, if they are captured and all ranks arrive together."""
        return replace(self, mode="in-place") if self.launch == "graph" and not self.skew_us else self

    @property
    def key(self) -> str:
        """Names these conditions in databases and studies, for instance `in-place/cold/0`."""
        return f"{self.mode}/{self.l2}/{self.skew_us:g}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conditions:
        """Reads the conditions of a stored trial, ignoring other fields. Fields that it lacks get the usual values of a GPU."""
        l2 = data.get("l2", "cold")
        return cls(data.get("mode", "graph"), l2 if l2 in CACHES else "cold", float(data.get("skew_us", 0.0)))


ON_CPU = Conditions("eager", "warm")
EAGER = Conditions("eager")
