"""Numbers of tokens for which a winner is faster than the server's own function.

Servers choose a function by number of tokens, with thresholds written by hand. These thresholds come from the database and hold
for this machine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack
from weakref import WeakKeyDictionary

from autotax import __version__
from autotax.core.conditions import Conditions
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.core.settings import is_on
from autotax.db import lookup
from autotax.db.index import bucket, buckets_up_to
from autotax.db.shipped import sources
from autotax.hardware import Hardware, detect
from autotax.operators import registry
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, GemmReduceScatter
from autotax.operators.scaled import accumulate_of

if TYPE_CHECKING:
    import torch

    from autotax.heap.world import World
    from autotax.nn.sized import SizedModule

M = TypeVar("M", bound="SizedModule")
Ranges = list[tuple[int, int]]
IN_INVARIANT_MODE = "AUTOTAX_BATCH_INVARIANT"
"""Without it an engine in batch-invariant mode runs its own functions. It may promise the same bits on any number of ranks, or
those of a trainer.
"""
MOST_TOKENS, MOST_MERGED, MOST_NORMED = 65536, 1024, 8192
_remembered: WeakKeyDictionary[Any, dict[Hashable, Ranges]] = WeakKeyDictionary()
log = logging.getLogger("autotax")


class Where(TypedDict, total=False):
    """Machine, database and conditions of look-ups. With `world`, stale winners are proven first, and the call is collective."""

    hardware: Hardware | None
    db: str | Path | None
    conditions: Conditions | None
    world: World | None


def token_ranges(
    n: int, k: int, dtype: str, ranks: int, *, output: str = "replicated", scales: str = "none", result: str = "bf16",
    quantize: str = "none", most: int = MOST_TOKENS, **where: Unpack[Where],
) -> Ranges:  # fmt: skip
    """Numbers of tokens, first and last of each range, for which a row-parallel layer has a winner that is not bulk-synchronous.

    The layer's weight is [n, k] on each rank; `output` is "replicated" for an all-reduce, "scattered" for a reduce-scatter, and
    "gathered" for a column-parallel layer that gathers its rows.
    `scales`, `result` and `quantize` are those of a weight in e4m3. There are none for sizes that kernels do not take.
    """
    more = ranks, "nk", scales, result, quantize, "e4m3", accumulate_of(quantize)

    def problem_of(tokens: int) -> Problem:
        if output == "gathered":
            return AllGatherGemm(tokens, n, k, dtype, "m", *more)
        return GemmReduceScatter(tokens, n, k, dtype, output, *more)

    try:
        return _won(problem_of, most, **where)
    except UsageError:
        return []


def kept_bits(n: int, k: int, dtype: str, ranks: int, name: str, world: World) -> bool:
    """Whether all ranks have a winner of a row-parallel layer that keeps the bits of a token, and are asked to use it in the
    engine's batch-invariant mode. Collective.
    """
    try:
        answer = lookup.invariant(GemmReduceScatter(MOST_TOKENS, n, k, dtype, "replicated", ranks))
        ranges = [(1, MOST_TOKENS)] if is_on(IN_INVARIANT_MODE) and answer.from_problem is not None else []
    except UsageError:
        ranges = []
    return bool(agreed(ranges, f"{name} in batch-invariant mode", world))


def merge_ranges(
    heads: int, head_dim: int, dtype: str, ranks: int, *, output: str = "head_scatter", base: str = "e", most: int = MOST_MERGED,
    **where: Unpack[Where],
) -> Ranges:  # fmt: skip
    """The same for merges of decode attention over ranks that each hold a part of the KV cache."""
    return _won(lambda m: DecodeMerge(m, heads, head_dim, dtype, ranks, output, base), most, **where)


def norm_ranges(
    hidden: int, dtype: str, ranks: int, *, quant: str = "none", offset: int = 0, k: int = 0, scales: str = "none",
    quantize: str = "none", most: int = MOST_NORMED, **where: Unpack[Where],
) -> Ranges:  # fmt: skip
    """The same for all-reduce, residual and norm: beyond these numbers a server's own function is the faster one.

    With `k` for one kernel of a row-parallel product, its sum and the norm; `scales` and `quantize` are those of the product.
    """
    more = "added", quant, offset, k, scales, quantize
    try:
        return _won(lambda m: AllReduceNorm(m, hidden, dtype, ranks, *more), most, **where)
    except UsageError:
        return []


def tuned(
    module: M | None, tokens: int, group: Any, device: torch.device, key: Hashable, name: str,
    ranges: Callable[[World], Ranges], make: Callable[[], M],
) -> tuple[M | None, str]:  # fmt: skip
    """The module of a call if a winner serves this number of tokens and its kernel is prepared; else None, and why not.

    Collective at the first call of a key, which looks winners up, and where `make` makes a missing module; neither happens
    during graph capture. A module without a kernel is not made again. All ranks have the same answer.
    """
    from autotax.nn.groups import capturing
    from autotax.torch.plans import CAPTURED

    if not within(tokens, remembered(group, device, key, name, ranges)):
        return None, "no winner for this number of tokens" if key in _remembered[group] else CAPTURED
    if module is None:
        if capturing(device):
            return None, CAPTURED
        module = make()
    return (module, "") if module.tuned_for(tokens) else (None, "its kernel could not be prepared: see the warning")


def within(tokens: int, ranges: Ranges) -> bool:
    return any(first <= tokens <= last for first, last in ranges)


def remembered(group: Any, device: torch.device, key: Hashable, name: str, ranges: Callable[[World], Ranges]) -> Ranges:
    """The ranges that all ranks of a group have for `key`.

    Collective at the first call of a key. During graph capture it is not collective, and there are none for a new key.
    """
    from autotax.heap.world import World
    from autotax.nn.groups import capturing

    of_group = _remembered.setdefault(group, {})
    if key not in of_group:
        if capturing(device):
            return []
        world = World.of(group, device)
        of_group[key] = agreed(ranges(world), name, world)
    return of_group[key]


def already(group: Any, key: Hashable) -> Ranges:
    """The ranges that `remembered` has for `key`; none before its first call. Not collective."""
    ranges: Ranges = _remembered.get(group, {}).get(key, [])
    return ranges


def fingerprint(op: str) -> str:
    """Changes with each winner of an operator, whether it holds here or not: a key for what an engine keeps about its layers."""
    winners = {str(winner[:4]) for source in sources(None) for winner in source.index if winner.op == op}
    return hashlib.sha256("\n".join([__version__, *sorted(winners)]).encode()).hexdigest()


def forget_winners() -> None:
    """Drops remembered winners, so that later calls look them up again. Every rank must call it between the same calls."""
    _remembered.clear()


def agreed(ranges: Ranges, name: str, world: World) -> Ranges:
    """Returns the ranges if all ranks have the same ones; else none: a rank alone in a collective waits forever.

    Collective: every rank asks for the same layers in the same order.
    """
    from autotax.heap.world import by_rank

    everybody = world.gather(ranges, Ranges)
    if all(others == ranges for others in everybody):
        return ranges
    log.warning("autotax leaves %s: the ranks have different winners (%s); give all the same database", name, by_rank(everybody))
    return []


def listed(ranges: Sequence[tuple[int, int]]) -> str:
    """`9 to 24, 49 to 64`"""
    return ", ".join(f"{first} to {last}" for first, last in ranges)


def _won(
    problem_of: Callable[[int], Problem], most: int, *, hardware: Hardware | None = None, db: str | Path | None = None,
    conditions: Conditions | None = None, world: World | None = None,
) -> Ranges:  # fmt: skip
    ranges: Ranges = []
    problems = {last: problem_of(last) for last in buckets_up_to(most)}
    if world is not None:
        _prove(world, list(problems.values()), db, conditions)
    for last, problem in problems.items():
        answer = lookup.peek(problem, hardware=hardware, db=db, conditions=conditions)
        if answer.match == "fallback" or answer.variant == registry.of(problem).baseline:
            continue
        first = bucket(last)[0]
        if ranges and ranges[-1][1] == first - 1:
            first = ranges.pop()[0]
        ranges.append((first, last))
    return ranges


def _prove(world: World, problems: list[Problem], db: str | Path | None, conditions: Conditions | None) -> None:
    """Proves stale winners, unless $AUTOTAX_PROVE_S is 0. Collective. Servers go on whatever comes of it."""
    from autotax.nn.consensus import prove_first

    hardware = detect(world.backend)
    try:
        note = prove_first(world, problems, hardware, conditions or Conditions.usual(hardware.on_gpu), db, prove=True)
    except UsageError as error:
        note = str(error)
    if note and world.rank == 0:
        log.warning("autotax: %s", note)
