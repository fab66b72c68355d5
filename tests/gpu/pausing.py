"""For ranks: each sample follows an idle pause of its device."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotax.runner.benchmark import Series, Trial
from autotax.runner.sampling import Sampler

PAUSE_S = 0.003
timed = Sampler.timed


def _after_a_pause(self: Sampler, trial: Trial, series: Series, number: int) -> Callable[[], float]:
    self.world.synchronize()
    time.sleep(PAUSE_S)
    return timed(self, trial, series, number)


Sampler.timed = _after_a_pause  # type: ignore[method-assign]
