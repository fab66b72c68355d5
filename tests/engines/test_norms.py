"""Norms and merges of engines whose kernels cannot be prepared, before a measurement, and as they are counted."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import autotax.torch
from autotax.engines import merges, norms, plugin, timing
from autotax.engines import vllm as vllm_plugin
from autotax.heap import HeapError
from autotax.heap.world import World
from autotax.runner.ranks import Ranks
from autotax.torch.plans import CAPTURED, forget_counts
from tests.engines import stand_ins
from tests.engines.checks import asking, norm_inputs, partial, taking
from tests.engines.test_plugins import merge_winners, norm_winners
from tests.torch.conftest import ranks  # noqa: F401 - the same processes

Call = Callable[[int], Any]
"""A call of the engine with a number of tokens."""
FASTER = "the engine's own function was faster for this number of tokens"
NO_WINNER, UNPREPARED = "no winner for this number of tokens", "its kernel could not be prepared: see the warning"


def norm_of_vllm(world: World) -> Call:
    function = sys.modules["vllm.models.some_model"].fused_allreduce_rms_norm

    def call(tokens: int) -> Tensor:
        x, residual, weight = norm_inputs(world, tokens)
        y: Tensor = function(x, residual, stand_ins.RMSNorm(weight))[0]
        return y

    return call


def merge_of_vllm(world: World) -> Call:
    function = sys.modules["vllm.v1.attention.ops.dcp"].dcp_a2a_lse_reduce
    return lambda tokens: function(*partial(world, tokens), stand_ins.the_group())


CALLS = {"norm": (norm_of_vllm, norms), "merge": (merge_of_vllm, merges)}


def calls(world: World, db: str, kind: str, us: list[tuple[float, float]], broken: bool, steps: list[tuple[int, bool]]) -> Any:
    """Calls with numbers of tokens, some of them in a capture; vLLM's function and ours take `us` microseconds on each rank.

    Returns the sums that vLLM did itself and the modules that were made, by call; then the counts.
    """
    make, engine = CALLS[kind]
    before, own, made = engine.prepare, [], []

    def prepare(*args: Any, **options: Any) -> Any:
        made.append(None)
        return before(*args, **options)

    heap: Any = mock.Mock(side_effect=HeapError("no symmetric memory"))
    opening = mock.patch("autotax.nn.prepare.open_heap", heap) if broken else mock.MagicMock()
    with asking(db), stand_ins.vllm(), taking(*us[world.rank]), opening, mock.patch.object(engine, "prepare", prepare):
        vllm_plugin.register()
        call, group = make(world), stand_ins.the_group()
        forget_counts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tokens, captured in steps:
                capturing, sums = mock.Mock(return_value=captured), group.sums
                with mock.patch("autotax.nn.groups.capturing", capturing), mock.patch.object(engine, "capturing", capturing):
                    call(tokens)
                own.append((group.sums - sums, len(made)))
        counted = {call.runs + ": " * bool(call.reason) + call.reason: call.calls for call in autotax.torch.status().calls}
        summary = plugin.summary(plugin.counts("vLLM"))
        engine.forget(group)
        forget_counts()
        return own, counted, summary


OURS = [(2.0, 1.0)] * 2
"""Microseconds of vLLM's function and of ours, by rank."""


def winners(path: Path, kind: str) -> str:
    return norm_winners(path, 1) if kind == "norm" else merge_winners(path)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_whose_workspace_failed_is_the_engines_and_is_not_tried_again(ranks: Ranks, tmp_path: Path, kind: str) -> None:  # noqa: F811
    steps = [(8, True), (8, False), (7, False), (8, True)]
    right = [(1, 0), (1, 1), (1, 1), (1, 1)]
    for own, counted, summary in ranks.run(calls, winners(tmp_path / "a.db", kind), kind, OURS, True, steps):
        assert own == right
        assert counted == {f"torch: {UNPREPARED}": 3, f"torch: {CAPTURED}": 1}
        assert summary == "0 of 4 calls of vLLM ran tuned kernels"


@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_counted_with_the_reason_of_those_that_are_left(ranks: Ranks, tmp_path: Path, kind: str) -> None:  # noqa: F811
    steps = [(8, True), (8, False), (7, False), (8, True), (30, False)]
    for own, counted, summary in ranks.run(calls, winners(tmp_path / "a.db", kind), kind, OURS, False, steps):
        assert own == [(1, 0), (0, 1), (0, 1), (0, 1), (1, 1)]
        assert counted == {"autotax": 3, f"torch: {CAPTURED}": 1, f"torch: {NO_WINNER}": 1}
        assert summary == "3 of 5 calls of vLLM ran tuned kernels"


@pytest.mark.parametrize("us", [[(3.0, 2.0), (5.0, 6.0)], [(1.0, 4.0), (5.0, 4.0)]], ids=["theirs", "ours"])
def test_the_time_of_the_slowest_rank_chooses(ranks: Ranks, tmp_path: Path, us: list[tuple[float, float]]) -> None:  # noqa: F811
    ours = us[1] == (5.0, 4.0)
    for own, counted, _ in ranks.run(calls, norm_winners(tmp_path / "a.db", 1), "norm", us, False, [(8, False), (8, True)]):
        assert own == [(int(not ours), 1)] * 2
        assert counted == ({"autotax": 2} if ours else {f"torch: {FASTER}": 2})


def before_measurement(world: World, db: str) -> int:
    """Sums of vLLM in a capture of a bucket that was not measured, by a module that is prepared."""
    with asking(db), stand_ins.vllm(), taking(*OURS[0]):
        vllm_plugin.register()
        group, call = stand_ins.the_group(), norm_of_vllm(world)
        norms.prepare(group, norm_inputs(world, 8)[0].shape[1], torch.float32, "cpu", 1e-5)
        call(30)
        before = group.sums
        with mock.patch.object(norms, "capturing", return_value=True):
            call(8)
        norms.forget(group)
        return group.sums - before


def test_a_capture_before_the_measurement_is_the_engines(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(before_measurement, norm_winners(tmp_path / "a.db", 1)) == [1, 1]


def states_of_capture(world: World, engine: str) -> tuple[list[bool], bool]:
    """The state of capture of an engine's custom all-reduce in calls that are timed, and afterwards."""
    custom, seen = SimpleNamespace(_IS_CAPTURING=True), []
    holder = SimpleNamespace(ca_comm=custom)
    modules: dict[str, Any] = {
        "vllm": {"vllm__distributed__parallel_state": {"_TP": SimpleNamespace(device_communicator=holder)}},
        "sglang": {"sglang__srt__distributed__parallel_state": {"_TP": holder}},
    }
    with stand_ins.modules(**modules[engine]):
        timing.least_microseconds(world, torch.device("cpu"), lambda: seen.append(custom._IS_CAPTURING))
    return seen, custom._IS_CAPTURING


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_calls_are_timed_outside_the_engines_state_of_capture(ranks: Ranks, engine: str) -> None:  # noqa: F811
    assert ranks.run(states_of_capture, engine) == [([False, False], True)] * 2
