"""Declarations of operators that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from autotax.core.errors import UsageError
from autotax.operators import Operator, Problem, declaration, dtype, ranks, registry


@dataclass(frozen=True)
class Nothing(Problem):
    dtype: str = dtype()
    world_size: int = ranks()
    op: ClassVar[str] = "nothing"
    nbytes: ClassVar[int] = 1


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator[Nothing]:
    """An operator that is registered only during the test."""
    registry.operators()
    mine = dict(declaration.declared)
    monkeypatch.setattr(declaration, "declared", mine)
    monkeypatch.setattr(registry, "declared", mine)
    return Operator(Nothing)


def test_the_baseline_is_called_bsp(operator: Operator[Nothing]) -> None:
    with pytest.raises(UsageError, match="nothing declares 'slow' as baseline; the baseline, and it alone, is 'bsp': rename it"):
        operator.variant("slow", "no.module:Slow", role="baseline")
    with pytest.raises(UsageError, match="nothing declares 'bsp' as search"):
        operator.variant("bsp", "no.module:Slow")
    with pytest.raises(UsageError, match="nothing has no baseline: declare a variant 'bsp'"):
        _ = operator.baseline
    operator.variant("bsp", "no.module:Slow", role="baseline")
    assert operator.baseline == "bsp"


def test_a_name_is_one_kernels(operator: Operator[Nothing]) -> None:
    operator.variant("push", "one.module:Push")
    operator.variant("push", "one.module:Push")  # as when a notebook cell runs twice
    with pytest.raises(UsageError, match=r"has a variant 'push' of one.module already: give that of other.module another name"):
        operator.peer("push", "other.module:Push")
