"""The kernel that serves all sizes of a bucket: prepared for the greatest of them, fitted to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db.size_buckets import bucket
from autotax.hardware import Hardware
from autotax.nn.base import SizeChoice
from autotax.nn.tuned import Tuned
from autotax.operators.inputs import make_inputs


class BucketKernels(Tuned):
    """One config for the rows `m` of one problem and for the smaller ones of its bucket. Construction is collective.

    Raises UsageError, on all ranks alike, where the config cannot be had.
    """

    def _tune(self, problems: list[Problem], hardware: Hardware, configs: Sequence[Config | None], notes: list[str]) -> None:
        """See Tuned._tune. There is no baseline beside it: what this cannot serve is left to the caller."""
        (problem,), (config,) = problems, configs
        assert config is not None
        self._kernels = {problem: self._operators([(problem, config)], hardware, notes)}
        if not self._kernels[problem]:
            raise UsageError("; ".join(notes) or f"{config} cannot be prepared for {problem.key}")
        self._choices = (SizeChoice(problem, config),)

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        """See Module._rehearsals. One size of each kind that Triton compiles by itself."""
        from autotax.nn.prepare import one_of_each_kind, special

        world, (most, least) = problem.world_size, (_rows(problem), bucket(_rows(problem))[0])
        sizes = iter([most, *range(most // world * world, least - 1, -world)])
        for rows in one_of_each_kind(sizes, lambda rows: (special(-(-rows // world)), special(rows))):
            smaller = with_rows(problem, rows)
            call = make_inputs(smaller, 0, 0, torch.device("meta"))
            yield smaller, tuple(torch.empty_like(each, device=self._device) for each in (*call.tensors, call.out))

    def kernel_for(self, problem: Problem) -> Any:
        """The kernel for a problem of the bucket, or None where it cannot be fitted. Work of the host alone."""
        ((_, (kernel,)),) = self._kernels.items()
        return self._fitted(kernel, problem)


def _rows(problem: Problem) -> int:
    rows: int = problem.to_dict()["m"]
    return rows


def with_rows(problem: Problem, rows: int) -> Problem:
    """The same problem with another number of rows."""
    return replace(problem, m=rows)  # type: ignore[call-arg]
