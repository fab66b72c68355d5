"""The answers of a look-up, and what they cost."""

from __future__ import annotations

import json
import timeit
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotax import spaces
from autotax.conditions import ON_CPU, Conditions
from autotax.config import Config
from autotax.db import Store
from autotax.db import lookup as module
from autotax.db.lookup import Answer, lookup
from autotax.errors import UsageError
from autotax.hardware import Environment, Hardware
from autotax.problem import AllGatherGemm, FlashDecode, Problem
from tests.db.conftest import BSP, ENVIRONMENT, HARDWARE, PROBLEM, PUSH, keep_winner

DECODE = FlashDecode(batch=8, q_heads=64, kv_heads=8, head_dim=128, kv_len=32768, world_size=4)
DEFAULT = Config.of("bsp", block_m=256)


class Space:
    """Admits every config but those it is told to refuse."""

    refused: set[Config]

    def __init__(self, problem: Problem, hardware: Hardware) -> None:
        assert isinstance(problem, Problem)
        assert isinstance(hardware, Hardware)

    def why_not(self, config: Config) -> str | None:
        return "block_m is too tall" if config in self.refused else None

    def default(self, variant: str) -> Config:
        assert variant == "bsp"
        return DEFAULT


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine is HARDWARE with ENVIRONMENT, and its spaces admit all."""
    monkeypatch.setattr(Space, "refused", set(), raising=False)
    monkeypatch.setattr(spaces, "space_for", Space, raising=False)
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
    assert "1.25x [1.20, 1.29]" in answer.reason or "1.24x [1.20, 1.29]" in answer.reason
    tied = lookup(replace(PROBLEM, m=256), db=db)
    assert (tied, tied.match) == (BSP, "exact")
    assert "tie" in tied.reason


def test_hardware_may_be_given(db: Path) -> None:
    other = replace(HARDWARE, device="AMD Instinct MI300X", backend="rocm")
    with Store.open(db) as store:
        keep_winner(store, hardware=other)
    assert lookup(PROBLEM, hardware=other, db=db).match == "exact"
    assert is_fallback(lookup(PROBLEM, db=db))


@pytest.mark.parametrize(
    ("asked", "winners", "nearest"),
    [
        (replace(PROBLEM, m=500), [400, 512, 1000], 512),
        (replace(PROBLEM, m=256), [512, 1024], 512),
        (replace(PROBLEM, m=1024), [512], 512),
        (replace(PROBLEM, m=300), [200, 450], 450),  # both 1.5x away: the larger
        (replace(PROBLEM, m=1025), [512], None),
        (replace(PROBLEM, m=255), [512], None),
    ],
)
def test_nearest_is_within_a_factor_of_two(
    db: Path, asked: AllGatherGemm, winners: list[int], nearest: int | None
) -> None:
    with Store.open(db) as store:
        for m in winners:
            keep_winner(store, replace(PROBLEM, m=m), Config.of("push", tuned_for=m))
    answer = lookup(asked, db=db)
    if nearest is None:
        assert is_fallback(answer)
        assert "factor of two" in answer.reason
    else:
        assert (answer.match, answer["tuned_for"]) == ("nearest", nearest)
        assert answer.from_problem == replace(PROBLEM, m=nearest).key
        assert f"m={nearest}" in answer.reason


@pytest.mark.parametrize("change", [{"batch": 16}, {"kv_len": 20000}])
def test_nearest_of_flash_decode_differs_in_one_size(db: Path, change: dict[str, int]) -> None:
    with Store.open(db) as store:
        keep_winner(store, DECODE)
    assert lookup(replace(DECODE, **change), db=db).match == "nearest"  # type: ignore[arg-type]
    assert is_fallback(lookup(replace(DECODE, batch=16, kv_len=20000), db=db))


@pytest.mark.parametrize("change", [{"n": 7000}, {"k": 8000}, {"dtype": "fp16"}, {"shard": "k"}, {"world_size": 2}])
def test_other_fields_must_be_equal(db: Path, change: dict[str, object]) -> None:
    with Store.open(db) as store:
        keep_winner(store)
    assert is_fallback(lookup(replace(PROBLEM, **change), db=db))  # type: ignore[arg-type]
    assert is_fallback(lookup(DECODE, db=db))


def test_nearest_must_be_admitted(db: Path) -> None:
    tall = Config.of("push", block_m=512)
    with Store.open(db) as store:
        keep_winner(store, replace(PROBLEM, m=512), tall)
        keep_winner(store, replace(PROBLEM, m=800), PUSH)
    Space.refused = {tall}
    assert lookup(replace(PROBLEM, m=500), db=db).from_problem == replace(PROBLEM, m=800).key
    answer = lookup(replace(PROBLEM, m=300), db=db)
    assert is_fallback(answer)
    assert "block_m is too tall" in answer.reason


STALE = [
    (HARDWARE, replace(ENVIRONMENT, kernels="f" * 16), ["kernel sources", "f" * 16, ENVIRONMENT.kernels]),
    (HARDWARE, replace(ENVIRONMENT, comm="nccl 1.0"), ["comm library", "nccl 1.0", ENVIRONMENT.comm]),
    (replace(HARDWARE, count=8), ENVIRONMENT, ["other hardware", "8 x NVIDIA H200", "4 x NVIDIA H200"]),
    (replace(HARDWARE, backend="cpu", device="x86_64"), ENVIRONMENT, ["other hardware", "CPU ranks"]),
    (replace(HARDWARE, count=8), replace(ENVIRONMENT, comm="nccl 1.0"), ["other hardware", "comm library"]),
]


@pytest.mark.parametrize(("hardware", "environment", "says"), STALE)
def test_what_is_stale_does_not_answer_and_says_why(
    db: Path, hardware: Hardware, environment: Environment, says: list[str]
) -> None:
    with Store.open(db) as store:
        keep_winner(store, hardware=hardware, environment=environment)
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert all(words in answer.reason for words in says), answer.reason
    assert is_fallback(lookup(replace(PROBLEM, m=500), db=db))


def test_winners_of_other_conditions_do_not_answer_and_it_says_so(db: Path) -> None:
    warm = Conditions(l2="warm")
    with Store.open(db) as store:
        keep_winner(store, config=BSP, conditions=warm)
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert "under other conditions (graph/warm/0; here graph/cold/0)" in answer.reason
    assert is_fallback(lookup(replace(PROBLEM, m=500), db=db))
    assert lookup(PROBLEM, db=db, conditions=warm).match == "exact"
    assert lookup(replace(PROBLEM, m=500), db=db, conditions=warm).match == "nearest"

    with Store.open(db) as store:
        keep_winner(store)
    module.reload()
    assert lookup(PROBLEM, db=db) == lookup(PROBLEM, db=db, conditions=Conditions()) == PUSH
    assert lookup(PROBLEM, db=db, conditions=warm) == BSP


def test_cpu_ranks_are_called_eagerly(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = replace(HARDWARE, backend="cpu", device="x86_64")
    monkeypatch.setattr(module, "detect", lambda: ranks)
    with Store.open(db) as store:
        keep_winner(store, hardware=ranks, conditions=ON_CPU)
    assert lookup(PROBLEM, db=db).match == "exact"


def test_software_that_is_not_in_the_key_does_not_make_stale(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store, environment=replace(ENVIRONMENT, python="3.12.0"))
    assert lookup(PROBLEM, db=db).match == "exact"


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
    assert lookup(replace(PROBLEM, m=600), db=db).match == "nearest"
    assert lookup(PROBLEM, db=db).match == "exact"


def test_the_default_database_answers(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTAX_DB", str(db))
    with Store.open() as store:
        keep_winner(store)
    assert lookup(PROBLEM).match == "exact"


def test_a_loaded_look_up_is_cheap(db: Path) -> None:
    with Store.open(db) as store:
        keep_winner(store)
    miss = replace(PROBLEM, n=1)
    costs = {}
    for name, problem in {"exact": PROBLEM, "miss": miss}.items():
        lookup(problem, db=db)
        costs[name] = min(timeit.repeat(lambda: lookup(problem, db=db), number=2000, repeat=5)) / 2000 * 1e6  # noqa: B023
    print({name: f"{cost:.2f} us" for name, cost in costs.items()})
    assert max(costs.values()) < 50  # some 1 us; a query would cost hundreds
