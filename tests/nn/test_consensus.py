"""Modules beside each other, compiled, in a stack, alone, and where no kernel can run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autotax.core.config import Config
from autotax.nn import AllGatherLinear, FlashDecode
from autotax.operators.verification import TOLERANCE, relative_error
from autotax.runner.ranks import Ranks
from tests.nn import checks, stacks
from tests.nn.test_modules import database, linear

ROOT = Path(__file__).parents[2]
EXACT = TOLERANCE["fp32"]


def test_modules_called_in_turn_do_not_disturb_each_other(ranks: dict[int, Ranks]) -> None:
    for errors in ranks[2].run(stacks.interleaved, linear("push"), linear("pull")):
        assert max(errors) <= EXACT


def test_groups_that_share_a_rank_do_not_disturb_each_other(ranks: dict[int, Ranks]) -> None:
    for errors in ranks[3].run(stacks.overlapping_groups, Config.of("decomposed", products="one", comm=1, warm=0)):
        assert max(errors) <= EXACT


def test_a_module_need_not_be_closed(ranks: dict[int, Ranks]) -> None:
    for errors in ranks[2].run(stacks.let_go, linear("pull")):
        assert max(errors) <= EXACT


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.volume)])
def test_compiled_calls_are_the_eager_ones_in_one_graph(ranks: dict[int, Ranks], backend: str) -> None:
    for differences in ranks[2].run(stacks.compiled, linear("push", chunk_rows=16), backend, timeout=120):
        assert max(differences) == 0.0


def test_a_compiler_is_told_the_right_shapes(ranks: dict[int, Ranks]) -> None:
    for linear_out, decode_out, own_heads_out in ranks[2].run(stacks.faked):
        assert linear_out == ((10, checks.N), torch.bfloat16, (checks.N, 1))
        shape = (2, checks.HEADS, checks.DIM)
        assert decode_out == (shape, torch.bfloat16, (checks.HEADS * checks.DIM, checks.DIM, 1))
        assert own_heads_out[0] == (2, checks.HEADS // 2, checks.DIM)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.volume)], ids=["eager", "compiled"])
def test_a_decoder_stack_is_that_of_plain_torch(ranks: dict[int, Ranks], eager: bool) -> None:
    for error in ranks[2].run(stacks.decoder_stack, 3, 2, 8, eager, timeout=120):
        assert error <= EXACT


def test_one_process_alone_needs_no_group() -> None:
    weight = checks.normal(24, 40, seed=1, dtype=torch.float32)
    layer, x = AllGatherLinear(weight, max_m=9), checks.normal(7, 40, seed=2, dtype=torch.float32)
    assert layer.weight is weight
    assert relative_error(layer(x), x @ weight.t()) <= EXACT
    attend = FlashDecode(2, 4, 16, 3, 20, dtype=torch.float32, device="cpu")
    q, k, v = (checks.normal(*shape, seed=3, dtype=torch.float32) for shape in ((3, 4, 16), (3, 2, 20, 16), (3, 2, 20, 16)))
    lengths = torch.tensor([20, 0, 7], dtype=torch.int32)
    paged = FlashDecode(2, 4, 16, 3, 20, dtype=torch.float32, device="cpu", page=16)
    right = checks.attention(q, [(k, v, lengths)])
    assert relative_error(attend(q, k, v, lengths), right) <= EXACT
    assert relative_error(paged(q, *checks.paged(k, v, lengths, 16)), right) <= EXACT
    layer.close()
    attend.close()


def test_the_weight_stays_what_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 16))
    assert dict(AllGatherLinear(parameter).named_parameters())["weight"] is parameter
    assert list(AllGatherLinear(torch.ones(8, 16)).state_dict()) == ["weight"]
    assert list(AllGatherLinear(torch.ones(8, 16)).parameters()) == []


@pytest.mark.volume
@pytest.mark.usefixtures("no_database")
def test_ranks_that_cannot_run_kernels_are_bulk_synchronous(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("autotax.runner.ranks.rank_environment", lambda _: {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with Ranks(2) as two:
        assert max(two.run(stacks.attention_error)) <= EXACT
        path = database(tmp_path / "a.db", (16, linear("pull")))
        for errors, variants, warnings in two.run(checks.looked_up, [path, path], 16, (8, 3)):
            assert max(errors) <= EXACT
            assert set(variants) == {"bsp"}
            assert len(warnings) == 1
            assert "CPU ranks need TRITON_INTERPRET=1" in warnings[0]


@pytest.mark.parametrize(("what", "message"), [("hosts", "host-0, host-1"), ("compiler", "rank 1: no compiler here")])
def test_what_one_rank_lacks_makes_all_bulk_synchronous(ranks: dict[int, Ranks], what: str, message: str) -> None:
    for errors, tuned, warnings in ranks[2].run(stacks.hampered, linear("pull"), what):
        assert max(errors) <= EXACT
        assert tuned == [False]
        assert len(warnings) == 1
        assert message in warnings[0]


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, torch, autotax\n"
        "layer = autotax.nn.AllGatherLinear(torch.ones(8, 16))\n"
        "layer(torch.ones(2, 16))\n"
        "print({'triton', 'sqlalchemy', 'optuna', 'autotax.kernels', 'autotax.runner'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"
