"""One config against every other way of doing the same, in one interleaved and verified run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import as_deployed
from autotax.db.answer import Answer
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner
from autotax.tuner.row_selection import Choice
from autotax.tuner.statistics import speedup

EFFORT = Effort(samples=60, seconds=1.0)
TUNED = "autotax"
"""The row of the tuned config."""
BASELINES = ("bsp-graph", "bsp-eager")
"""The rows of the baseline."""


@dataclass(frozen=True)
class Row:
    """`speedup` is over BSP launched as compared (in a graph, or eager as on CPU ranks), from paired samples; None where either
    is not verified. `source` says on what evidence the config was chosen; None where there was nothing to choose."""

    name: str
    variant: str
    measurement: Measurement
    speedup: float | None
    source: str | None = None


@dataclass(frozen=True)
class Comparison:
    """The rows of one problem; none where it failed as a whole, and `error` says why."""

    problem: Problem
    hardware: Hardware
    conditions: Conditions
    rows: tuple[Row, ...]
    answer: Answer | None = None
    """What the look-up said of the tuned config, if one was asked."""
    error: str | None = None

    def row(self, name: str) -> Row | None:
        """The row of that name if it is verified."""
        return next((row for row in self.rows if row.name == name and row.measurement.verified), None)

    @property
    def ok(self) -> bool:
        """Whether the tuned config was verified."""
        return self.row(TUNED) is not None

    @property
    def peer(self) -> Row | None:
        """The best alternative: the fastest verified row that is not autotax."""
        peers = (name for peer in registry.of(self.problem).peers.values() if not peer.part for name in peer.rows())
        found = [row for name in (*BASELINES, *peers) if (row := self.row(name)) and row.measurement.samples]
        return min(found, key=lambda row: row.measurement.latency_us or 0.0, default=None)

    @property
    def over_peer(self) -> float | None:
        """How many times faster than the best peer the tuned config is, from paired samples."""
        tuned, peer = self.row(TUNED), self.peer
        return _speedup(peer.measurement, tuned.measurement) if tuned and peer else None


def compare(
    problem: Problem,
    *,
    hardware: Hardware,
    runner: Runner,
    tuned: Choice,
    baseline: Choice,
    variants: Sequence[Choice] = (),
    conditions: Conditions | None = None,
) -> Comparison:
    """Measures `tuned`, BSP, each of `variants` and the operator's peers, under `conditions` (None: usual ones); rows that say
    `graph` or `eager` are launched so whatever the conditions are. In place, rows of graphs are.

    Rows of the same config under the same conditions share one measurement. A row that fails carries its status and does
    not end the others. Raises UsageError for conditions that the machine does not know.
    """
    conditions = as_deployed(conditions, hardware)
    named = _candidates(problem, hardware, tuned, baseline, conditions)
    named |= {choice.config.variant: (Candidate(choice.config, conditions), choice.source) for choice in variants}
    unique = list(dict.fromkeys(candidate for candidate, _ in named.values()))
    found = dict(zip(unique, runner.measure(problem, unique, EFFORT), strict=True))
    reference = found[named[f"bsp-{launched(conditions, hardware)}"][0]]
    rows = tuple(
        Row(name, candidate.config.variant, found[candidate], _speedup(reference, found[candidate]), source)
        for name, (candidate, source) in named.items()
    )
    return Comparison(problem, hardware, conditions, rows)


def launched(conditions: Conditions, hardware: Hardware) -> str:
    """How calls are launched here: CPU ranks capture none."""
    return conditions.launch if hardware.on_gpu else "eager"


def shown_variants(problem: Problem, hardware: Hardware, admitted: Sequence[str], *, every: bool) -> list[str]:
    """The variants that get a row of their own: on GPUs the ladder of an operator that has one, else all of them or none."""
    ladder = [variant.name for variant in registry.of(problem).ladder if variant.name in admitted]
    if every:
        return list(dict.fromkeys([*ladder, *admitted]))
    return ladder if hardware.on_gpu else []


def _candidates(
    problem: Problem, hardware: Hardware, tuned: Choice, baseline: Choice, conditions: Conditions
) -> dict[str, tuple[Candidate, str | None]]:
    modes = {mode: replace(conditions, mode=mode) for mode in ("graph", "eager")}
    modes[launched(conditions, hardware)] = conditions
    named: dict[str, tuple[Candidate, str | None]] = {TUNED: (Candidate(tuned.config, conditions), tuned.source)}
    for mode in modes if hardware.on_gpu else ("eager",):
        named[f"bsp-{mode}"] = Candidate(baseline.config, modes[mode]), baseline.source
    for peer in registry.of(problem).peers.values():
        if peer.where(problem, hardware):
            under = [modes[mode] for mode in peer.modes] or [conditions]
            named |= {row: (Candidate(Config(peer.name), each), None) for row, each in zip(peer.rows(), under, strict=True)}
    return named


def _speedup(reference: Measurement, measurement: Measurement) -> float | None:
    if not (reference.verified and measurement.verified and reference.samples and measurement.samples):
        return None
    return speedup(reference.rounds, measurement.rounds)[0]
