"""Chooses the config that represents a variant in a comparison, and states the evidence for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.core.settings import as_deployed
from autotax.db import Store, TrialRecord
from autotax.db.answers import Answer
from autotax.db.records import Place, differences
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner, TimeIsUp
from autotax.software import environment
from autotax.spaces import Space
from autotax.tuner.finalists import speedup
from autotax.tuner.progress import frame
from autotax.tuner.run_recorder import FINALISTS
from autotax.tuner.tuning import TimeLimit

UNPAIRED = 0.05
"""Two standard deviations of a search's figure."""


@dataclass(frozen=True)
class Choice:
    """A config and where it comes from, for instance `best of 12 trials` or `default`."""

    config: Config
    source: str


def trials_here(store: Store, space: Space, conditions: Conditions) -> list[TrialRecord]:
    """The trials of exactly this problem that hold here: hardware, software, conditions and sources are the same."""
    here = Place(space.hardware, environment(space.hardware.backend), conditions)

    def place_of(trial: TrialRecord) -> Place:
        assert trial.run is not None
        return Place(space.hardware, trial.run.environment, Conditions.from_dict(trial.conditions))

    return [trial for trial in store.trials(space.problem, space.hardware) if not differences(trial, place_of(trial), here)]


def best_of(variant: str, trials: Iterable[TrialRecord], space: Space) -> Choice:
    """The fastest verified config of a variant, else its default.

    Figures of finalist rounds are paired. Figures of the search are not: they scatter by 1.3 to 2.6 %, and shift by another few
    percent with the clocks. So a config that was no finalist is chosen only if the variant has no finalist, or if it is faster by
    more than UNPAIRED. Before this comparison, the figures of both stages are scaled to one level.
    """
    records = list(trials)
    tried = [trial for trial in records if trial.config.variant == variant and trial.config in space]
    level = _level(records)
    searched = {config: level * us for config, us in _latest(tried, final=False).items()}
    paired = _latest(tried, final=True)
    best = min(paired.keys() - _unfit(tried), key=paired.__getitem__, default=None)
    other = min(searched.keys() - _unfit(tried), key=lambda config: (searched[config], config.digest), default=None)
    if other and (best is None or searched[other] < (1 - UNPAIRED) * paired[best]):
        best = other
    if best is not None:
        among = " in a paired round" if best in paired else ""
        return Choice(best, f"best of {len(tried)} trial{'' if len(tried) == 1 else 's'}{among}")
    return Choice(space.default(variant), f"default: none of {len(tried)} trials is verified" if tried else "default")


def _latest(trials: Iterable[TrialRecord], *, final: bool) -> dict[Config, float]:
    """The latest verified latency of each config in one stage, in microseconds. A later failure removes an earlier figure."""
    latest = {trial.config: trial for trial in trials if (trial.conditions.get("stage") == FINALISTS) is final}
    return {c: t.latency_us for c, t in latest.items() if t.status == "ok" and t.verified and t.latency_us is not None}


def _unfit(trials: Iterable[TrialRecord]) -> set[Config]:
    """Configs whose last trial failed, in either stage."""
    return {c for c, trial in {t.config: t for t in trials}.items() if trial.status != "ok" or not trial.verified}


def _level(trials: Sequence[TrialRecord]) -> float:
    """How much slower configs measure in the finalist round than in the search before it; 1 if no config has both figures."""
    searched, paired = (_latest(trials, final=final) for final in (False, True))
    return statistics.median([paired[config] / searched[config] for config in paired.keys() & searched.keys()] or [1.0])


def baseline_for(answer: Answer, store: Store, trials: Sequence[TrialRecord], space: Space, conditions: Conditions) -> Choice:
    """The best BSP config: from the finalist round of the answer, else from the trials, else from the nearest winner."""
    winners = store.winners(with_samples=False) if answer.from_problem else []
    where = answer.from_problem, conditions.searched
    alike = [w for w in winners if (w.problem.key, w.conditions.searched) == where and w.config == answer]
    of_round = next((w.baseline for w in reversed(alike) if w.baseline in space), None)
    here = answer.from_problem == space.problem.key
    if of_round and here:
        return Choice(of_round, "the baseline of the winner")
    best = best_of("bsp", trials, space)
    if of_round and best.source.startswith("default"):
        return Choice(of_round, "the baseline of the nearest winner")
    return best


# Compares one config with all alternatives in one interleaved and verified run.

EFFORT = Effort(samples=60, seconds=1.0)
TUNED = "autotax"
"""The row of the tuned config."""
BASELINES = ("bsp-graph", "bsp-eager")
"""The rows of the baseline."""


@dataclass(frozen=True)
class Row:
    """`speedup` is over BSP, from paired samples. BSP is launched like the comparison: in a graph, or eager on CPU ranks. It is
    None if either row is not verified, and for eager calls beside calls in place. `source` names the evidence for the choice of
    the config; None if there was no choice.
    """

    name: str
    variant: str
    measurement: Measurement
    speedup: float | None
    source: str | None = None


@dataclass(frozen=True)
class Comparison:
    """The rows of one problem. If the whole comparison failed, there are no rows and `error` says why."""

    problem: Problem
    hardware: Hardware
    conditions: Conditions
    rows: tuple[Row, ...]
    answer: Answer | None = None
    """The answer of the look-up for the tuned config, if there was a look-up."""
    error: str | None = None

    def row(self, name: str) -> Row | None:
        """The row of that name if it is verified."""
        return next((row for row in self.rows if row.name == name and row.measurement.verified), None)

    def __repr__(self) -> str:
        """`<Comparison my-op/m=512,...: autotax 118.2 us, bsp-graph 154.9 us>`"""
        figures = [f"{row.name} {us:.1f} us" for row in self.rows if (us := row.measurement.latency_us) is not None]
        return f"<Comparison {self.problem.key}: {self.error or ', '.join(figures) or 'nothing verified'}>"

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`, with parameters and latency in us. Raises UsageError without pandas."""
        return frame(
            {
                "name": row.name, "variant": row.variant, **row.measurement.config.values,
                "latency_us": row.measurement.latency_us, "speedup": row.speedup, "status": row.measurement.status,
            }
            for row in self.rows
        )  # fmt: skip

    @property
    def ok(self) -> bool:
        """Whether the tuned config was verified."""
        return self.row(TUNED) is not None

    @property
    def peer(self) -> Row | None:
        """The best alternative: the fastest verified row that is not autotax."""
        peers = (name for peer in registry.of(self.problem).peers.values() if not peer.part for name in peer.rows())
        rows = [row for name in (*BASELINES, *peers) if (row := self.row(name)) and row.measurement.samples]
        if tuned := self.row(TUNED):
            rows = [row for row in rows if _alike(row.measurement, tuned.measurement)]
        return min(rows, key=lambda row: row.measurement.latency_us or 0.0, default=None)

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
    limit: TimeLimit | None = None,
) -> Comparison:
    """Measures `tuned`, BSP, each of `variants` and the operator's peers, under `conditions` (None: usual ones). Rows named
    `graph` or `eager` are launched like that under all conditions. If the conditions are in place, the rows of graphs are
    measured in place.

    Rows of the same config under the same conditions share one measurement. A row that fails carries its status and does not end
    the others. If `limit` comes first, there are no rows. Raises UsageError for conditions that the machine does not know.
    """
    conditions = as_deployed(conditions, hardware)
    labelled = _candidates(problem, hardware, tuned, baseline, conditions)
    labelled |= {choice.config.variant: (Candidate(choice.config, conditions), choice.source) for choice in variants}
    unique = list(dict.fromkeys(candidate for candidate, _ in labelled.values()))
    within_s = limit.left if limit and limit.seconds is not None else None
    try:
        measurements = runner.measure(problem, unique, replace(EFFORT, within_s=within_s))
    except TimeIsUp as stage:
        late = f"{limit} came first ({stage}): give it more time"
        return Comparison(problem, hardware, conditions, (), None, late)
    measured = dict(zip(unique, measurements, strict=True))
    reference = measured[labelled[f"bsp-{launched(conditions, hardware)}"][0]]
    rows = tuple(
        Row(name, candidate.config.variant, measured[candidate], _speedup(reference, measured[candidate]), source)
        for name, (candidate, source) in labelled.items()
    )
    return Comparison(problem, hardware, conditions, rows)


def launched(conditions: Conditions, hardware: Hardware) -> str:
    """How calls are launched on this hardware: CPU ranks capture no graphs."""
    return conditions.launch if hardware.on_gpu else "eager"


def shown_variants(problem: Problem, hardware: Hardware, admitted: Sequence[str], *, every: bool) -> list[str]:
    """The variants that get a row: on GPUs the ladder of the operator, else all or none. Peers have rows of their own."""
    operator = registry.of(problem)
    ladder = [variant.name for variant in operator.ladder if variant.name in admitted]
    if every:
        return [name for name in dict.fromkeys([*ladder, *admitted]) if name not in operator.peers]
    return ladder if hardware.on_gpu else []


def _candidates(
    problem: Problem, hardware: Hardware, tuned: Choice, baseline: Choice, conditions: Conditions
) -> dict[str, tuple[Candidate, str | None]]:
    modes = {mode: replace(conditions, mode=mode) for mode in ("graph", "eager")}
    modes[launched(conditions, hardware)] = conditions
    labelled: dict[str, tuple[Candidate, str | None]] = {TUNED: (Candidate(tuned.config, conditions), tuned.source)}
    possible = {mode: under for mode, under in modes.items() if hardware.on_gpu or mode == "eager"}
    for mode, under in possible.items():
        labelled[f"bsp-{mode}"] = Candidate(baseline.config, under), baseline.source
    for peer in registry.of(problem).peers.values():
        if peer.where(problem, hardware):
            rows = dict(zip(peer.rows(), peer.modes or [""], strict=True))
            made = {row: possible.get(mode) if mode else conditions for row, mode in rows.items()}
            labelled |= {row: (Candidate(Config(peer.name), call), None) for row, call in made.items() if call}
    return labelled


def _speedup(reference: Measurement, measurement: Measurement) -> float | None:
    if not (reference.verified and measurement.verified and reference.samples and measurement.samples):
        return None
    return speedup(reference.rounds, measurement.rounds)[0] if _alike(reference, measurement) else None


def _alike(one: Measurement, other: Measurement) -> bool:
    """Whether the figures of two rows can be compared: both in place, or neither."""
    return one.candidate.conditions.in_place == other.candidate.conditions.in_place
