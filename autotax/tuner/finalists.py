"""The finalist round, and the statistics of comparisons. The best few configs and the best bulk-synchronous ones are soaked and
then measured in two interleaved jobs. Further jobs follow while the difference is not significant.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.runner.measurement import Candidate, Effort, Measurement, TimeIsUp
from autotax.spaces import Space
from autotax.tuner.progress import Standing

# A test which of two candidates is faster, and its confidence. Samples taken in the same round of an interleaved job saw the same
# machine, so the ratio within a round carries the information. The median ratio of a job is known to a few tenths of a percent
# (order statistics, Conover 1999, 3.2). Another job, with other memory, clocks and neighbours, gives another median: recorded
# repeats differ by 0.7 % (Flash Decode) and 1.4 % (All-Gather + GEMM) of standard deviation. So a verdict is an `Estimate` over
# jobs, and its interval contains the result of another job.

CONFIDENCE = 0.95
JOB_FLOOR, JOB_SHARE = 0.011, 0.3
"""The prior standard deviation between jobs. It is the root of the sum of two squares: JOB_FLOOR, and JOB_SHARE times the
interquartile range of the paired ratios within a job. Both were fitted to recorded repeats of finalist rounds, where ratios that
scatter more within a job differ more between jobs. Intervals of live winners cover 91 % of repeats (71 % with a floor of 0.006;
results/search/coverage.txt).
"""
MOST = 1000.0
"""Larger speed-ups are cut to this: a figure in place is a difference, which noise may bring to zero."""
PRIOR_JOBS = 5
"""Degrees of freedom of the prior standard deviation."""


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """An interval that holds the median with at least this confidence; the whole range when there are too few values."""
    ordered = sorted(values)
    count = len(ordered)
    below = 0.0  # P(at most `rank` values lie below the median)
    rank = -1
    while rank + 1 < count // 2:
        step = math.comb(count, rank + 1) / 2**count
        if below + step > (1 - confidence) / 2:
            break
        below += step
        rank += 1
    rank = max(rank, 0)
    return ordered[rank], ordered[count - 1 - rank]


def speedup(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """How many times faster the candidate is: the median of the paired ratios, and its interval."""
    ratios = [ratio(b, c) for b, c in zip(baseline, candidate, strict=True)]
    return statistics.median(ratios), median_interval(ratios)


def ratio(baseline: float, candidate: float) -> float:
    """How many times faster the candidate is in one round, from 1 / MOST to MOST. A figure of zero or less counts as infinitely
    fast. If neither figure is above zero, the ratio is 1.
    """
    if candidate <= 0.0 or baseline <= 0.0:
        return 1.0 if candidate <= 0.0 and baseline <= 0.0 else MOST if candidate <= 0.0 else 1 / MOST
    return min(max(baseline / candidate, 1 / MOST), MOST)


@dataclass(frozen=True)
class Estimate:
    """How many times faster one candidate is than another, from the median paired ratios of one job or more. `deviation` is
    the standard deviation of one job's logarithm."""

    speedup: float
    deviation: float
    jobs: int

    @property
    def another_job(self) -> tuple[float, float]:
        """Interval that contains the median of another job with CONFIDENCE."""
        return self._around(math.sqrt(1 + 1 / self.jobs))

    @property
    def mean(self) -> tuple[float, float]:
        """Interval that contains the mean over many jobs with CONFIDENCE."""
        return self._around(math.sqrt(1 / self.jobs))

    def _around(self, deviations: float) -> tuple[float, float]:
        reach = student(CONFIDENCE, PRIOR_JOBS + self.jobs - 1) * self.deviation * deviations
        return self.speedup * math.exp(-reach), self.speedup * math.exp(reach)


def estimate(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> Estimate:
    """How many times faster the candidate is, from the rounds of each job of both, in microseconds."""
    logs = [sorted(math.log(ratio(b, c)) for b, c in zip(*job, strict=True)) for job in zip(baseline, candidate, strict=True)]
    medians = [statistics.median(job) for job in logs]
    ranges = [job[(3 * (len(job) - 1) + 2) // 4] - job[(len(job) - 1) // 4] for job in logs]
    expected = JOB_FLOOR**2 + (JOB_SHARE * statistics.mean(ranges)) ** 2
    middle = statistics.mean(medians)
    squares = sum((median - middle) ** 2 for median in medians)
    variance = (PRIOR_JOBS * expected + squares) / (PRIOR_JOBS + len(medians) - 1)
    return Estimate(math.exp(middle), math.sqrt(variance), len(medians))


@lru_cache(maxsize=64)
def student(confidence: float, freedom: int) -> float:
    """How many standard deviations hold this share of Student's distribution, on both sides together."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(deviations: float, freedom: int) -> float:
    """The share of Student's distribution within `deviations` (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(deviations / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    terms = [term] if freedom > 1 else []
    for at in range(3 if odd else 2, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (at - 1) / at
        terms.append(term)
    share = math.sin(angle) * sum(terms)
    return 2 / math.pi * (angle + share) if odd else share


# The round.

FEWEST_JOBS, MOST_JOBS = 2, 4
"""Interleaved jobs. One does not show how much jobs differ; not separated after MOST_JOBS is a tie."""
CHALLENGERS, BASELINES = 6, 2
"""Most finalists of other variants, and of BSP."""
FEWEST_SAMPLES = 10
"""Least number of paired samples for a decision."""
ROUND_EFFORT = Effort(samples=50, seconds=0.6, fewest=FEWEST_SAMPLES)
"""The effort of one interleaved job."""
NEGLIGIBLE = 0.005
"""A simpler variant wins although it is slower by up to this share, if the difference is not significant."""
LOST = ("hang", "crash")
GPU_REPLAY_S, CPU_REPLAY_S = 2e-4, 2e-2
"""Seconds of a soak's replay in addition to the call: fresh inputs, delays, and the comparison of the output."""

Candidates = Sequence[Candidate]
Measure = Callable[[Candidates, Effort], list[Measurement]]
"""Measures candidates together, as Runner.measure does."""


@dataclass(frozen=True)
class Paces:
    """Seconds of a trial, and of a call of the best config, which tell how long finals will take."""

    trial_s: float
    call_s: float
    on_gpu: bool

    def expected_s(self, finalists: int, soak: int, jobs: int = 1) -> float:
        """Seconds of finals with so many finalists, each with `soak` replays, in `jobs` interleaved jobs."""
        replay_s = self.call_s + (GPU_REPLAY_S if self.on_gpu else CPU_REPLAY_S)
        return finalists * (jobs * (self.trial_s + ROUND_EFFORT.seconds) + soak * replay_s)

    def fitting(self, seconds: float, soak: int) -> tuple[int, int, int]:
        """How many challengers, BSP configs and soak replays fit into `seconds`. The soak is cut last, to one replay at least."""
        for challengers, baselines in ((CHALLENGERS, BASELINES), (4, BASELINES), (2, 1), (1, 1)):
            if self.expected_s(challengers + baselines, soak, FEWEST_JOBS) <= seconds:
                return challengers, baselines, soak
        spare, replays_s = seconds - self.expected_s(2, 0, FEWEST_JOBS), self.expected_s(2, 1) - self.expected_s(2, 0)
        return 1, 1, min(soak, max(1, int(spare / replays_s)))


@dataclass(frozen=True)
class Decision:
    """`winner` is a standing, `baseline` the best BSP measurement of the round; `tie` as in Verdict."""

    winner: Standing
    baseline: Measurement
    standings: tuple[Standing, ...]
    tie: bool


def choose_finalists(
    measured: Sequence[Measurement], failed: Collection[Config], conditions: Conditions, challengers: int = CHALLENGERS,
    baselines: int = BASELINES, vendors: Collection[str] = (),
) -> tuple[list[Candidate], list[Candidate]]:  # fmt: skip
    """Returns the finalists and the reserves, under the `conditions` of the round. Finalists are the fastest verified BSP
    configs, then the fastest verified others, as many as `baselines` and `challengers`. Reserves are all further verified
    configs. `failed` are configs that failed as finalists before; they are left out.

    The fastest config of `vendors`, variants that others wrote, is always a finalist: a winner must not be slower than the best
    alternative.
    """
    fit = [m for m in measured if m.status == "ok" and m.samples and m.config not in failed]
    ranked = [replace(m.candidate, conditions=conditions) for m in sorted(fit, key=lambda m: m.score_us or 0.0)]
    bulk = [candidate for candidate in ranked if candidate.config.variant == "bsp"]
    others = [candidate for candidate in ranked if candidate.config.variant != "bsp"]
    chosen, best = others[:challengers], [candidate for candidate in others if candidate.config.variant in vendors][:1]
    if chosen and not set(best) <= set(chosen):
        chosen[-1:] = best
    return bulk[:baselines] + chosen, bulk[baselines:] + [candidate for candidate in others if candidate not in chosen]


def run_finalists(
    space: Space, measure: Measure, candidates: Candidates, reserves: Candidates = (), soak: int = 0,
    suspects: Collection[Candidate] = (),
) -> tuple[Decision | None, list[Measurement]]:  # fmt: skip
    """Soaks all candidates, measures them together and decides. Without a verified BSP measurement there is no decision.

    The best reserves replace finalists that fail in the first round, and are soaked too. `suspects` are soaked one by one, so
    that a config that kills this process is identified. Raises TimeIsUp if the time ends before the first decision.
    """
    if not any(candidate.config.variant == "bsp" for candidate in candidates):
        return None, []
    total = _qualified(measure, candidates, reserves, replace(ROUND_EFFORT, soak=soak), suspects)
    decision = decide(space, _comparable(total))
    for done in range(1, MOST_JOBS):
        standing = [m.candidate for m in _comparable(total)]
        if decision is None or len(standing) < 2 or (done >= FEWEST_JOBS and not _open(decision)):
            break
        try:
            measured = _together(measure, standing, ROUND_EFFORT)
        except TimeIsUp:
            break
        if not measured:
            break
        total |= {m.candidate: _extend(total[m.candidate], m) for m in measured}
        decision = decide(space, _comparable(total))
    return decision, list(total.values())


def _qualified(
    measure: Measure, candidates: Candidates, reserves: Candidates, effort: Effort, suspects: Collection[Candidate]
) -> dict[Candidate, Measurement]:
    """Runs the first round; returns the failures and the paired samples of the rest."""
    first = [candidate for candidate in candidates if candidate not in suspects]
    total = {m.candidate: m for m in _together(measure, first, effort)}
    alone = [measure([candidate], effort)[0] for candidate in candidates if candidate in suspects]
    total |= {m.candidate: m for m in alone}
    waiting = [candidate for candidate in reserves if candidate not in total]
    failed = [m for m in total.values() if m.status != "ok"]
    called = len(alone) - sum(m.status != "ok" for m in alone)
    while newcomers := _replacements(failed, waiting):
        measured = {m.candidate: m for m in measure(newcomers, effort)}
        failed = [m for m in measured.values() if m.status != "ok"]
        total |= measured
        called += len(measured) - len(failed)
    if called:  # their samples come from separate jobs and are not paired with the others
        again = _together(measure, [m.candidate for m in _comparable(total)], replace(effort, soak=0))
        if not again:  # unpaired samples cannot be compared, so only the candidates of the first job stay
            return {candidate: m for candidate, m in total.items() if candidate in first or m.status != "ok"}
        total |= {m.candidate: _joined(total[m.candidate], m) for m in again}
    return total


def _replacements(failed: Sequence[Measurement], waiting: list[Candidate]) -> list[Candidate]:
    """Takes from `waiting` the next best candidate of the same kind (BSP or not) for each that failed."""
    replacements = []
    for kind in [m.config.variant == "bsp" for m in failed]:
        if best := next((c for c in waiting if (c.config.variant == "bsp") == kind), None):
            waiting.remove(best)
            replacements.append(best)
    return replacements


def _together(measure: Measure, candidates: Candidates, effort: Effort) -> list[Measurement]:
    """Runs one interleaved job that includes BSP. If the ranks are lost with every one of several candidates, no candidate is to
    blame and the job is tried once more. Returns nothing if that fails too.
    """
    for _ in range(2):
        measured = measure(candidates, effort)
        if len(measured) < 2 or any(m.status not in LOST for m in measured):
            return measured
    return []


def _comparable(total: Mapping[Candidate, Measurement]) -> list[Measurement]:
    """The measurements that succeeded with a positive figure. A figure of zero or less means that noise exceeds the call."""
    return [m for m in total.values() if m.status == "ok" and m.latency_us is not None and m.latency_us > 0.0]


def decide(space: Space, measured: Sequence[Measurement]) -> Decision | None:
    """The winner among verified measurements of the same interleaved jobs (equally many samples each).

    BSP wins unless a config is faster with confidence, as another job would find it. Among the faster configs, the fastest and
    all that are negligibly slower count as equal. Of these the simplest variant wins, which is the first in the space.
    """
    baselines = [m for m in measured if m.config.variant == "bsp"]
    if not baselines:
        return None
    baseline = min(baselines, key=lambda m: m.latency_us or 0.0)
    standings = sorted((_against(baseline, m) for m in measured), key=lambda s: s.measurement.latency_us or 0.0)
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


def summary(decision: Decision) -> str:
    """The decision in one line: `push(...) is 1.31x faster than BSP (1.28 to 1.33)`, or that BSP wins."""
    winner, (low, high) = decision.winner, decision.winner.interval
    if winner.measurement.config.variant == "bsp":
        return "BSP wins" + (", a tie" if decision.tie else "")
    return f"{winner.measurement.config} is {winner.speedup:.2f}x faster than BSP ({low:.2f} to {high:.2f})"


def _against(baseline: Measurement, measurement: Measurement) -> Standing:
    if measurement is baseline:
        return Standing(measurement, 1.0, (1.0, 1.0))
    estimated = estimate(baseline.rounds_by_job, measurement.rounds_by_job)
    return Standing(measurement, estimated.speedup, estimated.another_job)


def _equal(leader: Measurement, other: Measurement) -> bool:
    """Whether `other` is not significantly slower than the leader, and slower by at most NEGLIGIBLE."""
    if other is leader:
        return True
    ahead = estimate(other.rounds_by_job, leader.rounds_by_job)
    return ahead.mean[0] <= 1.0 and ahead.speedup <= 1 + NEGLIGIBLE


def _open(decision: Decision) -> bool:
    """Whether more samples could still change the winner over BSP."""
    return decision.tie or len(decision.baseline.rounds) < FEWEST_SAMPLES


def _extend(before: Measurement, now: Measurement) -> Measurement:
    """Appends the samples of a further job; a failure of any job is the outcome."""
    if now.status != "ok":
        return now
    samples = tuple(old + new for old, new in zip(before.samples, now.samples, strict=True))
    counts = (*(before.jobs or (len(before.rounds),)), len(now.rounds))
    return replace(_joined(before, now), samples=samples, jobs=counts)


def _joined(before: Measurement, now: Measurement) -> Measurement:
    """The later measurement of a candidate, with the soak and the compile time of the earlier one."""
    worst = max(before.relative_error or 0.0, now.relative_error or 0.0)
    return replace(now, relative_error=worst, compile_s=before.compile_s, conditions=before.conditions | now.conditions)
