"""Plots of results for notebooks: `autotax.plot(result)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from autotax.db.records import TrialRecord
from autotax.report import charts
from autotax.report.charts import Ratio
from autotax.report.tables import outcome, scatter_of, title
from autotax.tuner.comparison import Comparison
from autotax.tuner.finalists import speedup
from autotax.tuner.progress import Verdict


@dataclass(frozen=True, repr=False)
class Plot:
    """A plot that a notebook displays."""

    title: str
    svg: str
    """The picture, or nothing if there is nothing to draw; the title says why."""

    def __repr__(self) -> str:
        return f"<Plot: {self.title}>"

    def _repr_html_(self) -> str:
        return f"<figure>{self.svg}<figcaption>{escape(self.title)}</figcaption></figure>"


def plot(result: Verdict | Comparison | Sequence[TrialRecord]) -> Plot:
    """The plot of a result.

    Args:
        result: A verdict or a comparison: its rows, in times of BSP with 95 % intervals. Trials: the search of the first problem,
            trial by trial, and the best so far.

    Returns:
        A plot that a notebook displays. Where samples of CPU ranks scatter so that ratios mean nothing, it has no picture and
        says so.
    """
    if isinstance(result, Verdict | Comparison):
        about = f"{title(result.problem)}: {outcome(result) if isinstance(result, Verdict) else 'compared'}"
        noise = scatter_of(result)
        ratios = [] if noise else _of_verdict(result) if isinstance(result, Verdict) else _of_comparison(result)
        return _drawn(f"{about}; {noise}" if noise else about, charts.speedups(ratios) if ratios else "")
    problem = next((trial.run.problem for trial in result if trial.run), None)
    return _drawn(f"{title(problem)}: the search" if problem else "no trials", charts.first_search(result))


def _drawn(about: str, svg: str) -> Plot:
    charts.RENDERER.close()
    return Plot(about, svg)


def _of_verdict(verdict: Verdict) -> list[Ratio]:
    bsp = verdict.baseline.latency_us if verdict.baseline else None
    return [
        Ratio(
            f"{rank}. {standing.measurement.config.variant}", standing.measurement.config.variant, standing.speedup,
            *standing.interval, standing.measurement.latency_us, bsp,
        )
        for rank, standing in enumerate(verdict.standings, 1)
    ]  # fmt: skip


def _of_comparison(compared: Comparison) -> list[Ratio]:
    """The rows with a speed-up; the interval is that of the median of the paired samples."""
    bsp = next((row.measurement for row in compared.rows if row.variant == "bsp" and row.speedup == 1.0), None)
    if bsp is None:
        return []
    return [
        Ratio(row.name, row.variant, row.speedup, *speedup(bsp.rounds, row.measurement.rounds)[1], row.measurement.latency_us,
              bsp.latency_us)
        for row in compared.rows if row.speedup is not None
    ]  # fmt: skip
