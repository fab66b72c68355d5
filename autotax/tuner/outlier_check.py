"""A figure that is too good to be true is measured again, and the slower of the two stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotax.runner.measurement import Measurement

SUSPICIOUS = 0.75
"""A latency below this share of the best so far is doubted ..."""
KNOWN = 5
"""... once so many figures are there to tell what is usual."""
ALIKE = 0.1
"""Figures that differ by a smaller share agree."""


def doubtful(measurement: Measurement, measured: Sequence[Measurement]) -> bool:
    """Whether a measurement is suspiciously fast after those before it."""
    before = [m.latency_us for m in measured if m.status == "ok" and m.latency_us is not None]
    if measurement.status != "ok" or measurement.latency_us is None or len(before) < KNOWN:
        return False
    return measurement.latency_us < SUSPICIOUS * min(before)


def settled(first: Measurement, again: Measurement) -> tuple[Measurement, str | None]:
    """What stands of a doubted measurement and its repetition, and a notice if they do not agree."""
    first_us, again_us = first.latency_us, again.latency_us
    assert first_us is not None
    stands = first if again.status == "ok" and again_us is not None and again_us <= first_us else again
    stands = replace(stands, conditions=stands.conditions | {"measured_again": first_us})
    if again_us is not None and again.verified and abs(again_us - first_us) <= ALIKE * first_us:
        return stands, None
    found = f"{again_us:.1f} us" if again_us is not None else again.status
    return stands, f"{first.config} took {first_us:.1f} us, suspiciously little; measured again: {found}, and the worse stands"
