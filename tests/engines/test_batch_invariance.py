"""The plugins in processes whose engine is batch-invariant, on two CPU ranks: one config for all tokens, or the engine's own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.engines import plugin
from autotax.engines import sglang as sglang_plugin
from autotax.engines import vllm as vllm_plugin
from autotax.engines.thresholds import IN_INVARIANT_MODE
from autotax.heap.world import World
from autotax.runner.ranks import Ranks
from autotax.torch import plans
from tests.engines import stand_ins
from tests.engines.checks import K, N, asking, partial, summed
from tests.engines.test_plugins import merge_winners, reduced, winners
from tests.torch.checks import normal
from tests.torch.conftest import ranks  # noqa: F401 - the same processes
from tests.torch.winners import database, usual

VLLM = {
    "VLLM_BATCH_INVARIANT=1": {"VLLM_BATCH_INVARIANT": "1"},
    "VLLM_BATCH_INVARIANT=2": {"VLLM_BATCH_INVARIANT": "2"},
    "VLLM_BATCH_INVARIANT=True": {"VLLM_BATCH_INVARIANT": "True"},
    "VLLM_TP_INVARIANT=1": {"VLLM_TP_INVARIANT": "1"},
    "envs": {"vllm.envs": {"VLLM_BATCH_INVARIANT": True}},
    "function": {"vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: True}},
    "kernels": {"vllm.model_executor.layers.batch_invariant": {"is_batch_invariant_mode_enabled": lambda: True}},
}
_ARGUMENTS = SimpleNamespace(enable_deterministic_inference=True)
_ON_POLICY = SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target="fsdp")
SGLANG = {
    "variable": {"SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "true"},
    "arguments": {"sglang.srt.server_args": {"get_global_server_args": lambda: _ARGUMENTS}},
    "rl_on_policy_target": {"sglang.srt.server_args": {"get_global_server_args": lambda: _ON_POLICY}},
    "dict": {"sglang.srt.managers.schedule_batch": {"global_server_args_dict": {"enable_deterministic_inference": True}}},
    "kernels of SGLang": {"sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: True}},
}
MODES = VLLM | SGLANG
MOST = 64
"""Rows of the kernels; a call of more rows runs them twice."""


def _ask(world: World, value: str | None) -> None:  # noqa: ARG001
    if value is None:
        os.environ.pop(IN_INVARIANT_MODE, None)
    else:
        os.environ[IN_INVARIANT_MODE] = value


@pytest.fixture(autouse=True)
def asked(ranks: Ranks) -> Iterator[None]:  # noqa: F811
    """Winners serve in the engines' modes."""
    ranks.run(_ask, "1")
    yield
    ranks.run(_ask, None)


@contextmanager
def mode(settings: dict[str, Any]) -> Iterator[None]:
    """Environment variables, and modules with names in them."""
    modules = {}
    for path, names in settings.items():
        if isinstance(names, dict):
            modules[path] = ModuleType(path)
            vars(modules[path]).update(names)
    variables = {name: value for name, value in settings.items() if isinstance(value, str)}
    # mock.patch.dict would also remove modules that other code imports before the test ends.
    sys.modules.update(modules)
    try:
        with mock.patch.dict(os.environ, variables):
            yield
    finally:
        for path in modules:
            del sys.modules[path]


@contextmanager
def lines() -> Iterator[list[str]]:
    """Collects the lines that the plugins log. Resets the engine first, so that it logs each line again."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    plugin.vllm_is_invariant.logged = plugin.sglang_is_invariant.logged = False
    plugin.log.addHandler(handler)
    try:
        yield logged
    finally:
        plugin.log.removeHandler(handler)


def bits_kept(call: Any, layer: Any, x: Tensor) -> None:
    """Calls a layer with several numbers of tokens, one above that of the kernel, and compares the bits of each token."""
    whole = call(x)
    torch.testing.assert_close(whole, summed(layer, x), rtol=1e-4, atol=1e-4)
    for tokens in (16, 14, 50):
        assert torch.equal(call(x[:tokens]), whole[:tokens]), tokens


def own_sums_of_vllm(world: World, db: str, settings: dict[str, Any], when: str) -> tuple[int, list[str]]:
    """Sums that vLLM did itself in four calls of a layer. `when="called"`: the layer was called once before the mode began."""
    with asking(db), stand_ins.vllm(), lines() as logged, mock.patch.object(plans, "INVARIANT_ROWS", MOST):
        x = normal(MOST + 3, K // world.size, seed=world.rank)

        def layer() -> Any:
            return stand_ins.RowParallelLinear(K, N, bias=False, return_bias=False)

        if when != "before":
            vllm_plugin.register()
        made = layer() if when == "called" else None
        if made is not None:
            made(x[:16])
            assert stand_ins.the_group().sums == 0, "without the mode the call is tuned"
        with mode(settings):
            if when == "before":
                vllm_plugin.register()
            made = made or layer()
            bits_kept(made, made, x)
            compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=True)
            assert torch.equal(compiled(x[:14]), made(x)[:14])
            return stand_ins.the_group().sums, logged


def own_sums_of_sglang(world: World, db: str, settings: dict[str, Any], when: str) -> tuple[int, list[str]]:
    """Like own_sums_of_vllm, for SGLang."""
    with asking(db), stand_ins.sglang() as owners, lines() as logged, mock.patch.object(plans, "INVARIANT_ROWS", MOST):
        x, layer = normal(MOST + 3, K // world.size, seed=world.rank), stand_ins.SglangRowParallelLinear(K, N)
        if when != "before":
            sglang_plugin.register()
            stand_ins.HookRegistry.apply_hooks(owners)
        if when == "called":
            layer(x[:16])
            assert stand_ins.the_group().sums == 0, "without the mode the call is tuned"
        with mode(settings):
            if when == "before":
                sglang_plugin.register()
                stand_ins.HookRegistry.apply_hooks(owners)
            bits_kept(lambda rows: layer(rows)[0], layer, x)
            import autotax.torch

            assert not autotax.torch.status().operators or "autotax" not in autotax.torch.status().operators.values()
            return stand_ins.the_group().sums, logged


def own_merges(world: World, db: str) -> list[int]:
    """Merges that the engines did themselves, of one each in a mode that began after registration."""
    own = []
    with asking(db), stand_ins.vllm():
        vllm_plugin.register()
        with mode(VLLM["envs"]):
            sys.modules["vllm.v1.attention.ops.dcp"].dcp_a2a_lse_reduce(*partial(world, 8), stand_ins.the_group())
        own.append(stand_ins.the_group().sums)
    with asking(db), stand_ins.sglang() as owners:
        sglang_plugin.register()
        stand_ins.HookRegistry.apply_hooks(owners)
        with mode(SGLANG["variable"]):
            comm = sys.modules["sglang.srt.layers.dcp.comm"]
            comm.dcp_a2a_lse_reduce(*partial(world, 8), stand_ins.the_group())
            comm.cp_lse_ag_out_rs_mha(*partial(world, 8), stand_ins.the_group())
            comm.cp_lse_ag_out_rs_mla(*partial(world, 8), stand_ins.the_group(), None, True)
        own.append(stand_ins.the_group().sums)
    return own


def layers_in(world: World, db: str, engine: str, name: str, when: str) -> tuple[int, list[str]]:
    run = own_sums_of_vllm if engine == "vLLM" else own_sums_of_sglang
    return run(world, db, MODES[name], when)


@pytest.mark.sampled(by=lambda engine, name, when: {"name": name, "when": (engine, when)})
@pytest.mark.parametrize("when", ["before", "after", "called"])
@pytest.mark.parametrize(("engine", "name"), [("vLLM", "VLLM_BATCH_INVARIANT=1"), ("vLLM", "envs"), ("SGLang", "variable"), ("SGLang", "arguments")])  # noqa: E501  # fmt: skip
def test_layers_keep_the_bits_of_a_token(ranks: Ranks, tmp_path: Path, engine: str, name: str, when: str) -> None:  # noqa: F811
    for sums, logged in ranks.run(layers_in, winners(tmp_path), engine, name, when):
        assert sums == 0
        lines_of_mode = [line for line in logged if "no batch changes" in line]
        assert len(lines_of_mode) == 1, logged
        assert lines_of_mode[0].startswith(f"autotax leaves {engine} as it is, but for row-parallel layers")


@pytest.mark.parametrize(("engine", "name", "calls"), [("vLLM", "envs", 6), ("SGLang", "variable", 4)])
def test_layers_without_a_winner_that_keeps_bits_are_the_engines_own(
    ranks: Ranks, tmp_path: Path, engine: str, name: str, calls: int  # noqa: F811
) -> None:
    path = database(tmp_path / "a.db", {reduced(16): usual(reduced(16), "decomposed"), reduced(64): Config("bsp")})
    assert [sums for sums, _ in ranks.run(layers_in, path, engine, name, "after")] == [calls] * 2


def test_layers_are_the_engines_own_unless_they_are_asked_for(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    ranks.run(_ask, None)
    assert [sums for sums, _ in ranks.run(layers_in, winners(tmp_path), "vLLM", "envs", "before")] == [6] * 2


def test_merges_are_the_engines_own(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(own_merges, merge_winners(tmp_path / "a.db")) == [[1, 3]] * 2


@pytest.mark.parametrize("name", MODES)
def test_every_spelling_of_a_mode(name: str) -> None:
    ask = plugin.vllm_is_invariant if name in VLLM else plugin.sglang_is_invariant
    assert not ask()
    with mode(MODES[name]):
        assert ask()
    assert not ask()


@pytest.mark.parametrize("value", ["", "0", "False", "off"])
def test_a_mode_that_is_off(value: str) -> None:
    with mode({"VLLM_BATCH_INVARIANT": value, "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": value}):
        assert not plugin.vllm_is_invariant()
        assert not plugin.sglang_is_invariant()


def test_settings_that_cannot_be_asked_yet() -> None:
    def unready() -> Any:
        raise ValueError("Global server args is not set yet!")

    with mode({"sglang.srt.server_args": {"get_global_server_args": unready}}):
        assert not plugin.sglang_is_invariant()
