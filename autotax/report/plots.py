"""The plots of the page: what winners win, and how a search went."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotax.db.records import TrialRecord, WinnerRecord
from autotax.report.svg import COLOURS, GREY, PALE, bar, cross, dot, line, path, picture, ticks, words
from autotax.report.wording import interval, microseconds, parameters, times

LEFT, WIDTH, ROW, TOP = 330, 520, 22, 50
"""Pixels: of the names, of the axis, of a winner, above the first one."""
TAXED = {"work": COLOURS[0], "still paid": COLOURS[4], "won back": COLOURS[5]}
SEARCH_WIDTH, SEARCH_HEIGHT, MARGIN = 780, 260, 60
SLOWEST = 8.0
"""Trials that take so many times as long as the best one are drawn as if they took no longer."""


def speedups(winners: Sequence[tuple[str, WinnerRecord]]) -> str:
    """Named winners, a line each: how many times faster than bulk-synchronous, with the confidence interval."""
    low = min(0.9, *(winner.interval_low for _, winner in winners))
    high = max(1.1, *(winner.interval_high for _, winner in winners))
    height = TOP + ROW * len(winners) + 30

    def x(ratio: float) -> float:
        return LEFT + WIDTH * (ratio - low) / (high - low)

    parts = [words(LEFT, 20, "times as fast as bulk-synchronous, with the 95 % interval")]
    for tick in ticks(low, high, 0.1 if high - low < 0.8 else 0.25):
        at, is_bsp = x(tick), math.isclose(tick, 1.0)
        parts += [line(at, TOP - 14, at, height - 24, GREY if is_bsp else PALE, 2 if is_bsp else 1)]
        parts += [words(at, height - 8, f"{tick:.4g}", "middle")]
    for number, (name, winner) in enumerate(winners):
        y = TOP + ROW * number
        ends = winner.interval_low, winner.interval_high
        told = f"{winner.config.variant}: {microseconds(winner.latency_us)} us, {times(winner.speedup)} {interval(ends)}"
        parts += [words(LEFT - 12, y + 4, name, "end"), line(x(ends[0]), y, x(ends[1]), y, GREY, 3)]
        parts.append(dot(x(winner.speedup), y, COLOURS[5 if winner.speedup >= 1 else 4], told))
    return picture(LEFT + WIDTH + 30, height, parts)


def taxed(calls: Sequence[tuple[str, float, float, float]]) -> str:
    """Named calls with the microseconds of the work itself, of the tuned config and of BSP: of BSP what is work, what is still
    paid beyond it, and what is won back.
    """
    height = TOP + ROW * len(calls) + 10
    parts, at = [], float(LEFT)
    for name, colour in TAXED.items():
        parts += [bar(at, at + 14, 18, colour, name), words(at + 20, 22, name)]
        at += 170
    for number, (name, work, tuned, bsp) in enumerate(calls):
        y = TOP + ROW * number
        ends = [0.0, min(work, tuned, bsp), min(tuned, bsp), bsp]
        parts.append(words(LEFT - 12, y + 4, name, "end"))
        for (told, colour), first, last in zip(TAXED.items(), ends, ends[1:], strict=False):
            x1, x2 = (LEFT + WIDTH * end / bsp for end in (first, last))
            parts.append(bar(x1, x2, y, colour, f"{told}: {microseconds(last - first)} us of {microseconds(bsp)}"))
    return picture(LEFT + WIDTH + 30, height, parts)


def search(trials: Sequence[TrialRecord]) -> str:
    """Trials in their order: the latency of each (logarithmic), those that failed at the top; the best so far as a line."""
    timed = [trial.latency_us for trial in trials if trial.verified and trial.latency_us]
    best = min(timed, default=1.0)
    worst = min(max(timed, default=1.0) * 1.05, best * SLOWEST)
    colours = dict(zip(sorted({trial.config.variant for trial in trials}), COLOURS * len(trials), strict=False))
    bottom, top = SEARCH_HEIGHT - 30, 70

    def x(number: int) -> float:
        return MARGIN + (SEARCH_WIDTH - 2 * MARGIN) * number / max(1, len(trials) - 1)

    def y(us: float) -> float:
        return bottom - (bottom - top) * math.log(min(us, worst) / best) / math.log(max(worst / best, 1.01))

    parts = [line(MARGIN, y(us), SEARCH_WIDTH - MARGIN, y(us), PALE) for us in (best, worst)]
    parts += [words(MARGIN - 8, y(us) + 4, microseconds(us), "end") for us in (best, worst)]
    parts += [words(MARGIN - 8, top - 22, "failed", "end"), words(SEARCH_WIDTH / 2, SEARCH_HEIGHT - 8, "trials", "middle")]
    for place, (variant, colour) in enumerate(colours.items()):
        at = 10 + 155 * (place % 5), 16 + 16 * (place // 5)
        parts += [dot(at[0], at[1] - 4, colour, variant, 4), words(at[0] + 9, at[1], variant)]
    line_of_best: list[tuple[float, float]] = []
    for number, trial in enumerate(trials):
        colour, told = colours[trial.config.variant], f"{trial.config.variant} {parameters(trial.config)}"
        if trial.verified and trial.latency_us:
            parts.append(dot(x(number), y(trial.latency_us), colour, f"{microseconds(trial.latency_us)} us: {told}", 3))
            line_of_best.append((x(number), max(y(trial.latency_us), *(at for _, at in line_of_best[-1:]), 0.0)))
        else:
            parts.append(cross(x(number), top - 26, colour, f"{trial.status}: {told}"))
    return picture(SEARCH_WIDTH, SEARCH_HEIGHT, [*parts, path(line_of_best, GREY)])
