"""The answer of a look-up: a pure function of the problem, the place and the known winners."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db.index import IndexedWinner, representative, spelled
from autotax.db.records import Place, same_devices
from autotax.db.shipped import Source
from autotax.operators import registry
from autotax.spaces import space_for

LEAST_EXPECTED = 0.98
"""A winner of another size is taken only if it is expected to be this many times as fast as BSP."""


@dataclass(frozen=True, eq=False)
class Answer(Config):
    """A config and the reason for its choice. It equals, hashes and serialises like a plain Config."""

    match: str = "fallback"
    """exact, nearest, stale (only if allowed), invariant (only if requested) or fallback."""
    from_problem: str | None = None
    """Key of the problem that the config won; None for a fallback."""
    reason: str = ""
    """One line."""
    passed_over: bool = False
    """Whether there are winners of exactly this problem on such devices, but none holds and fits. Then the reason says why."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return (self.variant, self.params) == (other.variant, other.params)

    __hash__ = Config.__hash__


def answer(problem: Problem, here: Place, sources: Sequence[Source], *, allow_stale: bool) -> Answer:
    """The config to run for `problem` in the place `here`."""
    refused: list[str] = []
    operator = registry.of(problem)
    for source in sources:
        if answered := _exact(problem, here, source, refused) or _nearest(problem, here, source, refused):
            return answered
    families = [source.index.of_family(problem.key) for source in sources]
    for of_greater in (_between, _above):
        for source, family in zip(sources, families, strict=True):
            if answered := of_greater(problem, here, source, family, refused):
                return answered
    if stricter := operator.stricter(problem):
        for source in sources:
            if answered := _stricter(problem, *stricter, here, source, refused):
                return answered
    if allow_stale:
        for source in sources:
            if answered := _stale(problem, here, source, refused):
                return answered
    return _fallback(problem, operator.fallback(problem, here.hardware), here, sources, refused)


def invariant_answer(problem: Problem, here: Place, sources: Sequence[Source]) -> Answer:
    """One config for all sizes up to those of the problem, whose rows have the same bits whatever the number of rows.

    Of such winners of any size, the config that won most often; without one, the first such seed. Raises UsageError where the
    operator has none.
    """
    operator = registry.of(problem)

    def serves(config: Config) -> bool:
        return operator.is_invariant(problem, config) and operator.why_not(problem, here.hardware, config) is None

    for source in sources:
        winners = [winner for winner in _current(source.index.of_family(problem.key), here) if serves(winner.config)]
        if winners:
            wins = Counter(winner.config for winner in winners)
            best = max(winners, key=lambda winner: (wins[winner.config], winner.interval_low, winner.config_json))
            reason = f"{source.origin}it won {wins[best.config]} sizes, and its rows do not depend on their number"
            return _tuned(best, "invariant", reason)
    for seed in space_for(problem, here.hardware).seeds():
        if serves(seed):
            return Answer(seed.variant, seed.params, "invariant", None, "no winner keeps its bits for all sizes: a seed")
    raise UsageError(
        f"batch_invariant is set; no variant of {problem.op} keeps the bits of rows for {problem.key} here: leave it out"
    )


def to_tune(problem: Problem, here: Place, sources: Sequence[Source]) -> Problem | None:
    """The representative of the problem's bucket, whose winner would serve calls like this one. None if it or the problem itself
    has a winner here.
    """
    last = representative(problem)
    tuned = any(_current(source.index.of_problem(key), here) for source in sources for key in (problem.key, last.key))
    return None if tuned else last


def _current(winners: Sequence[IndexedWinner], here: Place) -> list[IndexedWinner]:
    """Winners that hold here. Winners proven under the requested conditions (in place or back to back) come first, sorted by
    strength of proof.

    A problem may have several, if some were tuned where other variants differ.
    """

    def by_proof(winner: IndexedWinner) -> tuple[bool, float, str]:
        """A sort key that does not depend on the order of insertion or of a merge."""
        return winner.place.conditions.mode != here.conditions.mode, -winner.interval_low, winner.config_json

    return sorted((winner for winner in winners if winner.holds(here)), key=by_proof)


def _exact(problem: Problem, here: Place, source: Source, refused: list[str]) -> Answer | None:
    tuned = f"{source.origin}tuned for this problem" if source.origin else "tuned here"
    winners = _current(source.index.of_problem(problem.key), here)
    for winner in _fitting(problem, here, winners, refused, f"{source.whose} winner of this problem does"):
        return _tuned(winner, "exact", f"{tuned}; {_margin(winner)}")
    return None


def _fitting(
    problem: Problem, here: Place, winners: Iterable[IndexedWinner], refused: list[str], subject: str
) -> Iterator[IndexedWinner]:
    """The winners whose configs can run a problem here. `refused` takes why others do not fit."""
    for winner in winners:
        if why_not := registry.of(problem).why_not(problem, here.hardware, winner.config):
            refused.append(f"{subject} not fit: {why_not}")
        else:
            yield winner


def _nearest(problem: Problem, here: Place, source: Source, refused: list[str]) -> Answer | None:
    bucket = _current(source.index.of_bucket(problem.key), here)
    return _helpful(problem, here, source, bucket, refused, "nearest winner", "nearest in its bucket", LEAST_EXPECTED)


def _helpful(
    problem: Problem, here: Place, source: Source, winners: Sequence[IndexedWinner], refused: list[str], name: str, place: str,
    least: float,
) -> Answer | None:  # fmt: skip
    """The nearest of the winners of other sizes that fits and is expected to be `least` times as fast as BSP here."""
    for winner in _by_distance(problem, winners):
        sizes = _sizes(winner.problem_key, problem)
        difference, share = _difference(problem, sizes), _kept_share(problem, sizes, winner.config)
        if _expected_to_help(problem, here, winner, share, f"the {name}, {difference},", refused, least):
            return _tuned(winner, "nearest", f"{source.origin}the {place}, {difference}; {_margin(winner)} there")
    return None


def _stricter(problem: Problem, like: Problem, left: float, here: Place, source: Source, refused: list[str]) -> Answer | None:
    """The nearest winner in the bucket of a stricter problem, of whose speed-up a part is `left`: see Operator.stricter."""
    for winner in _by_distance(like, _current(source.index.of_bucket(like.key), here)):
        share = left * _kept_share(like, _sizes(winner.problem_key, like), winner.config)
        if _expected_to_help(problem, here, winner, share, f"the winner of {winner.problem_key}", refused):
            reason = f"{source.origin}that of a stricter problem, {winner.problem_key}; {_margin(winner)} there"
            return _tuned(winner, "nearest", reason)
    return None


def _expected_to_help(
    problem: Problem, here: Place, winner: IndexedWinner, share: float, subject: str, refused: list[str],
    least: float = LEAST_EXPECTED,
) -> bool:  # fmt: skip
    """Whether a winner of another problem fits, and is expected to beat BSP when only a `share` of its speed-up is left.
    `refused` takes why not.
    """
    if not any(_fitting(problem, here, [winner], refused, f"{subject} does")):
        return False
    expected = winner.interval_low * share
    if expected >= least or winner.config.variant == "bsp":
        return True
    refused.append(f"{subject} is expected to be {expected:.2f}x as fast as BSP here")
    return False


LIBRARY_ROWS = 128
"""Rows of a tile of the vendor's GEMM."""


def _kept_share(problem: Problem, sizes: dict[str, int], config: Config) -> float:
    """The part of a winner's speed-up over BSP that is expected to be left at the sizes of the problem.

    Both times go with the operator's roofline. BSP multiplies whole tiles of all rows, the winner whole tiles of the rows of each
    rank.
    """
    block = config.values.get("block_m")
    if set(sizes) != {"m"} or not isinstance(block, int):  # without tiles of its own, a winner goes with the vendor's GEMM
        return 1.0
    operator, ranks = registry.of(problem), problem.world_size

    def us(rows: int, tile: int) -> float:
        return operator.roofline_us(replace(problem, m=-(-rows // tile) * tile))  # type: ignore[call-arg]

    tuned, here = sizes["m"], problem.to_dict()["m"]
    bsp = us(here, LIBRARY_ROWS) / us(tuned, LIBRARY_ROWS)
    return bsp / (us(here, block * ranks) / us(tuned, block * ranks))


LEAST_BETWEEN = 1.02
"""A winner of greater sizes is taken only if it is at least this many times as fast as BSP here, should times grow with sizes."""


Family = Sequence[IndexedWinner]
"""All winners of a source that differ from a problem in varying sizes alone, stale ones too."""


def _between(problem: Problem, here: Place, source: Source, family: Family, refused: list[str]) -> Answer | None:
    """The winner of greater sizes, where BSP takes longer at smaller sizes already.

    Times grow with sizes: here the config takes at most its time at the greater sizes, and BSP at least that at the smaller ones.
    """
    family = _current(family, here)
    sizes = {winner.problem_key: _sizes(winner.problem_key, problem) for winner in family}

    def is_within(winner: IndexedWinner, *, above: bool) -> bool:
        pairs = [(size, getattr(problem, name)) for name, size in sizes[winner.problem_key].items()]
        return all(size >= mine if above else size <= mine for size, mine in pairs)

    smaller = [winner for winner in family if is_within(winner, above=False)]
    for winner in _by_distance(problem, [winner for winner in family if is_within(winner, above=True)]):
        alike = [other for other in smaller if other.place.conditions.mode == winner.place.conditions.mode]
        lower = max(alike, key=lambda other: (_least_of_bsp(other), other.problem_key), default=None)
        if lower is None or winner.config.variant == "bsp":
            continue
        least = _least_of_bsp(lower) / winner.latency_us
        tuned, at = (", ".join(f"{name}={size}" for name, size in sizes[of.problem_key].items()) for of in (winner, lower))
        if least >= LEAST_BETWEEN and any(_fitting(problem, here, [winner], refused, f"the winner for {tuned} does")):
            reason = f"tuned for {tuned}, where it is {least:.2f}x faster than BSP for {at}"
            return _tuned(winner, "nearest", f"{source.origin}{reason}")
    return None


MOST_ABOVE, LEAST_ABOVE = 2.0, 1.1
"""Beyond the bucket a winner of up to twice the size is taken, if it is expected to be 1.1 times as fast as BSP: at another size
another config may be the fastest.
"""


def _above(problem: Problem, here: Place, source: Source, family: Family, refused: list[str]) -> Answer | None:
    """The winner of the next greater size, for problems of one varying size. A problem with a stale winner waits for its refresh.
    """
    if any(winner.problem_key == problem.key for winner in family):
        return None

    def is_above(winner: IndexedWinner) -> bool:
        ratios = [size / getattr(problem, name) for name, size in _sizes(winner.problem_key, problem).items()]
        return len(ratios) == 1 and 1 < ratios[0] <= MOST_ABOVE and winner.config.variant != "bsp"

    greater = [winner for winner in _current(family, here) if is_above(winner)]
    return _helpful(problem, here, source, greater, refused, "next greater winner", "next greater size", LEAST_ABOVE)


def _least_of_bsp(winner: IndexedWinner) -> float:
    """Microseconds of BSP for a winner's problem, by the lower end of the winner's speed-up."""
    return winner.latency_us * winner.interval_low


def _stale(problem: Problem, here: Place, source: Source, refused: list[str]) -> Answer | None:
    """The answer from a stale winner. Winners of another backend are left out, because their kernels cannot run here."""
    winners = source.index.of_problem(problem.key)
    possible = _fewest_differences([w for w in winners if w.place.hardware.backend == here.hardware.backend], here)
    for winner in _fitting(problem, here, possible, refused, f"{source.whose} stale winner of this problem does"):
        reason = f"{source.origin}tuned for this problem, but it is stale: {', '.join(winner.differences(here))}"
        return _tuned(winner, "stale", reason)
    return None


def _fallback(problem: Problem, config: Config, here: Place, sources: Sequence[Source], refused: list[str]) -> Answer:
    """The baseline's config, and why there is no other."""
    reasons = [source.empty for source in sources if source.empty]
    for source in sources:
        for winner in _fewest_differences(source.index.of_problem(problem.key), here)[:1]:
            if differences := winner.differences(here):
                reasons.append(f"{source.whose} winner of this problem is stale: {', '.join(differences)}")
    reasons += refused[:1]
    reason = "; ".join(reasons) or f"no winner of this problem, nor of one in its bucket ({spelled(problem)})"
    winners = [winner for source in sources for winner in source.index.of_problem(problem.key)]
    passed_over = any(same_devices(winner.place.hardware, here.hardware) for winner in winners)
    return Answer(config.variant, config.params, "fallback", None, f"{reason}; run `autotax tune`", passed_over)


def _fewest_differences(winners: Sequence[IndexedWinner], here: Place) -> list[IndexedWinner]:
    """Sorts winners by the number of differences, then the latest first, then by name, so that every rank gets the same order."""
    return sorted(winners, key=lambda w: (len(w.differences(here)), -w.trial_id, w.config_json))


def _by_distance(problem: Problem, winners: Sequence[IndexedWinner]) -> list[IndexedWinner]:
    """Sorts winners by distance, then the larger first, then by name, so that every rank gets the same order."""

    def distance(winner: IndexedWinner) -> tuple[float, list[int], str]:
        sizes = _sizes(winner.problem_key, problem)
        ratios = [abs(math.log(size / getattr(problem, name))) for name, size in sizes.items()]
        return sum(ratios), [-size for size in sizes.values()], winner.problem_key

    return sorted(winners, key=distance)  # a stable sort keeps the order of proof within one problem


def _sizes(key: str, problem: Problem) -> dict[str, int]:
    """The varying sizes of a problem of the same operator, from its key."""
    fields = dict(re.findall(r"(?<=[/,])(\w+)=(\d+)", key))
    return {name: int(fields[name]) for name in problem.varying()}


def _difference(problem: Problem, sizes: dict[str, int]) -> str:
    """`tuned for m=512 and not m=500`"""
    other = [name for name, size in sizes.items() if size != getattr(problem, name)]
    tuned, requested = (", ".join(f"{name}={size[name]}" for name in other) for size in (sizes, problem.to_dict()))
    return f"tuned for {tuned} and not {requested}"


def _margin(winner: IndexedWinner) -> str:
    if winner.tie:
        return "other configs were equally fast within noise"
    if winner.speedup == 1.0:  # BSP over itself
        return "nothing beat BSP"
    return f"it is {winner.speedup:.2f}x faster than BSP [{winner.interval_low:.2f}, {winner.interval_high:.2f}]"


def _tuned(winner: IndexedWinner, match: str, reason: str) -> Answer:
    return Answer(winner.config.variant, winner.config.params, match, winner.problem_key, reason)
