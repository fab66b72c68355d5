"""Search spaces: a module per operator, or two; one function per variant. The operator's declaration lists its variants."""

from __future__ import annotations

from autotax.core.problem import Problem
from autotax.core.space import Constraint, Space, VariantSpace
from autotax.hardware import Hardware

__all__ = ["Constraint", "Space", "VariantSpace", "space_for"]


def space_for(problem: Problem, hardware: Hardware) -> Space:
    """The search space of a problem on a machine.

    Args:
        problem: The problem to tune.
        hardware: The machine that runs it.

    Returns:
        The variants that run there, each with its parameters, constraints and seeds.
    """
    from autotax.operators import registry

    return Space(problem, hardware, registry.of(problem).spaces(problem, hardware))
