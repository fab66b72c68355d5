"""The tuner: the search, the finalist round, the verdict."""

from autotax.core.settings import Settings
from autotax.tuner.comparison import Comparison, Row, compare
from autotax.tuner.progress import Listener, Progress, Silence, Standing, Verdict
from autotax.tuner.search import compile_ahead
from autotax.tuner.tuning import prove, tune

__all__ = [
    "Comparison", "Listener", "Progress", "Row", "Settings", "Silence", "Standing", "Verdict",
    "compare", "compile_ahead", "prove", "tune",
]  # fmt: skip
