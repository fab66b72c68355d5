"""The time limit of a problem. The search ends early enough for the finals, and nothing outlasts the grace."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

GRACE_S, GRACE_SHARE = 10.0, 0.2
"""A run ends within its limit and the larger of GRACE_S and this share of the limit."""
CLOSING_S = 3.0
"""The part of the grace in which ranks end and the verdict is stored and printed."""
MOST_FOR_FINALS = 0.5
"""The largest share of the limit that is kept for the finals."""


@dataclass(frozen=True)
class TimeLimit:
    """`seconds` from the monotonic time `began`; None: no limit."""

    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until the limit, 0 after it; infinite without one."""
        return math.inf if self.seconds is None else max(0.0, self.began + self.seconds - time.monotonic())

    @property
    def last(self) -> float | None:
        """Seconds that the last job of the ranks may take, the grace included; None without a limit."""
        if self.seconds is None:
            return None
        grace = max(GRACE_S, GRACE_SHARE * self.seconds) - CLOSING_S
        return max(0.0, self.began + self.seconds + grace - time.monotonic())

    def reserved(self, finals_s: float) -> float:
        """Seconds to keep for finals that are expected to take `finals_s`."""
        return 0.0 if self.seconds is None else min(finals_s, MOST_FOR_FINALS * self.seconds)

    def __str__(self) -> str:
        return f"the time limit of {self.seconds:g} s"
