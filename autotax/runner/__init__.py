"""RUNNING a config on all ranks: rank pool, watchdog, measurement. Live and replayed runs share one interface.

Whatever is imported here, every rank imports when it starts; `replay`, which needs the database, is therefore left out.
"""

from autotax.runner.local_runner import LiveRunner
from autotax.runner.measurement import Candidate, Effort, Meanwhile, Measurement, Runner

__all__ = ["Candidate", "Effort", "LiveRunner", "Meanwhile", "Measurement", "Runner"]
