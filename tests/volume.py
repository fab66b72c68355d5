"""Cases that are left to `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def volume(*cases: Any) -> list[Any]:
    """Each value, or tuple of values, as a parameter that is volume."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.volume) for case in cases]
