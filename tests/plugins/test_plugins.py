"""The plugins on two CPU ranks, in processes where their frameworks seem to be installed."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from autotax.config import Config
from autotax.operators.problems import GemmReduceScatter
from autotax.plugins import sglang, vllm
from autotax.plugins.thresholds import token_ranges
from autotax.problem import Problem
from autotax.testing.ranks import Ranks
from tests.plugins import checks, stand_ins
from tests.plugins.checks import K, N
from tests.torch.conftest import ranks  # noqa: F401 - the same processes
from tests.torch.winners import ONE, WORLD, database, gather, usual


def reduced(m: int, n: int = N) -> GemmReduceScatter:
    return GemmReduceScatter(m, n, K // WORLD, "fp32", "replicated", WORLD)


PUSH = usual(reduced(16), "push")


def winners(tmp_path: Path) -> str:
    kept: dict[Problem, Config] = {reduced(16): PUSH, reduced(64): Config("bsp"), gather(16, N, K // 2): ONE}
    return database(tmp_path / "a.db", kept)


def test_a_row_parallel_layer_of_vllm_sums_as_its_winners_say(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for told, sums, classes in ranks.run(checks.vllm_layers, winners(tmp_path)):
        assert classes == ["RowParallelLinear"] * 5
        # 16 and 14 tokens have a winner; for 50 the product and vLLM's own sum are the fastest.
        assert sums == {"plain": 1, "bias to be added later": 1, "bias": 3, "quantized": 3, "without a winner": 3}
        assert (told.taken, told.left) == (4, 2), str(told)
        assert "a product and then an all-reduce are the fastest" in str(told)


def test_a_compiled_layer_of_vllm_is_one_opaque_operator(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for told in ranks.run(checks.vllm_compiled, winners(tmp_path)):
        assert (told.taken, told.left) == (3, 0), str(told)


def test_layers_of_sglang_gather_and_sum_as_their_winners_say(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for told, sums in ranks.run(checks.sglang_layers, winners(tmp_path)):
        assert sums == 0
        assert told.taken == 2, str(told)
        assert {each.runs for each in told.calls if each.taken} == {str(PUSH), str(ONE)}


def test_thresholds_are_the_buckets_of_winners(tmp_path: Path) -> None:
    kept: dict[Problem, Config] = {reduced(m): PUSH for m in (12, 16, 24, 64)} | {reduced(96): Config("bsp")}
    db = database(tmp_path / "a.db", kept)
    assert token_ranges(N, K // WORLD, "fp32", WORLD, db=db) == [(9, 24), (49, 64)]
    assert token_ranges(N, K, "fp32", WORLD, db=db) == []


@pytest.mark.parametrize(("plugin", "name"), [(vllm, "vLLM"), (sglang, "SGLang")])
def test_a_process_without_the_framework_is_left_alone(
    plugin: object, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plugin.register()  # type: ignore[attr-defined]
    (line,) = caplog.messages
    assert line.startswith(f"autotax leaves {name} as it is: No module named")


def test_a_framework_that_differs_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: object, input_: object, more: object) -> None: ...

    with stand_ins.vllm(), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(stand_ins.RowParallelLinear, "forward", forward)
        vllm.register()
        assert not stand_ins.op_registry_oot
    assert caplog.messages == [
        "autotax leaves vLLM as it is: vllm.model_executor.layers.linear.RowParallelLinear.forward takes self, input_, more"
    ]


def test_another_plugin_keeps_its_layer(caplog: pytest.LogCaptureFixture) -> None:
    with stand_ins.vllm(), caplog.at_level(logging.WARNING):
        stand_ins.op_registry_oot["RowParallelLinear"] = object
        vllm.register()
        assert stand_ins.op_registry_oot == {"RowParallelLinear": object}
    assert "another plugin has replaced RowParallelLinear" in caplog.text


def test_plugins_are_entry_points_that_import_nothing() -> None:
    for group, module in (("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)):
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        assert f'[project.entry-points."{group}"]\nautotax = "{module.__name__}:register"' in text
        assert all(each.value == f"{module.__name__}:register" for each in entry_points(group=group) if each.name == "autotax")
    code = "import sys, autotax.plugins.vllm, autotax.plugins.sglang; print({'torch', 'triton', 'vllm'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "set()"
