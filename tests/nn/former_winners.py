"""Variants that may have won once and fail now, for `--load`: one is wrong, one never ends."""

from __future__ import annotations

from autotax.operators import named
from tests.runner import faults

named("all-gather-gemm").variant("now_wrong", faults.WrongElement)
named("all-gather-gemm").variant("now_sleeps", faults.Sleeps)
