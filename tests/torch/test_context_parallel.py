"""Context parallelism's attention, installed on two CPU ranks: torch's results, by tuned kernels where there is a winner."""

from __future__ import annotations

from pathlib import Path

import pytest

import autotax.torch
from autotax.operators.problems import GatherAttention
from autotax.runner.ranks import Ranks
from autotax.torch import context_parallel
from autotax.torch.context_parallel import ATTENTION
from tests.torch import checks
from tests.torch.winners import WORLD, database, usual

BATCH, HEADS, KV_HEADS, TOKENS, DIM = CALL = 2, 4, 2, 48, 32
OTHER = 1, 4, 4, 24, 16


def problem(mask: str, layout: str) -> GatherAttention:
    return GatherAttention(BATCH, HEADS, KV_HEADS, DIM, WORLD * TOKENS, "bf16", WORLD, mask, layout)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["decomposed", "push"])
@pytest.mark.parametrize(("mask", "layout"), [("causal", "zigzag"), ("causal", "contiguous"), ("none", "contiguous")])
def test_its_attention_is_torchs(ranks: Ranks, tmp_path: Path, mask: str, layout: str, variant: str) -> None:
    tuned = problem(mask, layout)
    db = database(tmp_path / "a.db", {tuned: usual(tuned, variant)})
    for status in ranks.run(checks.attention_like_torch, db, layout == "zigzag", mask == "causal", [CALL, CALL, OTHER, CALL]):
        assert (status.taken, status.left) == (2, 2), str(status)
        assert "no winner of this problem" in str(status)
        assert "while a graph was being captured" in str(status)


def test_a_winner_without_log_sum_exps_is_left(ranks: Ranks, tmp_path: Path) -> None:
    tuned = problem("causal", "zigzag")
    db = database(tmp_path / "a.db", {tuned: usual(tuned, "heads")})
    for status in ranks.run(checks.attention_like_torch, db, True, True, [CALL, CALL]):
        assert (status.taken, status.left) == (0, 2), str(status)


def test_another_signature_keeps_torchs_own_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = context_parallel.torchs_module()
    monkeypatch.setattr(module, context_parallel.FUNCTION, lambda query, key: (query, key))
    with pytest.warns(RuntimeWarning, match=f"{ATTENTION} stays torch's own: torch .* declares .*query, key") as caught:
        autotax.torch.install(ops=[ATTENTION])
    assert len(caught) == 1
    autotax.torch.uninstall()
