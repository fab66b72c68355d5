"""The problems that each plugin asks for, among those of a model: see docs/integrations.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotax.core.problem import Problem
from autotax.operators.problems import AllGatherGemm, DecodeMerge, GemmReduceScatter


def _sum(problem: Problem) -> bool:
    """A row-parallel layer whose output each rank needs whole."""
    return isinstance(problem, GemmReduceScatter) and problem.output == "replicated"


def _merge(problem: Problem) -> bool:
    return isinstance(problem, DecodeMerge)


def _sharded_rows(problem: Problem) -> bool:
    """A layer whose activations are sharded along the sequence: torch's fused operators."""
    return isinstance(problem, AllGatherGemm) or (isinstance(problem, GemmReduceScatter) and problem.output == "scattered")


ASKED: Mapping[str, tuple[Callable[[Problem], bool], ...]] = {
    "vllm": (_sum, _merge),
    "sglang": (_sum, _merge, _sharded_rows),
    "torch": (_sharded_rows,),
}
"""Which problems a plugin looks up, by its name."""


def asked_by(engine: str, layers: Mapping[Problem, str]) -> dict[Problem, str]:
    """The problems of a model, with their layers, for which the plugin of an engine looks winners up."""
    return {problem: names for problem, names in layers.items() if any(asks(problem) for asks in ASKED[engine])}
