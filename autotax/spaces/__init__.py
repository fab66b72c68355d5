"""WHAT MAY VARY: one folder an operator, one module a variant; which there are, the operator's declaration says."""

from __future__ import annotations

from autotax.hardware import Hardware
from autotax.problem import Problem
from autotax.spaces.space import Constraint, Space, VariantSpace

__all__ = ["Constraint", "Space", "VariantSpace", "space_for"]


def space_for(problem: Problem, hardware: Hardware) -> Space:
    """The search space of a problem on a machine."""
    from autotax.operators import registry

    return Space(problem, hardware, registry.of(problem).spaces(problem, hardware))
