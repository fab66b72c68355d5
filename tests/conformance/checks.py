"""Helpers of the conformance suites: running checks by name, expecting errors, and reporting failures."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def raises(kind: type[BaseException], words: str = "") -> Iterator[None]:
    """Fails unless its body raises `kind` with a message that matches the regular expression `words` somewhere."""
    try:
        yield
    except kind as error:
        assert re.search(words, str(error)), f"the message is {str(error)!r}; it must match {words!r}"
    else:
        raise AssertionError(f"nothing was raised; {kind.__name__} is due")


def run_all(checks: Mapping[str, Callable[[], None]]) -> int:
    """Runs all checks, also after a failure, and returns their number. Raises AssertionError with a line for each failure."""
    failures = []
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            failures.append(f"{name}: {said} ({_place(error)})")
    if failures:
        raise AssertionError("\n".join(failures))
    return len(checks)


def _place(error: Exception) -> str:
    """The line of the suite at which an error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__)
    suite = [frame for frame in frames if Path(frame.filename).parent == here.parent and frame.filename != __file__]
    last = (suite or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}: {last.line}"
