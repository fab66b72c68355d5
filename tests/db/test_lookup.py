"""The answers of a look-up, and its time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotax.core.conditions import ON_CPU, Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.db import Store, shipped
from autotax.db import lookup as module
from autotax.db.lookup import Answer, lookup
from autotax.hardware import Hardware
from autotax.operators import Operator
from autotax.operators.problems import AllGatherGemm, FlashDecode
from autotax.operators.registry import variant_digest
from autotax.software import Environment
from tests.db.conftest import BSP, ENVIRONMENT, HARDWARE, PROBLEM, PUSH, keep_winner
from tests.edits import edited

DECODE = FlashDecode(batch=8, q_heads=64, kv_heads=8, head_dim=128, kv_len=32768, world_size=4)
DEFAULT = Config.of("bsp", block_m=256)


class Admitted:
    """Stands for the spaces of all variants, which admit every config except those in `refused`."""

    refused: set[Config]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This machine is HARDWARE with ENVIRONMENT, and its spaces admit all."""
    monkeypatch.setattr(Admitted, "refused", set(), raising=False)
    monkeypatch.setattr(Operator, "why_not", lambda *given: "block_m is too tall" if given[-1] in Admitted.refused else None)
    monkeypatch.setattr(Operator, "fallback", lambda *_: DEFAULT)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr(module, "detect", lambda: HARDWARE)
    monkeypatch.setattr(module, "environment", lambda backend: replace(ENVIRONMENT) if backend else None)
    module.reload()
    yield
    module.reload()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "autotax.db"


def is_fallback(answer: Answer) -> bool:
    assert "\n" not in answer.reason
    return answer == DEFAULT and answer.match == "fallback" and answer.from_problem is None


def test_an_answer_is_a_config() -> None:
    answer = Answer(PUSH.variant, PUSH.params, "exact", PROBLEM.key, "because")
    assert isinstance(answer, Config)
    assert answer == PUSH
    assert Config.of("push", PUSH.values) == answer
    assert answer != BSP
    assert {PUSH: 1}[answer] == 1
    assert answer.digest == PUSH.digest
    assert answer["block_m"] == 64
    assert Config.from_dict(json.loads(json.dumps(answer.to_dict()))) == PUSH


def test_exact(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store)
        keep_winner(store, replace(PROBLEM, m=256), BSP, tie=True)
    answer = lookup(PROBLEM, db=db)
    assert (answer, answer.match, answer.from_problem) == (PUSH, "exact", PROBLEM.key)
    assert any(f"it is {ratio}x faster than BSP [1.20, 1.29]" in answer.reason for ratio in ("1.24", "1.25"))
    tied = lookup(replace(PROBLEM, m=256), db=db)
    assert (tied, tied.match) == (BSP, "exact")
    assert tied.reason == "tuned here; other configs were equally fast within noise"


def test_hardware_may_be_given(db: Path) -> None:
    other = replace(HARDWARE, device="AMD Instinct MI300X", backend="rocm")
    with Store.open(db) as store:
        keep_winner(store, hardware=other)
    assert lookup(PROBLEM, hardware=other, db=db).match == "exact"
    assert is_fallback(lookup(PROBLEM, db=db))


@pytest.mark.parametrize(
    ("asked", "winners", "nearest"),
    [
        (replace(PROBLEM, m=500), [390, 512, 520], 512),
        (replace(PROBLEM, m=385), [512, 1024], 512),
        (replace(PROBLEM, m=400), [390, 512], 390),
        (replace(PROBLEM, m=512), [384, 385], 385),
        (replace(PROBLEM, m=420), [400, 441], 441),  # both 1.05x away: the larger
        (replace(PROBLEM, m=512), [384], None),
        (replace(PROBLEM, m=512), [513], 513),
        (replace(PROBLEM, m=384), [385, 512], 385),
        (replace(PROBLEM, m=300), [250, 600, 1024], 600),
        (replace(PROBLEM, m=512), [1025], None),
    ],
)
def test_nearest_is_in_the_same_bucket_or_the_next_greater_size(
    db: Path, asked: AllGatherGemm, winners: list[int], nearest: int | None
) -> None:
    with Store.open(db) as store:
        for m in winners:
            keep_winner(store, replace(PROBLEM, m=m), Config.of("push", tuned_for=m))
    answer = lookup(asked, db=db)
    if nearest is None:
        assert is_fallback(answer)
        assert "nor of one in its bucket" in answer.reason
    else:
        assert (answer.match, answer["tuned_for"]) == ("nearest", nearest)
        assert answer.from_problem == replace(PROBLEM, m=nearest).key
        assert f"m={nearest}" in answer.reason


@pytest.mark.parametrize("change", [{"batch": 7}, {"kv_len": 25000}, {"batch": 7, "kv_len": 25000}])
def test_each_size_of_flash_decode_may_vary_in_its_bucket(db: Path, change: dict[str, int]) -> None:
    with Store.open(db) as store:
        keep_winner(store, DECODE)
    assert lookup(replace(DECODE, **change), db=db).match == "nearest"  # type: ignore[arg-type]
    assert is_fallback(lookup(replace(DECODE, **change | {"batch": 6}), db=db))  # type: ignore[arg-type]
    assert is_fallback(lookup(replace(DECODE, **change | {"kv_len": 24576}), db=db))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"n": 7000}, {"k": 8000}, {"dtype": "fp16"}, {"shard": "k"}, {"world_size": 2}])
def test_other_fields_must_be_equal(db: Path, change: dict[str, object]) -> None:
    with Store.open(db) as store:
        keep_winner(store)
    assert is_fallback(lookup(replace(PROBLEM, **change), db=db))  # type: ignore[arg-type]
    assert is_fallback(lookup(DECODE, db=db))


def test_nearest_must_be_admitted(db: Path) -> None:
    tall = Config.of("push", block_m=512)
    with Store.open(db) as store:
        keep_winner(store, replace(PROBLEM, m=500), tall)
        keep_winner(store, replace(PROBLEM, m=400), PUSH)
    assert lookup(replace(PROBLEM, m=510), db=db) == tall
    module.reload()
    Admitted.refused = {tall}
    assert lookup(replace(PROBLEM, m=510), db=db) == PUSH
    Admitted.refused = {tall, PUSH}
    answer = lookup(replace(PROBLEM, m=490), db=db)
    assert is_fallback(answer)
    assert "tuned for m=500 and not m=490, does not fit: block_m is too tall" in answer.reason


def test_a_winner_that_the_space_refuses_does_not_answer_even_its_own_problem(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store)
    Admitted.refused = {PUSH}
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert "block_m is too tall" in answer.reason


STALE = [
    ({}, {"triton": "3.5.1"}, ["triton 3.5.1 (here 3.6.0)"]),
    ({}, {"comm": "nccl 1.0"}, [f"comm library nccl 1.0 (here {ENVIRONMENT.comm})"]),
    ({"device": "NVIDIA H100"}, {}, ["device NVIDIA H100 (here NVIDIA H200)"]),
    ({"target": "cuda:100"}, {}, ["target cuda:100 (here cuda:90)"]),
    ({"count": 8}, {}, ["devices 8 (here 4)"]),
    ({"memory_gib": 140}, {}, ["memory 140 GiB (here 139 GiB)"]),
    ({"processors": 114}, {}, ["processors 114 (here 132)"]),
    ({"shared_memory": 1}, {}, ["shared memory 1 bytes (here 232448 bytes)"]),
    ({"l2_bytes": 5}, {}, [f"L2 5 bytes (here {60 * 2**20} bytes)"]),
    ({"links": "one device"}, {}, ["links one device (here peer access 12/12 pairs)"]),
    ({"count": 8}, {"triton": "3.5.1"}, ["devices 8 (here 4), triton 3.5.1 (here 3.6.0)"]),
]
OTHERS = [(replace(HARDWARE, **devices), replace(ENVIRONMENT, **software), says) for devices, software, says in STALE]


@pytest.mark.parametrize(("hardware", "environment", "says"), OTHERS)
def test_what_is_stale_does_not_answer_and_says_why(
    db: Path, hardware: Hardware, environment: Environment, says: list[str]
) -> None:
    with Store.open(db) as store:
        keep_winner(store, hardware=hardware, environment=environment)
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert f"the winner of this problem is stale: {', '.join(says)}; run" in answer.reason
    assert is_fallback(lookup(replace(PROBLEM, m=500), db=db))
    assert is_fallback(lookup(replace(PROBLEM, m=500), db=db, allow_stale=True))

    allowed = lookup(PROBLEM, db=db, allow_stale=True)
    assert (allowed, allowed.match, allowed.from_problem) == (PUSH, "stale", PROBLEM.key)
    assert f"it is stale: {', '.join(says)}" in allowed.reason
    assert is_fallback(lookup(PROBLEM, db=db))


@pytest.mark.parametrize(("of_eight", "of_four"), [("56/56", "12/12"), ("50/56", "12/12"), ("56/56", "10/12")])
def test_gpus_beside_the_ranks_decide_nothing_where_all_reach_each_other(db: Path, of_eight: str, of_four: str) -> None:
    """An engine of four ranks sees the eight GPUs of its host, or its own four alone."""
    eight, four = (replace(HARDWARE, count=n, links=f"peer access {links} pairs") for n, links in ((8, of_eight), (4, of_four)))
    whole = (of_eight, of_four) == ("56/56", "12/12")
    for tuned_on, asked_on in ((eight, four), (four, eight)):
        path = db.with_name(f"{tuned_on.count}.db")
        with Store.open(path, create=True) as store:
            keep_winner(store, hardware=tuned_on)
        assert is_fallback(lookup(PROBLEM, db=path, hardware=asked_on)) != whole


def test_cpu_ranks_never_answer_for_gpus(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store, hardware=replace(HARDWARE, backend="cpu", device="x86_64"))
    for allow_stale in (False, True):
        answer = lookup(PROBLEM, db=db, allow_stale=allow_stale)
        assert is_fallback(answer)
        assert "stale: measured on CPU ranks" in answer.reason


def test_a_stale_winner_must_be_admitted_and_never_goes_before_one_that_holds(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store, environment=replace(ENVIRONMENT, triton="3.5.1"))
        keep_winner(store, config=BSP, environment=replace(ENVIRONMENT, triton="3.5.1", comm="nccl 1.0"))
    assert lookup(PROBLEM, db=db, allow_stale=True) == PUSH  # fewer differences
    module.reload()
    Admitted.refused = {PUSH}
    assert lookup(PROBLEM, db=db, allow_stale=True) == BSP
    module.reload()
    with Store.open(db) as store:
        keep_winner(store, replace(PROBLEM, m=511), Config.of("push", block_m=32))
    answer = lookup(PROBLEM, db=db, allow_stale=True)
    assert (answer.match, answer["block_m"]) == ("nearest", 32)


def test_winners_of_other_conditions_do_not_answer_and_it_says_so(db: Path) -> None:
    warm = Conditions(l2="warm")
    with Store.open(db) as store:
        keep_winner(store, config=BSP, conditions=warm)
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert "is stale: L2 warm (here cold)" in answer.reason
    assert is_fallback(lookup(replace(PROBLEM, m=500), db=db))
    assert lookup(PROBLEM, db=db, conditions=warm).match == "exact"
    assert lookup(replace(PROBLEM, m=500), db=db, conditions=warm).match == "nearest"

    with Store.open(db) as store:
        keep_winner(store)
    module.reload()
    assert lookup(PROBLEM, db=db) == lookup(PROBLEM, db=db, conditions=Conditions()) == PUSH
    assert lookup(PROBLEM, db=db, conditions=warm) == BSP


def test_a_skew_of_many_digits_is_found_again(db: Path) -> None:
    skewed = Conditions(skew_us=12.3456789)
    with Store.open(db) as store:
        keep_winner(store, conditions=skewed)
    assert lookup(PROBLEM, db=db, conditions=skewed).match == "exact"


def test_cpu_ranks_are_called_eagerly(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = replace(HARDWARE, backend="cpu", device="x86_64")
    monkeypatch.setattr(module, "detect", lambda: ranks)
    with Store.open(db) as store:
        keep_winner(store, hardware=ranks, conditions=ON_CPU)
    assert lookup(PROBLEM, db=db).match == "exact"


def test_software_that_is_not_in_the_key_does_not_make_stale(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store, environment=replace(ENVIRONMENT, python="3.12.0", kernels="f" * 16))
    assert lookup(PROBLEM, db=db).match == "exact"


def test_an_edit_of_one_variant_makes_its_winners_stale_and_no_others(db: Path) -> None:
    pulled, pull = replace(PROBLEM, m=256), Config.of("pull", block_m=64)
    with Store.open(db) as store:
        keep_winner(store)
        keep_winner(store, pulled, pull)
    old = variant_digest(PROBLEM.op, "pull")
    with edited("kernels/all_gather_gemm/pull.py"):
        says = f"kernel sources {old} (here {variant_digest(PROBLEM.op, 'pull')})"
        assert lookup(PROBLEM, db=db).match == "exact"
        assert lookup(replace(PROBLEM, m=500), db=db).match == "nearest"
        answer = lookup(pulled, db=db)
        assert is_fallback(answer) and f"the winner of this problem is stale: {says}; run" in answer.reason
        allowed = lookup(pulled, db=db, allow_stale=True)
        assert (allowed, allowed.match) == (pull, "stale") and says in allowed.reason
        assert module.save_misses(db) == 1
        with Store.open(db) as store:
            assert [miss.problem for miss in store.misses(HARDWARE)] == [pulled]
    module.reload()
    assert lookup(pulled, db=db).match == "exact"


def test_of_two_that_hold_the_better_proven_answers(db: Path) -> None:
    """`pull` was tuned with an edited source of `push`, so neither winner replaced the other."""
    pull = Config.of("pull", block_m=64)
    with Store.open(db) as store:
        keep_winner(store, interval_low=1.21)
        with edited("kernels/all_gather_gemm/push.py"):
            keep_winner(store, config=pull, interval_low=1.2)
        assert len(store.winners()) == 2
    assert lookup(PROBLEM, db=db) == lookup(replace(PROBLEM, m=500), db=db) == PUSH
    module.reload()
    with Store.open(db) as store:
        with edited("kernels/all_gather_gemm/push.py"):
            keep_winner(store, config=pull, interval_low=1.22)
        assert len(store.winners()) == 2
    assert lookup(PROBLEM, db=db) == lookup(replace(PROBLEM, m=500), db=db) == pull
    with Store.open(db) as store:
        kept = keep_winner(store, config=BSP)
        assert store.winners() == [kept]


def test_no_database_no_winners_and_a_broken_one(db: Path) -> None:
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert "no database" in answer.reason
    assert not db.exists()
    Store.open(db).close()
    assert "no database" in lookup(PROBLEM, db=db).reason  # kept until reload
    module.reload()
    assert "no winners" in lookup(PROBLEM, db=db).reason
    db.write_bytes(b"garbage" * 1000)
    module.reload()
    with pytest.raises(UsageError, match="not a SQLite database"):
        lookup(PROBLEM, db=db)


def test_the_database_is_read_once(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(db) as store:
        keep_winner(store)
    assert lookup(PROBLEM, db=db).match == "exact"
    monkeypatch.setattr(Store, "open", None)
    assert lookup(replace(PROBLEM, m=400), db=db).match == "nearest"
    assert lookup(PROBLEM, db=db).match == "exact"


def test_the_default_database_answers(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTAX_DB", str(db))
    with Store.open() as store:
        keep_winner(store)
    assert lookup(PROBLEM).match == "exact"


def test_what_was_proven_back_to_back_answers_until_it_is_proven_in_place(tmp_path: Path) -> None:
    other = Config.of("push", block_m=32)
    with Store.open(db := tmp_path / "autotax.db") as store:
        keep_winner(store, config=PUSH, conditions=Conditions("graph"), interval_low=1.4)
    usual = Conditions.usual(on_gpu=True)
    for conditions in (None, usual, Conditions("graph")):
        assert lookup(PROBLEM, db=db, conditions=conditions) == PUSH
    assert lookup(PROBLEM, db=db, conditions=Conditions("eager")).match == "fallback"
    with Store.open(db) as store:
        keep_winner(store, config=other, conditions=usual, interval_low=1.1)
        assert len(store.winners()) == 2, "neither takes the place of the other"
    module.reload()
    assert lookup(PROBLEM, db=db) == other and lookup(PROBLEM, db=db, conditions=usual) == other
    assert lookup(PROBLEM, db=db, conditions=Conditions("graph")) == PUSH
    near = lookup(replace(PROBLEM, m=500), db=db)
    assert (near, near.match) == (other, "nearest")


def test_what_was_proven_in_place_answers_calls_back_to_back(tmp_path: Path) -> None:
    with Store.open(db := tmp_path / "autotax.db") as store:
        keep_winner(store, config=PUSH, conditions=Conditions.usual(on_gpu=True))
    assert lookup(PROBLEM, db=db, conditions=Conditions("graph")).match == "exact"
    assert lookup(PROBLEM, db=db, conditions=Conditions("graph", skew_us=5.0)).match == "fallback"
