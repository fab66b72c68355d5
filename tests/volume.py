"""Cases that only `make test-all` runs."""

from __future__ import annotations

from typing import Any

import pytest


def volume(*cases: Any) -> list[Any]:
    """Each value, or tuple of values, as a parameter that is volume."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.volume) for case in cases]
