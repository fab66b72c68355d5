"""WHICH of two winners of one key is the better proven. A pure rule, so that it does not matter who merges what with whom."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotax.db.records import WinnerRecord

Strength = tuple[bool, float, int, str, str]


@dataclass(frozen=True)
class Entry:
    """A winner on its way between databases. Its `trial_id` means nothing outside the database that it was stored in."""

    winner: WinnerRecord
    by: str | None = None
    """user@host that tuned it, if that is told."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, all that there is to know."""
        winner = self.winner
        return {
            "problem": winner.problem.to_dict(),
            "hardware": winner.hardware.to_dict(),
            "environment": winner.environment.to_dict(),
            "kernel_digest": winner.kernel_digest,
            "conditions": winner.conditions.to_dict(),
            "config": winner.config.to_dict(),
            "baseline": winner.baseline.to_dict(),
            "latency_us": winner.latency_us,
            "baseline_us": winner.baseline_us,
            "speedup": winner.speedup,
            "interval": [winner.interval_low, winner.interval_high],
            "tie": winner.tie,
            "verified": winner.verified,
            "samples": winner.samples,
            "tuned_at": winner.created_at.isoformat() if winner.created_at else None,
            "tuned_by": self.by,
        }

    @cached_property
    def digest(self) -> str:
        """Of all but who tuned it, which is not told of what was tuned in the same database, nor by an anonymous export."""
        told = {name: value for name, value in self.to_dict().items() if name != "tuned_by"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def count(self) -> int:
        """Samples of the winning config in its round, over all ranks."""
        return sum(map(len, (self.winner.samples or {}).get(self.winner.config.digest, [])))

    @cached_property
    def strength(self) -> Strength:
        """Verified, then the lower bound of the speed-up over bulk-synchronous, then the samples; then the digest decides."""
        return self.winner.verified, self.winner.interval_low, self.count, self.digest, self.by or ""


def merge(*sides: Iterable[Entry]) -> dict[tuple[object, ...], Entry]:
    """The strongest entry of each key, whatever the order of the sides and of their entries."""
    best: dict[tuple[object, ...], Entry] = {}
    for entry in (entry for side in sides for entry in side):
        key = entry.winner.key
        if key not in best or entry.strength > best[key].strength:
            best[key] = entry
    return best


def verdict(one: Entry, other: Entry) -> str:
    """Why `one` and not the other, in a few words."""
    (verified, bound, count, *_), (_, other_bound, other_count, *_) = one.strength, other.strength
    if verified != other.winner.verified:
        return "it is verified, the other is not"
    if bound != other_bound:
        return f"its speed-up is at least {bound:.4g}x, the other's {other_bound:.4g}x"
    if count != other_count:
        return f"the bounds are equal, but it has {count} samples, the other {other_count}"
    return "the bounds and samples are equal; the greater digest decides"
