"""The finalist round: the best few configs and the best bulk-synchronous ones, interleaved until they can be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotax.problem import Problem
from autotax.runner.measurement import Candidate, Effort, Measurement, Runner
from autotax.spaces import Space
from autotax.tuner.progress import Standing
from autotax.tuner.statistics import CONFIDENCE, fewest_values, speedup

MOST_ROUNDS = 4
"""Repetitions of the interleaved measurement before what is not separated is called a tie."""
CHALLENGERS = 4
BASELINES = 2
ROUND_EFFORT = Effort(samples=50, seconds=0.6)
EACH = 1 - (1 - CONFIDENCE) / (CHALLENGERS * MOST_ROUNDS)
"""Confidence of one interval, such that all that a verdict may look at hold together with CONFIDENCE."""


@dataclass(frozen=True)
class Decision:
    """`winner` is a standing, `baseline` the best BSP measurement of the round; `tie` as in Verdict."""

    winner: Standing
    baseline: Measurement
    standings: tuple[Standing, ...]
    tie: bool


def choose_finalists(measured: Sequence[Measurement]) -> list[Candidate]:
    """The fastest verified BSP configs and the fastest verified others, BSP first."""
    verified = sorted((m for m in measured if m.status == "ok" and m.samples), key=lambda m: m.latency_us or 0.0)
    baselines = [m.candidate for m in verified if m.config.variant == "bsp"][:BASELINES]
    others = [m.candidate for m in verified if m.config.variant != "bsp"][:CHALLENGERS]
    return baselines + others


def run_finalists(
    problem: Problem, space: Space, runner: Runner, candidates: Sequence[Candidate]
) -> tuple[Decision | None, list[Measurement]]:
    """Measures all candidates together and decides. Without a verified BSP measurement there is no decision."""
    if not any(candidate.config.variant == "bsp" for candidate in candidates):
        return None, []
    total: dict[Candidate, Measurement] = {}
    decision: Decision | None = None
    for _ in range(MOST_ROUNDS):
        standing = [c for c in candidates if c not in total or total[c].status == "ok"]
        found = runner.measure(problem, standing, ROUND_EFFORT)
        total |= {m.candidate: _extend(total.get(m.candidate), m) for m in found}
        decision = decide(space, [m for m in total.values() if m.status == "ok" and m.samples])
        if decision is None or not _open(decision):
            break
    return decision, list(total.values())


def decide(space: Space, measured: Sequence[Measurement]) -> Decision | None:
    """The winner among verified measurements of one interleaved round (equally many samples each).

    BSP wins unless somebody is faster with confidence. Among those who are, the fastest and all that cannot be told apart
    from it are equals, of which the simplest variant (the first in the space) wins.
    """
    baselines = [m for m in measured if m.config.variant == "bsp"]
    if not baselines:
        return None
    baseline = min(baselines, key=lambda m: m.latency_us or 0.0)
    standings = sorted((_standing(baseline, m) for m in measured), key=lambda s: s.measurement.latency_us or 0.0)
    own = next(s for s in standings if s.measurement is baseline)
    faster = [s for s in standings if s.measurement.config.variant != "bsp" and s.interval[0] > 1.0]
    if not faster:
        undecided = any(s.interval[1] > 1.0 for s in standings if s.measurement.config.variant != "bsp")
        return Decision(own, baseline, tuple(standings), tie=undecided)
    equals = [s for s in faster if _equal(faster[0].measurement, s.measurement)]
    # A stored winner may be of a variant that this run does not search.
    simplicity = {variant: place for place, variant in enumerate(space.variants)}
    winner = min(equals, key=lambda s: simplicity.get(s.measurement.config.variant, len(simplicity)))
    return Decision(winner, baseline, tuple(standings), tie=False)


def _standing(baseline: Measurement, measurement: Measurement) -> Standing:
    if measurement is baseline:
        return Standing(measurement, 1.0, (1.0, 1.0))
    ratio, interval = speedup(baseline.rounds, measurement.rounds, EACH)
    return Standing(measurement, ratio, interval)


def _equal(leader: Measurement, other: Measurement) -> bool:
    """Whether the other cannot be told to be slower than the leader."""
    return other is leader or speedup(other.rounds, leader.rounds, EACH)[1][0] <= 1.0


def _open(decision: Decision) -> bool:
    """Whether more samples could still change who wins over BSP."""
    return decision.tie or len(decision.baseline.rounds) < fewest_values(EACH)


def _extend(before: Measurement | None, now: Measurement) -> Measurement:
    """Appends the samples of a further round; a failure of any round is the outcome."""
    if before is None or now.status != "ok":
        return now
    samples = tuple(old + new for old, new in zip(before.samples, now.samples, strict=True))
    worst = max(before.relative_error or 0.0, now.relative_error or 0.0)
    return replace(now, samples=samples, relative_error=worst, compile_s=before.compile_s)
