"""The lists of tests that need the machine or take seconds agree with the test files."""

from __future__ import annotations

import re

from tests.conftest import ALONE, HERE
from tests.slow import LIST, listed, slow


def test_what_needs_the_machine_is_named_in_the_makefile() -> None:
    """No target would run a file that the Makefile does not name."""
    (line,) = (line for line in (HERE.parent / "Makefile").read_text().splitlines() if line.startswith("NAMED := "))
    assert {HERE.parent / name for name in line.split()[2:]} == set(ALONE)
    assert all(path.exists() for path in ALONE)


def test_what_is_listed_as_slow_exists() -> None:
    for case in listed():
        file, _, name = case.partition("::")
        path, function = HERE.parent / file, name.partition("[")[0].rpartition("::")[2]
        here = path.is_file() and (not name or re.search(rf"\bdef {function}\b|\b{function} = ", path.read_text()))
        assert here, f"{case} is gone: take it out of {LIST}"


def test_cases_that_take_long_and_files_of_slow_fixtures_are_slow() -> None:
    log = """
  3.20s call     tests/a/test_b.py::test_c[1 - 2]
2.00s setup    tests/a/test_b.py::test_d
  1.50s call     tests/a/test_b.py::test_d
  1.40s call     tests/a/test_b.py::test_e
  21.0s setup    tests/test_f.py::test_g
  4.00s call     tests/test_f.py::test_h
9.00s teardown tests/a/test_b.py::test_e
"""
    assert slow(log) == ["tests/a/test_b.py::test_c[1 - 2]", "tests/a/test_b.py::test_d", "tests/test_f.py"]
