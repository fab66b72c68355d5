"""Verification of outputs: the expected output, the distance from it, and the tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from autotax.core.problem import Problem
from autotax.operators import registry
from autotax.operators.inputs import DTYPES, EIGHT_BITS, Call, Draw


@dataclass(frozen=True)
class Calls(Sequence[Call]):
    """The inputs of every rank. Each access draws them anew, because the inputs of all ranks may not fit in memory together."""

    problem: Problem
    seed: int
    device: torch.device

    def __len__(self) -> int:
        return self.problem.world_size

    @overload
    def __getitem__(self, rank: int) -> Call: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Call]: ...
    def __getitem__(self, rank: int | slice) -> Call | list[Call]:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return make_inputs(self.problem, self.seed, rank, self.device)


def make_inputs(problem: Problem, seed: int, rank: int, device: torch.device) -> Call:
    """The inputs of `rank` for a seed, and a buffer for its output."""
    return registry.of(problem).draw(problem, Draw((DTYPES | EIGHT_BITS)[problem.dtype], seed, rank, device))


def reference(problem: Problem, seed: int, rank: int, device: torch.device) -> Expected:
    """The right output of `rank` for a seed."""
    (right, spread), *more = registry.of(problem).right(problem, Calls(problem, seed, device), rank)
    # Scales are their own spread: each follows the largest of rounded numbers, so it may be off by one step.
    times = roundings(problem)
    others = tuple(Expected.of(*other, DTYPES[problem.dtype], step=other[0] is other[1], times=times) for other in more)
    return Expected.of(right, spread, (DTYPES | EIGHT_BITS)[problem.out_dtype], others, times=times)


TOLERANCE = {"bf16": 5e-3, "fp16": 2e-3, "fp32": 1e-5, "e4m3": 8e-2}
"""Largest relative error (see `distance`) that counts as right. e4m3 outputs are compared with a reference that is also
quantised. Their inputs may differ by 16-bit rounding, so a few percent of the numbers become the neighbouring e4m3 value.
"""


def roundings(problem: Problem) -> float:
    """By how much a library that rounds after each addition errs more than over two ranks.

    Roundings of w addends of equal spread have together the variance of one rounding of the sum. The sum of the first i addends
    has i / w of the sum's variance, and its rounding i / w of that of one rounding.
    """
    world = problem.addends
    return math.sqrt(((world + 1) / 2 + 1 - 1 / world) / 2) if world > 2 else 1.0


def tolerance(problem: Problem) -> float:
    """Largest relative error of the output that counts as right."""
    return TOLERANCE[problem.out_dtype] * roundings(problem)


@dataclass(frozen=True)
class Expected:
    """A right output, and the scale by which the deviation of each element is measured."""

    right: Tensor
    """float32."""
    inverse: Tensor
    """1 / the spread of each element. The spread is the typical magnitude of the element, so neither an outlier nor a value that
    happens to be near zero distorts the measure.
    """
    odd: Tensor
    """Flat indices of elements that are not finite."""
    allowed: float
    """The tolerance of this output."""
    more: tuple[Expected, ...] = ()
    """The same for the further outputs of the call."""

    @classmethod
    def of(
        cls, right: Tensor, spread: Tensor | None, dtype: torch.dtype, more: tuple[Expected, ...] = (), step: bool = False,
        times: float = 1.0,
    ) -> Expected:  # fmt: skip
        """`spread`: one per element; without it the root mean square of all elements. Deviations of the type's smallest number
        count as rounding. `step`: each element follows one rounded number, which may be the neighbour of the right one. `times`:
        see `roundings`.
        """
        odd = (~right.isfinite()).view(-1).nonzero().view(-1)
        if spread is None:
            finite = right.nan_to_num(0.0, 0.0, 0.0)
            spread = (finite.norm() / math.sqrt(max(1, right.numel()))).expand_as(right)
        numbers = torch.finfo(dtype)
        allowed = next(limit for name, limit in TOLERANCE.items() if (DTYPES | EIGHT_BITS).get(name) == dtype)
        allowed = times * (max(allowed, 1.05 * numbers.eps) if step else allowed)
        floor = max(numbers.smallest_normal * numbers.eps / allowed, torch.finfo(torch.float32).tiny)
        return cls(right, (spread + floor).reciprocal_(), odd, allowed, more)


def together(spreads: Sequence[Tensor]) -> Tensor:
    """The spread of a sum of terms of these spreads: the root of the sum of their squares, which stay in range."""
    stacked = torch.stack(tuple(spreads))
    most = stacked.amax(0).clamp_min_(torch.finfo(torch.float32).tiny)
    return torch.linalg.vector_norm(stacked.div_(most), dim=0) * most


def unit(tensor: Tensor, dim: int) -> Tensor:
    """Divides in place by the largest magnitude along a dimension, so that squares stay in range. Returns that magnitude."""
    most = tensor.abs().amax(dim, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    tensor.div_(most)
    return most


def product_and_spread(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A @ B.T, and the spread of its elements. Changes both matrices, which are float32."""
    right = a @ b.t()
    b = b.contiguous()
    most_a, most_b = (unit(matrix, 1) for matrix in (a, b))
    return right, (a.square_() @ b.square_().t()).sqrt_() * most_a * most_b.t()


def relative_error(out: Tensor, right: Tensor | Expected, call: Call | None = None) -> float:
    """How far outputs are from their references (see `farthest`). Waits for the device."""
    return float((distance(out, right) if call is None else farthest(out, right, call)).item())


def farthest(out: Tensor, right: Tensor | Expected, call: Call) -> Tensor:
    """The largest `distance` of all outputs of a call, each in units of its tolerance, times the tolerance of `out`."""
    worst = distance(out, right)
    for written, expected in zip(call.outputs[1:], right.more if isinstance(right, Expected) else (), strict=True):
        assert isinstance(right, Expected)
        worst = torch.maximum(worst, distance(written, expected) * (right.allowed / expected.allowed))
    return worst


def distance(out: Tensor, right: Tensor | Expected) -> Tensor:
    """Relative error of an output: a float32 scalar on its device; at most `tolerance` if the output is right.

    Deviations d and the reference r are in units of each element's spread. The result is the largest of

    - ||d|| / ||r|| over all elements,
    - the root of sum(d^2) / sum((r^2 + 1) / 2) over each row and each column, over 1 + 4 / sqrt(elements in it), and
    - |d| / (|r| + 1) of each element, over 8.

    It is infinite unless the non-finite elements equal those of the reference: NaN for NaN and the same infinity for infinity. If
    the reference is all zeros, the output must be all zeros.
    """
    expected = right if isinstance(right, Expected) else Expected.of(right, None, out.dtype)
    columns = expected.right.shape[-1]
    d = ((out.float() - expected.right) * expected.inverse).view(-1).index_fill_(0, expected.odd, 0.0)
    r = (expected.right * expected.inverse).view(-1).index_fill_(0, expected.odd, 0.0)
    single = (d.abs() / (r.abs() + 1)).amax() / 8
    d, r = d.square_().view(-1, columns), r.square_().view(-1, columns)
    whole = (d.sum() / r.sum().clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    r.add_(1).div_(2)
    lines = [(d.sum(dim) / r.sum(dim)).sqrt().amax() / (1 + 4 / math.sqrt(d.shape[dim])) for dim in (0, 1)]
    actual, correct = (tensor.reshape(-1)[expected.odd].float() for tensor in (out, expected.right))
    wrong = ((actual != correct) & ~(actual.isnan() & correct.isnan())).any()
    worst = torch.stack([whole, single, *lines]).nan_to_num(nan=math.inf, posinf=math.inf).amax()
    return worst.masked_fill(wrong, math.inf)
