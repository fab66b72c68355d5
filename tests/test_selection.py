"""The cases that only `make test-all` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["a", "b"])
def test_each_value(size, kind):
    print(f"ran {size}{kind}.")

@pytest.mark.sampled(by=lambda size: {"parity": size % 2})
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_parity(size):
    print(f"ran {size}.")

@pytest.mark.parametrize("size", [5, pytest.param(6, marks=pytest.mark.volume)])
def test_one_by_hand(size):
    print(f"ran {size}.")
"""


def test_a_sampled_test_keeps_each_value_and_is_whole_without_the_selection(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(CASES)
    few = pytester.runpytest_inprocess("-s", "-m", "not alone and not volume")
    few.assert_outcomes(passed=4 + 2 + 1, deselected=4 + 2 + 1)
    output = few.stdout.str()
    assert all(f"ran {size}a." in output or f"ran {size}b." in output for size in "1234")
    assert "a." in output and "b." in output and "ran 5." in output and "ran 6." not in output
    pytester.runpytest_inprocess("-m", "not alone").assert_outcomes(passed=8 + 4 + 2)
