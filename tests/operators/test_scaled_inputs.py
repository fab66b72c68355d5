"""Inputs of e4m3 products in verification: scales over decades, saturated values, zeros and NaN codes; and what is timed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from autotax.operators.inputs import DTYPES
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.operators.scaled import BASE, GROUP, LARGEST, quantised, scales_of
from autotax.operators.verification import make_inputs, reference

CPU = torch.device("cpu")
Product = AllGatherGemm | GemmReduceScatter
DECADES = {"bf16": 3.0, "fp16": 0.5}
"""Scales lie so many decades below and above BASE, by the type of C."""
CODES: list[Product] = []
WIDE: list[Product] = []
"""Problems whose A is e4m3, and those whose A is quantised on the way."""
for result, scales in product(("bf16", "fp16"), ("tensor", "row", "block")):
    by = {"tensor": "static"}.get(scales, scales)
    for problems, quantize in ((CODES, "none"), (WIDE, by)):
        more = {"scales": scales, "result": result, "quantize": quantize}
        problems.append(AllGatherGemm(64, 512, 512, "e4m3", "m", 2, **more))
        problems.append(GemmReduceScatter(32, 512, 512, "e4m3", "replicated", 2, **more))
CODES += [AllGatherGemm(64, 512, 512, "e4m3", "m", 2, scales=scales, operand="e5m2") for scales in ("tensor", "row")]


def numbers_of(problem: Product, seed: int, rank: int = 0) -> list[Tensor]:
    return [tensor.float() for tensor in make_inputs(problem, seed, rank, CPU).tensors]


def decades(problem: Product, scales: Tensor) -> float:
    """The decades that scales span, which lie around BASE."""
    powers = torch.log10(scales / BASE)
    assert float(powers.abs().max()) <= DECADES[problem.result]
    return float(powers.max() - powers.min())


def check_codes(codes: Tensor) -> None:
    """1.6 % of the elements are saturated, as many are zero, one row is, and one element of another row is NaN."""
    assert codes[codes.isfinite()].abs().max() == LARGEST and not codes.isinf().any()
    assert 0.013 < (codes.abs() == LARGEST).float().mean() < 0.019
    assert [len(row) for row in (codes == 0).all(1).nonzero()] == [1]
    assert 0.013 < (codes == 0).float().mean() - 1 / len(codes) < 0.019
    assert codes.isnan().sum() == 1


@pytest.mark.parametrize("problem", [*CODES, *WIDE], ids=str)
def test_odd_sets_have_codes_and_scales_of_all_kinds(problem: Product) -> None:
    a, b, *scales = numbers_of(problem, 1)
    check_codes(b)
    of_b = scales[-1]
    if problem in CODES:
        check_codes(a)
        assert scales[0].numel() == {"tensor": 1, "row": len(a), "block": len(a) * 4}[problem.scales]
    if problem.scales == "tensor":
        small = replace(problem, m=16, n=16, k=16)
        every = torch.cat([numbers_of(small, seed, rank)[-1] for seed in range(1, 41, 2) for rank in range(2)])
        assert of_b.numel() == 1 and decades(problem, every) > 1.6 * DECADES[problem.result], "one scale, elsewhere in each set"
        return
    for own in scales:
        assert 1.6 * DECADES[problem.result] < decades(problem, own) <= 2 * DECADES[problem.result]


@pytest.mark.parametrize("problem", WIDE, ids=str)
def test_an_a_that_is_to_be_quantised_has_small_and_large_rows_and_reaches_all_codes(problem: Product) -> None:
    given = make_inputs(problem, 1, 0, CPU).tensors
    a = given[0]
    assert a.dtype is DTYPES[problem.result] and a[a.isfinite()].abs().max() < 20, "no value is saturated before"
    assert (a == 0).all(1).sum() == 1 and a.isnan().sum() == 1 and not a.isinf().any()
    rows = a.float().nan_to_num(0.0).square().mean(1).sqrt()
    rows = rows[rows > 0] / rows.median()
    assert rows.max() > 3 and rows.min() < 0.1
    codes = quantised(a, given[2] if problem.quantize == "static" else scales_of(a, problem.quantize), problem.quantize).float()
    saturated = (codes.abs() == LARGEST).any(1)
    if problem.quantize == "static":
        assert 1 <= saturated.sum() < len(a) / 4, "rows beyond 7, which the scale saturates"
    else:
        assert saturated.sum() == len(a) - (2 if problem.quantize == "row" else 1), "the largest of each row, but for zeros"
    assert codes.isnan().sum() == {"static": 1, "row": problem.k, "block": GROUP}[problem.quantize], "all that share a scale"


@pytest.mark.parametrize("problem", [*CODES, *WIDE], ids=str)
def test_a_nan_code_is_in_its_row_or_column_of_the_reference_alone(problem: Product) -> None:
    right = reference(problem, 1, 0, CPU).right
    rows, columns = right.isnan().all(1).sum(), right.isnan().all(0).sum()
    assert rows >= 1 and columns >= 1
    assert right.isnan().sum() == rows * right.shape[1] + columns * len(right) - rows * columns
    assert right[~right.isnan()].isfinite().all() and right.isnan().float().mean() < 0.05


@pytest.mark.parametrize("problem", [*CODES, *WIDE], ids=str)
def test_sets_that_are_timed_have_plain_numbers(problem: Product) -> None:
    a, b, *scales = numbers_of(problem, 0)
    assert all(tensor.isfinite().all() and tensor.abs().max() < 6 for tensor in (a, b))
    assert all(decades(problem, own) <= 1 for own in scales)
