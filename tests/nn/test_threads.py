"""Calls of several threads of a rank, and the end of groups whose modules are closed: on two CPU ranks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autotax.core.errors import MachineError, UsageError
from autotax.heap.world import World
from autotax.nn import LinearAllReduce, Tuned
from autotax.nn.groups import GroupCalls
from autotax.operators.problems import GemmReduceScatter
from autotax.runner.ranks import Ranks
from tests.torch.winners import usual

PROBLEM = GemmReduceScatter(16, 24, 40, "fp32", "replicated", 2)


def in_thread(call: Callable[[], Any]) -> Any:
    """Runs a call on another thread; returns its result or its exception."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="server")
    thread.start()
    thread.join(30)
    return outcome[0]


def layer_and_x(world: World) -> tuple[LinearAllReduce, torch.Tensor]:
    torch.manual_seed(world.rank)
    layer = LinearAllReduce(torch.randn(24, 40), None, 16, sizes=[16], config=usual(PROBLEM, "push"))
    return layer, torch.randn(16, 40)


def calls_that_do_not_overlap(world: World) -> None:
    """Threads that call in turn: one after another, under one lock, and after a call that raised."""
    layer, x = layer_and_x(world)
    with torch.no_grad():
        right = layer(x)
        assert torch.equal(in_thread(lambda: layer(x)), right)
        assert torch.equal(layer(x), right), "the first thread goes on while nobody hands over"
        assert isinstance(in_thread(lambda: layer(x[:, :8])), UsageError)
        assert torch.equal(layer(x), right), "a refused call ends the turn of its thread"
        other = in_thread(lambda: layer_and_x(world)[0])
        assert torch.equal(other(x), right), "a module may be made in another thread"
        # Ranks call in one order: each thread waits for its number under the lock.
        turn, condition, outputs = [0], threading.Condition(), []

        def serve(number: int) -> None:
            with torch.no_grad(), condition:
                condition.wait_for(lambda: turn[0] == number, 30)
                outputs.append(layer(x))
                turn[0] += 1
                condition.notify_all()

        threads = [threading.Thread(target=serve, args=(number,)) for number in (2, 0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outputs) == 3
        assert all(torch.equal(output, right) for output in outputs)
    layer.close()
    other.close()


def a_call_within_another(world: World) -> None:
    """On all ranks a second thread calls while the first one enqueues: refused, and the first call is right."""
    layer, x = layer_and_x(world)
    with torch.no_grad():
        right, refusals = layer(x), []
        (shape, (call, *rest)), *_ = layer._known.items()

        def slow(*tensors: Any) -> None:
            layer._known[shape] = (call, *rest)
            with torch.no_grad():
                refusals.append(in_thread(lambda: layer(x)))
            call(*tensors)

        layer._known[shape] = (slow, *rest)
        assert torch.equal(layer(x), right)
        (refusal,) = refusals
        assert isinstance(refusal, UsageError), refusal
        assert "'server'" in str(refusal)
        assert "'MainThread'" in str(refusal)
        assert "hold one lock" in str(refusal)
        assert torch.equal(in_thread(lambda: layer(x)), right)
        with GroupCalls.of(world.data):
            made = in_thread(lambda: LinearAllReduce(torch.randn(24, 40), None, 16))
        assert isinstance(made, UsageError), "making a module is a call too"
    layer.close()


def a_refusal_on_one_rank(world: World) -> str:
    """Rank 0 refuses a call that rank 1 makes: rank 1 waits for AUTOTAX_WAIT_S, and its next call says so."""
    with mock.patch.dict(os.environ, AUTOTAX_WAIT_S="3"), torch.no_grad():
        layer, x = layer_and_x(world)
        layer(x)
        if world.rank == 0:
            with GroupCalls.of(world.data):
                return str(in_thread(lambda: layer(x)))
        layer(x)
        try:
            layer(x)
        except MachineError as error:
            return str(error)
        return "nothing was said"


def the_end_of_a_group(world: World) -> None:
    """A group ends where it is destroyed once its modules are closed, without help of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for number in (1, 2):
            group = dist.new_group(list(range(world.size)), backend="gloo")
            modules: list[Any] = [Tuned(PROBLEM, group, device="cpu") for _ in range(number)]
            modules.append(LinearAllReduce(torch.randn(24, 40), group, 16, sizes=[16], config=usual(PROBLEM, "push")))
            with torch.no_grad():
                for module in modules:
                    module(torch.randn(16, 40), *([torch.randn(24, 40)] if isinstance(module, Tuned) else []))
            for module in modules:
                module.close()
            alive = weakref.ref(group)
            dist.destroy_process_group(group)
            del group
            assert alive() is None, f"after {number} modules: {gc.get_referrers(alive())}"
    finally:
        gc.enable()


@pytest.mark.parametrize("program", [calls_that_do_not_overlap, a_call_within_another, the_end_of_a_group])
def test_on_two_ranks(ranks: dict[int, Ranks], program: Callable[[World], None]) -> None:
    ranks[2].run(program)


def test_a_refusal_on_one_rank_holds_the_others_up_for_a_bounded_time(no_database: None) -> None:  # noqa: ARG001
    with Ranks(2) as two:
        refused, waited = two.run(a_refusal_on_one_rank, timeout=120)
    assert "within a call of thread" in refused
    assert "rank 0" in waited
    assert "AUTOTAX_WAIT_S=3" in waited


def test_a_turn_ends_with_its_call() -> None:
    calls = GroupCalls()
    with pytest.raises(ZeroDivisionError), calls:
        raise ZeroDivisionError
    with calls:
        assert isinstance(in_thread(calls.__enter__), UsageError)
    assert in_thread(calls.__enter__) is None


@pytest.mark.volume
@pytest.mark.parametrize("arguments", [["10"], ["2", "--torchrun"]], ids=" ".join)
def test_jobs_that_close_and_destroy_end_as_python_ends(arguments: list[str]) -> None:
    tree = Path(__file__).parents[2]
    command = [sys.executable, str(tree / "results" / "reliability" / "exits.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert f"\n0 of {arguments[0]} jobs failed" in f"\n{ended.stdout}", ended.stdout + ended.stderr
