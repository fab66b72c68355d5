"""Rows of figures as a data frame, where pandas is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from autotax.core.errors import UsageError


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` with a row for each mapping. Raises UsageError without pandas."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise UsageError("to_frame needs pandas, which is not installed: run `pip install pandas`, or read the rows") from None
    return pandas.DataFrame(list(rows))
