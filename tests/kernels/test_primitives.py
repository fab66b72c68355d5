"""Primitives of the variants: bounded waits that name the missing peer, counters that wrap around, a correct softmax."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import detect
from autotax.heap import World, open_heap
from autotax.kernels import prepare
from autotax.kernels.alignment import Aligner
from autotax.kernels.context import Context
from autotax.kernels.kernel import Kernel
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.operators.verification import TOLERANCE, make_inputs, reference, relative_error
from autotax.runner.ranks import Ranks
from autotax.spaces import space_for
from tests.spaces.drawing import ways_to_exchange

HEAP_BYTES = 16 << 20
GEMM = AllGatherGemm(35, 20, 32, "fp32", "m", 2)
DECODE = FlashDecode(2, 3, 1, 16, 50, "fp32", 2)
ROUNDED = FlashDecode(2, 3, 1, 16, 50, "bf16", 2)
"""A problem for variants that send results in fewer bits than float32."""
WAITING = [(p, space_for(p, detect("cpu")).default(v)) for p in (GEMM, DECODE) for v in space_for(p, detect("cpu")).variants if v != "bsp"]  # noqa: E501  # fmt: skip
WAITING += [(DECODE, config) for config in ways_to_exchange(space_for(DECODE, detect("cpu")))]
WAITING += [(ROUNDED, space_for(ROUNDED, detect("cpu")).default("compact"))]
ODD = ("large scores", "scores of -inf", "nan beyond the length", "empty", "one rank is empty")
ATTENDING = [(DECODE, variant, case) for variant in space_for(DECODE, detect("cpu")).variants for case in ODD]
ATTENDING += [(ROUNDED, "compact", case) for case in ("scores of -inf", "empty", "one rank is empty")]
WAYS = (("two", 2), ("two", 0), ("one", 0), ("halves", 0))
WAITING += [(GEMM, Config.of("decomposed", products=way, comm=comm, warm=0)) for way, comm in WAYS]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


def default(problem: Problem, variant: str) -> Config:
    return space_for(problem, detect("cpu")).default(variant)


@pytest.mark.parametrize(("problem", "config"), WAITING, ids=str)
def test_a_rank_whose_peer_never_calls_gives_up_and_names_it(ranks: Ranks, problem: Problem, config: Config) -> None:
    (message, seconds), (nothing, _) = ranks.run(_call_alone, problem, config)
    flag, goal = message.removeprefix("rank 0 waited for flag ").split(" of rank 1: needed ")
    assert flag.isdigit()
    needed, saw = goal.split(", saw ")
    assert int(saw) < int(needed)
    assert seconds < 500
    assert nothing is None


def _way_of_waiting(problem: Problem, config: Config) -> dict[str, object]:
    """Each variant, and each way in which any exchanges results."""
    ways = ("products", "protocol", "payload")
    return {"op": problem.op} | {name: config.values.get(name) for name in ways}


@pytest.mark.sampled(by=_way_of_waiting)
@pytest.mark.parametrize(("problem", "config"), WAITING, ids=str)
def test_counters_may_wrap_around(ranks: Ranks, problem: Problem, config: Config) -> None:
    for errors in ranks.run(_cross_the_wrap, problem, config):
        assert max(errors) <= TOLERANCE[problem.dtype]


@pytest.mark.parametrize("config", [config for _, config in WAITING if config.variant == "decomposed"], ids=str)
def test_one_slot_of_an_inbox_may_be_used_by_every_call(ranks: Ranks, config: Config) -> None:
    """As in a graph with an odd number of calls, and a rank that reads the others' data late."""
    for errors in ranks.run(_use_one_slot, GEMM, config):
        assert max(errors) <= TOLERANCE[GEMM.dtype]


def test_the_barrier_of_ranks_holds_across_the_wrap(ranks: Ranks) -> None:
    ranks.run(_align_across_the_wrap)


@pytest.mark.sampled(by=lambda problem, variant, case: {"variant": (problem.dtype, variant), "case": (problem.dtype, case)})
@pytest.mark.parametrize(("problem", "variant", "case"), ATTENDING, ids=str)
def test_attention_is_sound(ranks: Ranks, problem: FlashDecode, variant: str, case: str) -> None:
    near = {"rtol": 1e-4, "atol": 1e-5} if problem is DECODE else {"rtol": 1e-2, "atol": 5e-3}
    for out, right in ranks.run(_attend_oddly, problem, default(problem, variant), case):
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out.float(), right, **near)


# Functions that the ranks run.


def _open(world: World, problem: Problem, config: Config, poll_limit: int | None = None) -> Kernel:
    context = Context(world, open_heap(world, HEAP_BYTES), detect(world.backend), poll_limit)
    operator = prepare(problem, config, context)
    context.heap.check()
    return operator


def _call_alone(world: World, problem: Problem, config: Config) -> tuple[str | None, float]:
    operator = _open(world, problem, config, poll_limit=50)
    start = time.perf_counter()
    if world.rank == 0:
        call = make_inputs(problem, 0, world.rank, world.device)
        operator(*call.tensors, call.out)
    seconds = time.perf_counter() - start
    world.barrier()
    message = operator.failure()
    operator.context.heap.close()
    return message, seconds


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _set_calls(control: Tensor, counters: dict[Tensor, int], calls: int) -> None:
    """Sets the state after `calls` calls. `counters` gives the signals per call of each counter."""
    control[0] = _wrapped(calls + 1)
    for flags, signals in counters.items():
        flags.fill_(_wrapped(calls * signals))


def _cross_the_wrap(world: World, problem: Problem, config: Config) -> list[float]:
    operator = _open(world, problem, config)
    # On CPU ranks one program publishes, hence announces.
    counters = {getattr(operator, name): 1 for name in ("done", "announced") if hasattr(operator, name)}
    if hasattr(operator, "flags"):
        counters[operator.flags] = config.values.get("pieces", config.values.get("senders", 1))
    if config.variant == "decomposed":
        counters = {operator.arrived: operator.comm or 1, operator.begun: 1}  # type: ignore[attr-defined]
        words = [2**31 - 4, 2**31 - 5, 2**31 - 4, 2**31 - 4]  # awaited, slots used, all begun
        operator.control[9:13] = torch.tensor(words, dtype=torch.int32)
    _set_calls(operator.control, counters, 2**31 - 4)
    epochs = getattr(operator, "epochs", operator.control[:1])  # of each program, or of the call
    epochs.fill_(2**31 - 3)
    world.barrier()
    errors = []
    for seed in range(7):
        call = make_inputs(problem, seed, world.rank, world.device)
        call.poison()
        time.sleep(0.03 * (seed % world.size == world.rank))  # one rank is late in turn: the others have to wait
        operator(*call.tensors, call.out)
        assert operator.failure() is None, operator.failure()
        errors.append(relative_error(call.out, reference(problem, seed, world.rank, world.device)))
    assert set(epochs.tolist()) == {_wrapped(2**31 + 4)}
    world.barrier()
    operator.context.heap.close()
    return errors


def _use_one_slot(world: World, problem: Problem, config: Config) -> list[float]:
    operator: Any = _open(world, problem, config)
    multiply, late = operator.context.matmul, world.rank
    errors = []

    def multiply_late(a: Tensor, b: Tensor, out: Tensor) -> None:
        time.sleep(0.05 * late)
        multiply(a, b, out)

    operator.context.matmul = multiply_late
    for seed in range(6):
        operator.calls = 0
        call = make_inputs(problem, seed, world.rank, world.device)
        call.poison()
        operator(*call.tensors, call.out)
        assert operator.failure() is None, operator.failure()
        errors.append(relative_error(call.out, reference(problem, seed, world.rank, world.device)))
        late = 1 - late
    world.barrier()
    operator.context.heap.close()
    return errors


def _align_across_the_wrap(world: World) -> None:
    context = Context(world, open_heap(world, HEAP_BYTES), detect(world.backend), poll_limit=1 << 17)
    aligner = Aligner(context)
    _set_calls(aligner.control, {aligner.flags: 1}, 2**31 - 4)
    context.heap.check()
    for call in range(7):
        if world.rank == call % world.size:
            time.sleep(0.05)
        entered = time.monotonic()
        aligner()
        left = world.gather((entered, time.monotonic()), tuple[float, float])
        assert max(start for start, _ in left) <= min(end for _, end in left)
    assert int(aligner.control[4]) == 0
    world.barrier()
    context.heap.close()


def _attend_oddly(world: World, problem: FlashDecode, config: Config, case: str) -> tuple[Tensor, Tensor]:
    """The output, and the softmax over all tokens of all ranks in float64."""
    drawn = [make_inputs(problem, 0, rank, world.device).tensors for rank in range(world.size)]
    for rank, (q, k, v, lengths) in enumerate(drawn):
        _make_odd(case, rank, q, k, v, lengths)
    operator = _open(world, problem, config)
    out = torch.full_like(drawn[0][0], math.nan)
    operator(*drawn[world.rank], out)
    assert operator.failure() is None, operator.failure()
    right = torch.zeros_like(out, dtype=torch.float64)
    for sequence in range(problem.batch):
        keys = torch.cat([k[sequence, 0, : lengths[sequence]] for _, k, _, lengths in drawn]).double()
        values = torch.cat([v[sequence, 0, : lengths[sequence]] for _, _, v, lengths in drawn]).double()
        if len(keys):
            scores = drawn[0][0][sequence].double() @ keys.T / math.sqrt(problem.head_dim)
            right[sequence] = torch.softmax(scores, -1) @ values
    world.barrier()
    operator.context.heap.close()
    return out, right.float()


def _make_odd(case: str, rank: int, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    if case == "large scores":
        q *= 1e3
        k *= 1e3
    elif case == "scores of -inf":
        q[..., 0] = 1.0
        k[:, :, :16, 0] = -math.inf  # a whole first block of tokens
        k[:, :, 20::3, 0] = -math.inf
    elif case == "nan beyond the length":
        lengths -= 7
        k[:, :, int(lengths[0]) :] = math.nan
        v[:, :, int(lengths[0]) :] = math.nan
    elif case == "empty" or rank == 1:
        lengths.zero_()
