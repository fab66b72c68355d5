"""Which config stands for a variant in a comparison: the best that is known of it, and on what evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotax.conditions import Conditions
from autotax.config import Config
from autotax.db import Store, TrialRecord
from autotax.db.answer import Answer
from autotax.db.differences import Place
from autotax.hardware import environment
from autotax.sources import variant_digest
from autotax.spaces import Space


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
    """The fastest config of a variant that is verified; its default where there is none."""
    tried = [trial for trial in trials if trial.config.variant == variant]
    latest = {trial.config: trial for trial in tried if trial.config in space}  # a finalist's trial follows the search's
    fit = [trial for trial in latest.values() if trial.status == "ok" and trial.verified]
    best = min(fit, key=lambda trial: trial.latency_us or 0.0, default=None)
    if best is not None:
        return Choice(best.config, f"best of {len(tried)} trial{'' if len(tried) == 1 else 's'}")
    return Choice(space.default(variant), f"default: none of {len(tried)} trials is verified" if tried else "default")


def baseline_for(answer: Answer, store: Store, trials: Sequence[TrialRecord], space: Space, conditions: Conditions) -> Choice:
    """BSP at its best: that of the round which the answer won, else the best of the trials, else that of a nearest winner."""
    winners = store.winners(with_samples=False) if answer.from_problem else []
    alike = [w for w in winners if w.problem.key == answer.from_problem and w.conditions == conditions and w.config == answer]
    of_round = next((w.baseline for w in reversed(alike) if w.baseline in space), None)
    here = answer.from_problem == space.problem.key
    if of_round and here:
        return Choice(of_round, "the baseline of the winner")
    known = best_of("bsp", trials, space)
    if of_round and known.source.startswith("default"):
        return Choice(of_round, "the baseline of the nearest winner")
    return known
