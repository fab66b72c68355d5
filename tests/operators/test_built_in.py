"""The package's own operators pass the suite that it offers for those of others."""

from __future__ import annotations

import pytest

from autotax.operators import problems
from autotax.testing import check_operator

BUILT_IN = sorted(getattr(problems, name).op for name in problems.__all__)


@pytest.mark.volume
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_operator_passes_the_suite(name: str) -> None:
    """Every variant is called on CPU ranks. tests/kernels/test_compile.py compiles whole spaces for all targets."""
    checked = check_operator(name, targets=())
    assert checked.calls > 0 and checked.refusals > 0
