"""What the Makefile says of tests holds."""

from __future__ import annotations

from tests.conftest import ALONE, HERE


def test_what_needs_the_machine_is_named_in_the_makefile() -> None:
    """What is not would never run."""
    (line,) = (line for line in (HERE.parent / "Makefile").read_text().splitlines() if line.startswith("NAMED := "))
    assert {HERE.parent / name for name in line.split()[2:]} == set(ALONE)
    assert all(path.exists() for path in ALONE)
