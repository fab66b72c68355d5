"""Torch's fused operators, installed on two CPU ranks: torch's results, by tuned kernels where there is a winner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autotax.torch
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db import Store
from autotax.hardware import detect
from autotax.runner.ranks import Ranks
from autotax.torch import registration
from autotax.torch.plans import Status
from tests.torch import checks
from tests.torch.winners import ONE, TWO, WORLD, database, gather, scatter, usual
from tests.volume import volume

N, K = 24, 40
PULL = usual(gather(16, N, K), "pull")
PUSH = usual(gather(16, N, K), "push")
PLAIN = ((8, K), ((N, "nk"),), 0)
FEWER = ((7, K), ((N, "nk"),), 0)
"""A call in the bucket of PLAIN: 13 to 16 rows over both ranks."""
SEVERAL = ((8, K), ((8, "nk"), (N, "nk"), (8, "kn"), (8, "no")), 0)
MIDDLE = ((3, 4, K), ((N, "nk"),), 1)
COLUMNS = ((16, K // 2), ((N, "nk"),), 1)
GATHERS = [PLAIN, FEWER, SEVERAL, MIDDLE]


def taken(status: Status) -> dict[str, int]:
    """Calls by what ran them."""
    counts: dict[str, int] = {}
    for call in status.calls:
        counts[call.runs] = counts.get(call.runs, 0) + call.calls
    return counts


def gathers(config: Config) -> dict[Problem, Config]:
    return {gather(m, N, K): config for m in (16, 24)}


@pytest.mark.sampled
@pytest.mark.parametrize("return_a", [True, False])
@pytest.mark.parametrize("config", [ONE, TWO, PUSH, Config("bsp")], ids=str)
def test_gathering_is_torchs_with_several_products_and_any_dimension(
    ranks: Ranks, tmp_path: Path, config: Config, return_a: bool
) -> None:
    db = database(tmp_path / "a.db", gathers(config))
    for status in ranks.run(checks.gather_like_torch, db, GATHERS, return_a):
        assert taken(status) == {str(config): 2 * len(GATHERS)}, str(status)


def test_a_kernel_that_does_not_keep_a_is_taken_where_a_is_not_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    db = database(tmp_path / "a.db", gathers(PULL))
    for status in ranks.run(checks.gather_like_torch, db, GATHERS, False):
        assert taken(status) == {str(PULL): 6, "torch": 2}, str(status)
        assert "pull does not keep the gathered A" in str(status)


def test_columns_are_gathered_too(ranks: Ranks, tmp_path: Path) -> None:
    db = database(tmp_path / "a.db", {gather(16, N, K, shard="k"): ONE})
    for return_a in (True, False):
        for status in ranks.run(checks.gather_like_torch, db, [COLUMNS], return_a):
            assert taken(status) == {str(ONE): 2}, str(status)


def test_a_row_major_b_is_gathered_for_too(ranks: Ranks, tmp_path: Path) -> None:
    db = database(tmp_path / "a.db", {gather(16, N, K, weight="kn"): ONE})
    for status in ranks.run(checks.gather_like_torch, db, [((8, K), ((N, "kn"),), 0)], True):
        assert taken(status) == {str(ONE): 2}, str(status)


SCATTERS = [
    ((16, K), N, "nk", "sum", 0),
    ((14, K), N, "nk", "avg", 0),
    ((3, 4, K), N, "nk", "sum", 1),
    ((4, 3, K), N, "kn", "avg", 0),
    ((8, 2, K), N, "no", "sum", 0),
    ((8, K), N, "nk", "sum", 1),
]


@pytest.mark.parametrize("variant", ["push", "all_to_all", *volume("decomposed", "bsp")])
def test_scattering_is_torchs_for_sums_and_averages_of_any_dimension(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    problems = [scatter(m, N, K, weight) for m in (12, 16) for weight in ("nk", "kn")]
    db = database(tmp_path / "a.db", {problem: usual(problem, variant) for problem in problems})
    for status in ranks.run(checks.scatter_like_torch, db, SCATTERS):
        assert taken(status)["torch"] == 4, str(status)
        assert (status.taken, status.left) == (8, 4), str(status)
        assert "columns are scattered" in str(status)
        assert "B is neither row-major nor laid out as W.t() is" in str(status)


def test_calls_without_a_winner_are_torchs_and_say_so(ranks: Ranks, tmp_path: Path) -> None:
    db = database(tmp_path / "a.db", {gather(64, N, K): ONE})
    for status in ranks.run(checks.gather_like_torch, db, [PLAIN], True):
        (call,) = status.calls
        assert (call.runs, call.calls) == ("torch", 2)
        assert "no winner of this problem, nor of one in its bucket (m 13 to 16)" in call.reason


def test_what_a_program_asked_for_in_vain_is_there_to_be_tuned(ranks: Ranks, tmp_path: Path) -> None:
    db = database(tmp_path / "a.db", gathers(ONE))
    for status in ranks.run(checks.with_misses, db):
        assert taken(status) == {str(ONE): 1, "torch": 3}
    with Store.open(db) as store:
        (miss,) = store.misses(detect("cpu"))
    assert miss.problem == gather(192, N, K), "the end of its bucket, whose tuning serves all of it"
    assert miss.count == 3 * WORLD, "each rank counts its calls"


def test_a_first_call_while_a_graph_is_captured_is_torchs_and_later_ones_are_not(ranks: Ranks, tmp_path: Path) -> None:
    for status, warned in ranks.run(checks.while_captured, database(tmp_path / "a.db", gathers(ONE))):
        assert taken(status) == {"torch": 2, str(ONE): 2}
        assert len(warned) == 1
        assert "while a graph was being captured" in warned[0]


def test_ranks_that_make_other_calls_end_the_taking_for_all_and_nobody_waits(ranks: Ranks, tmp_path: Path) -> None:
    for status, warned in ranks.run(checks.parted, database(tmp_path / "a.db", gathers(ONE) | {gather(12, N, K): ONE})):
        assert taken(status) == {str(ONE): 2, "torch": 2}, str(status)  # earlier agreements of the ranks stay valid
        assert len(warned) == 1
        assert "rank 0" in warned[0]
        assert "rank 1" in warned[0]
        assert "did not make the same calls" in warned[0]


def test_ranks_with_other_winners_take_torchs_and_say_who_has_what(ranks: Ranks, tmp_path: Path) -> None:
    dbs = [database(tmp_path / f"{number}.db", gathers(config)) for number, config in enumerate((ONE, TWO))]
    for status, warned in ranks.run(checks.with_databases, dbs):
        assert taken(status) == {"torch": 1}
        assert len(warned) == 1
        assert f"rank 0: {ONE}" in warned[0]


def test_groups_have_kernels_of_their_own_and_one_rank_alone_has_none(ranks: Ranks, tmp_path: Path) -> None:
    for status in ranks.run(checks.in_two_groups, database(tmp_path / "a.db", gathers(ONE))):
        assert taken(status) == {str(ONE): 6, "torch": 3}
        assert "the group has one rank" in str(status)


def test_a_call_that_autograd_records_is_torchs(ranks: Ranks, tmp_path: Path) -> None:
    for status in ranks.run(checks.with_gradients, database(tmp_path / "a.db", gathers(ONE))):
        assert taken(status) == {str(ONE): 1, "torch": 1}


def test_wrong_arguments_are_refused_as_torch_refuses_them(ranks: Ranks, tmp_path: Path) -> None:
    for errors in ranks.run(checks.wrong_arguments, database(tmp_path / "a.db", gathers(ONE))):
        assert len(errors) == 4, errors


def test_another_schema_keeps_torchs_own_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = registration.SCATTER
    monkeypatch.setitem(registration.SCHEMAS, name, "(Tensor A, Tensor B) -> Tensor")
    with pytest.warns(RuntimeWarning, match=f"{name} stays torch's own: torch .* declares symm_mem::{name}") as caught:
        status = autotax.torch.install()
    assert len(caught) == 1
    assert status.operators[registration.GATHER] == "autotax"
    keys = torch._C._dispatch_has_kernel_for_dispatch_key
    assert keys(f"symm_mem::{registration.GATHER}", "CPU")
    assert not keys(f"symm_mem::{name}", "CPU")
    autotax.torch.uninstall()
    assert not keys(f"symm_mem::{registration.GATHER}", "CPU")
    assert keys(f"symm_mem::{registration.GATHER}", "CUDA")
    assert autotax.torch.status().operators == {}


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(UsageError, match="ops has 'fused'; allowed are fused_all_gather_matmul, fused_matmul_reduce_scatter"):
        autotax.torch.install(ops=["fused"])


def test_calls_of_a_second_thread_pass_where_they_do_not_overlap(ranks: Ranks, tmp_path: Path) -> None:
    """The overlapping call that is refused is tested with the modules, which share the guard."""
    for errors, status in ranks.run(checks.from_two_threads, database(tmp_path / "a.db", gathers(PULL))):
        assert errors == []
        assert set(taken(status)) == {str(PULL)}, str(status)
