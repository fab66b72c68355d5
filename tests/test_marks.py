"""The Makefile's lists of tests agree with the marks in the test files."""

from __future__ import annotations

from tests.conftest import ALONE, HERE


def test_what_needs_the_machine_is_named_in_the_makefile() -> None:
    """No target would run a file that the Makefile does not name."""
    (line,) = (line for line in (HERE.parent / "Makefile").read_text().splitlines() if line.startswith("NAMED := "))
    assert {HERE.parent / name for name in line.split()[2:]} == set(ALONE)
    assert all(path.exists() for path in ALONE)
