"""Tensors that are not what their memory holds, in calls of every variant: a module computes what it does of resolved copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import Tuned, tensor_checks
from autotax.nn.tensor_checks import plain, require_apart, require_memory
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.operators.verification import TOLERANCE, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from autotax.torch.symm_mem import ready
from tests.nn.checks import DIM, HEADS, HIDDEN, KV_HEADS, K, N, normal
from tests.nn.conformance import (
    MOST,
    ROOM,
    ROWS,
    MergeSubject,
    NormSubject,
    Subject,
    called,
    distributed,
    imaginary,
    made,
    negated,
    refused,
    replaced,
    unwaited,
    without_memory,
)
from tests.nn.test_modules import database

RANKS = 2
PROBLEMS: dict[str, Problem] = {
    "gather": AllGatherGemm(MOST * RANKS, N, K, "fp32", "m", RANKS),
    "scatter": GemmReduceScatter(MOST * RANKS, N, K, "fp32", "scattered", RANKS),
    "reduce": GemmReduceScatter(MOST * RANKS, N, K, "fp32", "replicated", RANKS),
    "attention": FlashDecode(ROWS, HEADS, KV_HEADS, DIM, ROOM * RANKS, "fp32", RANKS),
    "merge": DecodeMerge(ROWS, HEADS, DIM, "fp32", RANKS),
    "norm": AllReduceNorm(ROWS, HIDDEN, "fp32", RANKS),
    "heads": HeadGather(ROWS, HEADS, DIM, "fp32", RANKS),
}


def variants() -> list[tuple[str, str]]:
    """Each kind of call with each variant that its problem's space has on CPU ranks."""
    pairs: list[tuple[str, str]] = []
    for kind, problem in PROBLEMS.items():
        pairs += [(kind, variant) for variant in space_for(problem, detect("cpu")).variants]
    return pairs


def subject_of(kind: str) -> Subject:
    own = {"merge": MergeSubject, "norm": NormSubject}
    if kind in own:
        return own[kind](kind)
    return Subject(kind, "" if kind == "attention" else kind)


def stored(world: World, kind: str, db: str, variant: str) -> None:
    """Calls of a module that found its winner in a database, with views and unwaited results in each place."""
    subject = subject_of(kind)
    subject.world = world
    sizes: dict[str, Any] = {"db": db, "sizes": [ROWS if kind in ("attention", "merge", "norm") else MOST * RANKS]}
    with made(subject, config=None, **sizes) as module:
        configs = {choice.config.variant for choice in module.choices if choice.config}
        assert variant == "bsp" or configs == {variant}, configs
        rows = MOST if kind in ("gather", "reduce", "scatter") else ROWS
        inputs = subject.inputs(rows=rows)
        right = called(module, *inputs)
        assert relative_error(right, subject.right(module, inputs)) <= TOLERANCE["fp32"]
        for number, tensor in enumerate(inputs):
            for view in (negated, imaginary if tensor.is_floating_point() else negated, unwaited):
                assert torch.equal(called(module, *replaced(inputs, number, view)), right), (number, view)
            name = subject.names[number]
            refused(lambda: called(module, *replaced(inputs, number, distributed)), f"{name} is a DTensor")  # noqa: B023
            refused(lambda: called(module, *replaced(inputs, number, without_memory)), f"{name} ", "was freed")  # noqa: B023
        refused(lambda: called(module, *inputs, out=negated(torch.zeros_like(right))), "out is a view")
        if subject.linear:
            for view in (negated, imaginary, unwaited):
                with torch.no_grad():
                    assert torch.equal(module.run(inputs[0], view(module.weight.detach())), right)


def any_operator(world: World, problem: Problem, variant: str) -> None:
    """The same calls through Tuned."""
    from autotax.operators.verification import make_inputs

    config = space_for(problem, detect("cpu")).default(variant)
    module = Tuned(problem, device="cpu", config=config)
    call = make_inputs(problem, 3, world.rank, torch.device("cpu"))
    inputs = [
        normal(*tensor.shape, seed=10 * number + world.rank, dtype=tensor.dtype) for number, tensor in enumerate(call.tensors)
    ]
    right = called(module, *inputs)
    assert right.isfinite().all() and right.any()
    for number, tensor in enumerate(inputs):
        for view in (negated, imaginary if tensor.is_floating_point() else negated, unwaited):
            assert torch.equal(called(module, *replaced(inputs, number, view)), right), (number, view)
        name = f"input {number + 1} "
        refused(lambda: called(module, *replaced(inputs, number, distributed)), name, "is a DTensor")  # noqa: B023
        refused(lambda: called(module, *replaced(inputs, number, without_memory)), name, "was freed")  # noqa: B023
    out = torch.zeros_like(right)
    refused(lambda: called(module, *inputs, out=negated(out)), "out is a view")
    memory = torch.zeros(inputs[0].numel() + out.numel() - 4)
    some = replaced(inputs, 0, lambda tensor: memory[-tensor.numel() :].view(tensor.shape).copy_(tensor))
    if some[0].data_ptr() % 16 == 0:
        refused(lambda: called(module, *some, out=memory[: out.numel()].view(out.shape)), "out shares memory with input 1")
    module.close()


def _kinds(kind: str, variant: str) -> dict[str, object]:
    """Each variant, but few of attention, which has many inputs and one place that resolves them."""
    return {} if kind == "attention" and variant not in ("bsp", "fused") else {"variant": (kind, variant)}


@pytest.mark.sampled(by=_kinds)
@pytest.mark.parametrize(("kind", "variant"), variants(), ids=lambda value: value)
def test_each_variant_computes_what_it_does_of_resolved_copies(
    ranks: dict[int, Ranks], tmp_path: Path, kind: str, variant: str
) -> None:
    problem = PROBLEMS[kind]
    config = space_for(problem, detect("cpu")).default(variant)
    assert config is not None
    if kind == "heads":
        ranks[RANKS].run(any_operator, problem, variant)
    else:
        ranks[RANKS].run(stored, kind, database(tmp_path / "some.db", (problem, config)), variant)


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_any_operator_computes_what_it_does_of_resolved_copies(ranks: dict[int, Ranks], kind: str) -> None:
    ranks[RANKS].run(any_operator, PROBLEMS[kind], "push")


def test_a_conjugated_view_is_resolved() -> None:
    values = torch.complex(torch.ones(4), torch.arange(4.0))
    assert not plain("x", values.conj()).is_conj()
    assert torch.equal(plain("x", values.conj()), values.conj())
    assert torch.equal(plain("x", torch._efficientzerotensor((3,))), torch.zeros(3))
    with torch.inference_mode():
        assert torch.equal(plain("x", (-torch.ones(3))._neg_view()), torch.ones(3))


@pytest.mark.parametrize("thing", [[1.0], None, 3, "x"])
def test_what_is_no_tensor_is_refused(thing: Any) -> None:
    with pytest.raises(UsageError, match=r"x is of type \w+; it must be a torch.Tensor"):
        plain("x", thing)


def test_a_storage_must_hold_all_of_a_tensor() -> None:
    flat = torch.zeros(32)
    first, last = flat[:16], flat[16:].view(4, 4).t()
    flat.untyped_storage().resize_(64)
    require_memory("x", first)
    with pytest.raises(UsageError, match="x ends at byte 128 of a storage of 64 bytes"):
        require_memory("x", last)


@pytest.mark.parametrize("compiled", [True, False], ids=["guards of torch", "Python"])
def test_only_tensors_of_an_accepted_kind_are_alike(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_checks.TENSOR_GUARDS is not None, "this torch has no guards: calls compare in Python, which costs 2 us"
    if not compiled:
        monkeypatch.setattr(tensor_checks, "TENSOR_GUARDS", None)
    x, weight = torch.zeros(4, 6), torch.nn.Parameter(torch.zeros(8, 6), requires_grad=False)
    same = tensor_checks.alike(x, weight)
    assert same(torch.ones(4, 6), weight)
    assert same(x[:], torch.nn.Parameter(torch.ones(8, 6), requires_grad=False))
    others = [x.double(), x[:3], torch.zeros(6, 4).t(), negated(x), torch.zeros(4, 12)[:, ::2], x.to("meta")]
    others += [x.as_subclass(type("Odd", (torch.Tensor,), {})), torch.nn.Parameter(x, requires_grad=False), x.unsqueeze(0)]
    assert not any(same(other, weight) for other in others)
    twice = tensor_checks.alike(x, x)
    assert twice(x, x)
    assert not twice(x, weight)


@pytest.mark.parametrize(("start", "apart"), [(0, False), (7, False), (8, True), (20, True)])
def test_memory_is_shared_to_the_byte(start: int, apart: bool) -> None:
    flat = torch.zeros(32)
    out, x = flat[:8], flat[start : start + 12 : 2]
    if apart:
        require_apart("out", out, x=x)
    else:
        with pytest.raises(UsageError, match="out shares memory with x"):
            require_apart("out", out, x=x)


def test_torchs_operators_refuse_a_matrix_whose_storage_was_freed() -> None:
    assert torch.equal(ready(torch.ones(4, 4)), torch.ones(4, 4))
    with pytest.raises(UsageError, match="A or B ends at byte 320 of a storage of 0 bytes"):
        ready(without_memory(torch.ones(4, 4)))
