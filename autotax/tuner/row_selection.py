"""Which config stands for a variant in a comparison: the best that is known of it, and on what evidence."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.db import Store, TrialRecord
from autotax.db.answer import Answer
from autotax.db.staleness import Place
from autotax.digests import variant_digest
from autotax.hardware import environment
from autotax.spaces import Space
from autotax.tuner.run_recorder import FINALISTS

UNPAIRED = 0.05
"""Two standard deviations of a search's figure."""


@dataclass(frozen=True)
class Choice:
    """A config and where it comes from, for instance `best of 12 trials` or `default`."""

    config: Config
    source: str


def trials_here(store: Store, space: Space, conditions: Conditions) -> list[TrialRecord]:
    """The trials of this very problem that hold here: of the same hardware, Triton, comm library and conditions, and of the
    same sources of their variants.
    """
    here = Place(space.hardware, environment(space.hardware.backend), conditions)
    return [trial for trial in store.trials(space.problem, space.hardware) if not _differences(trial, here)]


def _differences(trial: TrialRecord, here: Place) -> list[str]:
    assert trial.run is not None and trial.kernel_digest is not None
    there = Place(here.hardware, trial.run.environment, Conditions.from_dict(trial.conditions))
    return there.differences(here, (trial.kernel_digest, variant_digest(trial.run.problem.op, trial.config.variant)))


def best_of(variant: str, trials: Iterable[TrialRecord], space: Space) -> Choice:
    """The fastest config of a variant that is verified; its default where there is none.

    Figures of finalist rounds are paired, those of the search are not: they scatter by 1.3 to 2.6 %, and read another few percent
    faster or slower as clocks do. So a config that was no finalist stands for its variant only where none was, or where it is
    faster by more than UNPAIRED once the stages are brought to one level.
    """
    told = list(trials)
    tried = [trial for trial in told if trial.config.variant == variant and trial.config in space]
    level = _level(told)
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
    """The latest verified latency of each config in one stage, in microseconds. A later failure takes an earlier figure away."""
    latest = {trial.config: trial for trial in trials if (trial.conditions.get("stage") == FINALISTS) is final}
    return {c: t.latency_us for c, t in latest.items() if t.status == "ok" and t.verified and t.latency_us is not None}


def _unfit(trials: Iterable[TrialRecord]) -> set[Config]:
    """Configs whose last trial failed, whatever stage it was of."""
    return {c for c, trial in {t.config: t for t in trials}.items() if trial.status != "ok" or not trial.verified}


def _level(trials: Sequence[TrialRecord]) -> float:
    """How much slower a config reads among finalists than in the search before it; 1 where no config tells."""
    searched, paired = (_latest(trials, final=final) for final in (False, True))
    return statistics.median([paired[config] / searched[config] for config in paired.keys() & searched.keys()] or [1.0])


def baseline_for(answer: Answer, store: Store, trials: Sequence[TrialRecord], space: Space, conditions: Conditions) -> Choice:
    """BSP at its best: that of the round which the answer won, else the best of the trials, else that of a nearest winner."""
    winners = store.winners(with_samples=False) if answer.from_problem else []
    asked = answer.from_problem, conditions.searched
    alike = [w for w in winners if (w.problem.key, w.conditions.searched) == asked and w.config == answer]
    of_round = next((w.baseline for w in reversed(alike) if w.baseline in space), None)
    here = answer.from_problem == space.problem.key
    if of_round and here:
        return Choice(of_round, "the baseline of the winner")
    known = best_of("bsp", trials, space)
    if of_round and known.source.startswith("default"):
        return Choice(of_round, "the baseline of the nearest winner")
    return known
