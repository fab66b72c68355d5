"""The plugins on two CPU ranks, in processes where their frameworks seem to be installed."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.db import lookup
from autotax.engines import sglang, vllm
from autotax.engines.thresholds import merge_ranges, norm_ranges, token_ranges
from autotax.engines.vllm_norms import BY_ROW, SCHEMAS, norms_of_vllm
from autotax.operators import scaled
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, GemmReduceScatter
from autotax.runner.ranks import Ranks
from tests.engines import checks, stand_ins
from tests.engines.checks import DIM, HEADS, HIDDEN, K, N
from tests.torch.conftest import ranks  # noqa: F401 - the same processes
from tests.torch.winners import ONE, WORLD, database, gather, usual


def reduced(m: int, n: int = N) -> GemmReduceScatter:
    return GemmReduceScatter(m, n, K // WORLD, "fp32", "replicated", WORLD)


PUSH = usual(reduced(16), "push")


def winners(tmp_path: Path) -> str:
    kept: dict[Problem, Config] = {reduced(16): PUSH, reduced(64): Config("bsp"), gather(16, N, K // 2): ONE}
    return database(tmp_path / "a.db", kept)


def test_a_row_parallel_layer_of_vllm_sums_as_its_winners_say(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for status, sums, classes in ranks.run(checks.vllm_layers, winners(tmp_path)):
        assert classes == ["RowParallelLinear"] * 5
        # 16 and 14 tokens have a winner; for 50 the product and vLLM's own sum are the fastest.
        assert sums == {"plain": 1, "bias to be added later": 1, "bias": 3, "quantized": 3, "without a winner": 3}
        assert (status.taken, status.left) == (4, 2), str(status)
        assert "a product and then an all-reduce are the fastest" in str(status)


def test_a_compiled_layer_of_vllm_is_one_opaque_operator(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for status in ranks.run(checks.vllm_compiled, winners(tmp_path)):
        assert (status.taken, status.left) == (3, 0), str(status)


def test_layers_of_sglang_gather_and_sum_as_their_winners_say(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for status, sums in ranks.run(checks.sglang_layers, winners(tmp_path)):
        assert sums == 0
        assert status.taken == 2, str(status)
        assert {call.runs for call in status.calls if call.taken} == {str(PUSH), str(ONE)}


def fp8_winners(path: Path) -> str:
    """Winners for up to 16 tokens of each way to quantise."""
    kept: dict[Problem, Config] = {}
    for quantize, layout in scaled.SCALES_OF.items():
        problem = GemmReduceScatter(
            16, checks.N8, checks.K8 // WORLD, "e4m3", "replicated", WORLD, scales=layout, quantize=quantize
        )
        kept[problem] = Config.of("scaled_words", payload="bf16", product="16x32x2x4", splits=1, shots="one")
    return database(path, kept)


FEW = [0, 0, 1]
"""The framework multiplies for 50 tokens, because they have no winner, and not for 16 and 14."""


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.volume)], ids=["eager", "compiled"])
def test_fp8_layers_of_vllm_are_ours_for_numbers_of_tokens_with_a_winner(ranks: Ranks, tmp_path: Path, compiled: bool) -> None:  # noqa: F811
    for status, own, lines in ranks.run(checks.vllm_fp8, fp8_winners(tmp_path / "a.db"), compiled, timeout=120):
        assert own == [*FEW * 5, *[1] * 6]
        assert (status.taken, status.left) == (10, 5), str(status)
        assert "autotax leaves odd as it is: scales of its blocks are powers of two" in lines
        assert any("autotax leaves odd as it is: scale_ub is given with quantize 'block'" in line for line in lines)
        assert "autotax serves channel for 13 to 16 tokens" in lines


def test_fp8_layers_of_sglang_are_ours_for_numbers_of_tokens_with_a_winner(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for status, own, lines in ranks.run(checks.sglang_fp8, fp8_winners(tmp_path / "a.db"), timeout=120):
        assert own == [*FEW * 5, *[1] * 3]
        assert (status.taken, status.left) == (10, 5), str(status)
        left = f"autotax leaves a layer of {checks.N8} x 256 as it is"
        assert f"{left}: scales of its blocks are powers of two" in lines


def test_fp8_layers_of_sglangs_sequence_parallel_region_are_ours_where_they_have_a_winner(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    sizes, fields = (16, checks.N8, checks.K8 // WORLD, "e4m3"), {"scales": "row", "quantize": "row"}
    kept: dict[Problem, Config] = {}
    for problem, variant in (
        (GemmReduceScatter(*sizes, "scattered", WORLD, **fields), "scaled_words"),
        (AllGatherGemm(*sizes, "m", WORLD, **fields), "scaled_decomposed"),
    ):
        kept[problem] = usual(problem, variant)
    for own, errors in ranks.run(checks.sglang_fp8_of_shards, database(tmp_path / "a.db", kept), timeout=120):
        assert own == [0, 0, 1, 0, 1]
        assert max(errors) < 1e-2


def test_fp8_layers_without_winners_are_the_frameworks(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    for status, own, lines in ranks.run(checks.vllm_fp8, database(tmp_path / "none.db", {}), False, timeout=120):
        assert own == [1] * 21 and (status.taken, status.left) == (0, 0)
        assert "autotax leaves block as it is: no winner is faster for any number of tokens" in lines


def merged(tokens: int) -> DecodeMerge:
    return DecodeMerge(tokens, HEADS, DIM, "fp32", WORLD, "head_scatter")


def merge_winners(path: Path) -> str:
    return database(path, {merged(8): usual(merged(8), "gather")})


def test_merges_of_vllm_are_ours_for_numbers_of_tokens_with_a_winner(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    dbs = [merge_winners(tmp_path / "a.db")] * 2
    # Ours for 8 and 7 tokens; not for 30, another base, all heads, nor while a graph is being captured.
    assert ranks.run(checks.vllm_merges, dbs) == [[0, 0, 1, 1, 1, 1]] * 2


def test_merges_of_sglang_are_ours_where_nobody_asked_for_another_kernel(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(checks.sglang_merges, merge_winners(tmp_path / "a.db")) == [[0, 1, 0, 0, 1]] * 2


def test_ranks_with_other_winners_leave_all_to_the_framework(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    nothing = database(tmp_path / "none.db", {})
    assert ranks.run(checks.vllm_merges, [merge_winners(tmp_path / "a.db"), nothing]) == [[1] * 6] * 2
    (tmp_path / "more").mkdir()
    for status, sums in ranks.run(checks.vllm_with_databases, [winners(tmp_path / "more"), nothing]):
        assert (status.taken, status.left, sums) == (0, 0, 1)


def normed(quant: str = "none", offset: int = 0) -> AllReduceNorm:
    return AllReduceNorm(8, HIDDEN, "fp32", WORLD, quant=quant, offset=offset)


def norm_winners(path: Path, split: int) -> str:
    config = Config.of("one_shot", words="blank", split=split, num_warps=4, per_processor=1)
    return database(path, dict.fromkeys((normed(), normed("tensor"), normed(offset=1)), config))


OURS, THEIRS = (2.0, 1.0), (1.0, 2.0)
"""Microseconds of the engine's function and of ours."""


@pytest.mark.parametrize("split", [1, 2], ids=["in place", "copied"])
def test_norms_of_vllm_are_ours_for_numbers_of_tokens_with_a_winner(ranks: Ranks, tmp_path: Path, split: int) -> None:  # noqa: F811
    dbs = [norm_winners(tmp_path / "a.db", split)] * 2
    # Eager: 8, 7 and not 30 tokens, Gemma's. The operator: in place, into another tensor, e4m3; not for 30 tokens, nor for e4m3
    # beside the norm. Nothing that is not prepared while a graph is being captured.
    assert ranks.run(checks.vllm_norms, dbs, OURS) == [[0, 0, 1, 0, 0, 0, 0, 1, 1, 1]] * 2


def test_norms_of_ranks_with_other_winners_are_vllms(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    dbs = [norm_winners(tmp_path / "a.db", 1), database(tmp_path / "none.db", {})]
    assert ranks.run(checks.vllm_norms, dbs, OURS) == [[1] * 10] * 2


def test_norms_of_vllm_are_vllms_where_these_were_measured_to_be_faster(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    assert ranks.run(checks.vllm_norms, [norm_winners(tmp_path / "a.db", 1)] * 2, THEIRS) == [[1] * 10] * 2


@pytest.mark.parametrize(("us", "sums"), [(OURS, [0, 1, 1, 1, 0, 0, 1]), (THEIRS, [1] * 7)], ids=["ours", "theirs"])
def test_norms_of_sglang_are_ours_where_nobody_chose_another_group_or_kernel(
    ranks: Ranks, tmp_path: Path, us: tuple[float, float], sums: list[int]  # noqa: F811
) -> None:
    assert ranks.run(checks.sglang_norms, norm_winners(tmp_path / "a.db", 1), us) == [sums] * 2


@pytest.mark.parametrize("check", [checks.vllm_sums_left, checks.sglang_sums_left], ids=["vLLM", "SGLang"])
@pytest.mark.parametrize("us", [[2.0, 1.0, 3.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], ids=["summed first", "left", "in one"])
def test_a_layer_that_leaves_its_sum_to_a_norm_takes_the_fastest_of_three_ways(
    ranks: Ranks, tmp_path: Path, check: Any, us: list[float]  # noqa: F811
) -> None:
    product = replace(reduced(16), dtype="bf16")
    behind = AllReduceNorm(16, N, "bf16", WORLD, k=K // WORLD)
    db = database(tmp_path / "a.db", {product: usual(product, "push"), behind: usual(behind, "fused")})
    # 16 tokens: measured, then in the fastest way; a result that is used otherwise is computed. 50 tokens are measured too.
    # The kernel of all is called once to see that there is one, and then where it is the fastest.
    right = [(1, False)] * 4 if us[0] == 1.0 else [(1, False), (0, True), (1, True), (1, False)]
    # For 50 tokens there are two ways, since no winner is one kernel.
    assert ranks.run(check, db, us + us[:2]) == [(right, 1 + (us[2] == 1.0))] * 2


def test_a_layer_of_e4m3_and_its_norm_are_one_kernel_where_that_was_the_fastest(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    n, k, front = checks.N8, checks.K8 // WORLD, {"scales": "row", "quantize": "row"}
    behind = AllReduceNorm(16, n, "bf16", WORLD, k=k, **front)
    product = GemmReduceScatter(16, n, k, "e4m3", "replicated", WORLD, **front)
    db = database(tmp_path / "a.db", {product: usual(product, "scaled_words"), behind: usual(behind, "scaled_fused")})
    right = [(1, False), (0, True), (1, True), (1, False)]
    assert ranks.run(checks.vllm_sums_left, db, [3.0, 2.0, 1.0, 3.0, 2.0], True) == [(right, 2)] * 2


def normed_products(path: Path, quantize: str, quant: str) -> str:
    """Winners for 16 tokens: one kernel of all, a product with its sum, and a sum with its norm."""
    n, k = (checks.N8, checks.K8 // WORLD) if quantize else (N, K // WORLD)
    front: Any = {"scales": scaled.SCALES_OF[quantize], "quantize": quantize} if quantize else {}
    behind = AllReduceNorm(16, n, "bf16", WORLD, quant=quant, k=k, **front)
    product = GemmReduceScatter(16, n, k, "e4m3" if quantize else "bf16", "replicated", WORLD, **front)
    alone = AllReduceNorm(16, n, "bf16", WORLD, quant=quant)
    variants = ("scaled_words", "scaled_fused") if quantize else ("push", "fused")
    kept: dict[Problem, Config] = {product: usual(product, variants[0]), behind: usual(behind, variants[1])}
    return database(path, kept | {alone: usual(alone, "one_shot")})


@pytest.mark.sampled
@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("us", [[2.0, 3.0, 1.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0]], ids=["in one", "summed first", "left"])
def test_a_compiled_layer_and_the_norm_behind_it_are_one_operator(
    ranks: Ranks, tmp_path: Path, us: list[float], codes: bool  # noqa: F811
) -> None:
    db = normed_products(tmp_path / "a.db", "row" if codes else "", "none")
    # A sum that is used again, and a norm whose weight is wider, stay two nodes. The kernel of all is called once to see that
    # there is one, then at each call of its tokens if it is the fastest. For 50 tokens there is none: nothing is measured.
    calls = [2, 3, 3, 4] if us[2] == 1.0 else [1, 1, 1, 1]
    assert ranks.run(checks.vllm_compiled_norms, db, us, "row" if codes else "", timeout=240) == [(1, calls, 3)] * 2


@pytest.mark.volume
def test_a_compiled_layer_with_an_upper_bound_of_scales_leaves_its_norm_alone(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    db = normed_products(tmp_path / "a.db", "row", "none")
    counts = ranks.run(checks.vllm_compiled_norms, db, [1.0, 2.0, 3.0], "row", checks.Blocks, 1.5, timeout=240)
    assert counts == [(0, [0] * 4, 0)] * 2


@pytest.mark.sampled
@pytest.mark.parametrize(("quantize", "quant"), [("row", "row"), ("static", "tensor")])
@pytest.mark.parametrize("us", [[2.0, 3.0, 1.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0]], ids=["in one", "summed first", "left"])
def test_a_norm_that_vllm_has_fused_with_a_quantiser_is_a_part_of_the_operator(
    ranks: Ranks, tmp_path: Path, us: list[float], quantize: str, quant: str  # noqa: F811
) -> None:
    db = normed_products(tmp_path / "a.db", quantize, quant)
    calls = [2, 3, 3, 4] if us[2] == 1.0 else [1, 1, 1, 1]
    counts = ranks.run(checks.vllm_compiled_norms, db, us, quantize, checks.QuantisingBlock, timeout=240)
    assert counts == [(1, calls, 3)] * 2


def test_a_norm_of_vllm_with_other_arguments_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_ins.vllm():
        norm = torch.ops.vllm_ir.fused_add_rms_norm.default
        assert [kind.quant for kind in norms_of_vllm(norm).values()] == ["none", "row", "tensor"]
        monkeypatch.setitem(SCHEMAS, BY_ROW, "result input weight scale epsilon residual")
        assert [kind.quant for kind in norms_of_vllm(norm).values()] == ["none", "tensor"]


def test_compiled_layers_of_ranks_with_other_norms_stay_two_operators(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    product = replace(reduced(16), dtype="bf16")
    behind = AllReduceNorm(16, N, "bf16", WORLD, k=K // WORLD)
    kept: list[dict[Problem, Config]] = [{product: usual(product, "push")}, {behind: usual(behind, "fused")}]
    dbs = [database(tmp_path / "a.db", kept[0] | kept[1]), database(tmp_path / "b.db", kept[0])]
    assert ranks.run(checks.vllm_compiled_norms, dbs, [], timeout=240) == [(0, [0] * 4, 0)] * 2


def test_thresholds_are_the_buckets_of_winners(tmp_path: Path) -> None:
    kept: dict[Problem, Config] = {reduced(m): PUSH for m in (12, 16, 64, 256)} | {reduced(96): Config("bsp")}
    db = database(tmp_path / "a.db", kept)
    assert token_ranges(N, K // WORLD, "fp32", WORLD, db=db) == [(5, 64), (97, 256)], "all take the same time"
    assert token_ranges(N, K, "fp32", WORLD, db=db) == []
    assert norm_ranges(HIDDEN, "fp32", WORLD, db=norm_winners(tmp_path / "c.db", 1)) == [(4, 8)]
    assert merge_ranges(HEADS, DIM, "fp32", WORLD, db=merge_winners(tmp_path / "b.db")) == [(4, 8)]


@pytest.mark.parametrize(("plugin", "name"), [(vllm, "vLLM"), (sglang, "SGLang")])
def test_a_process_without_the_framework_is_left_alone(
    plugin: object, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plugin.register()  # type: ignore[attr-defined]
    (line,) = caplog.messages
    assert line.startswith(f"autotax leaves {name} as it is: No module named")


def test_winners_are_a_part_of_the_key_of_compiled_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(name: str, kept: dict[Problem, Config]) -> str:
        monkeypatch.setenv("AUTOTAX_DB", database(tmp_path / name, kept))
        lookup.reload()
        with stand_ins.vllm():
            vllm.register()
            return str(stand_ins.VllmConfig().compute_hash())

    keys = [key("a.db", {reduced(16): PUSH}), key("b.db", {reduced(16): PUSH}), key("c.db", {reduced(32): PUSH}), key("d.db", {})]
    assert keys[0] == keys[1] and len({*keys}) == 3 and {*map(len, keys)} == {10}
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert key("a.db", {}) == "0123456789"
    lookup.reload()


def test_a_framework_that_differs_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: object, input_: object, more: object) -> None: ...

    with stand_ins.vllm(), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(stand_ins.RowParallelLinear, "forward", forward)
        vllm.register()
        assert not stand_ins.op_registry_oot
    forward_is = "vllm.model_executor.layers.linear.RowParallelLinear.forward takes self, input_, more"
    assert caplog.messages == [f"autotax leaves row-parallel layers of vLLM as they are: {forward_is}"]


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
        assert all(entry.value == f"{module.__name__}:register" for entry in entry_points(group=group) if entry.name == "autotax")
    code = "import sys, autotax.engines.vllm, autotax.engines.sglang; print({'torch', 'triton', 'vllm'} & {*sys.modules})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    assert process.stdout.strip() == "set()"
