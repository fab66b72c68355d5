"""Winners in the package: they work without a database, and the user's own winners take precedence."""

from __future__ import annotations

import tomllib
import zlib
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

import autotax
from autotax import software
from autotax.core.config import Config
from autotax.db import Store, formats, records, shipped
from autotax.db import lookup as module
from autotax.db.lookup import lookup, reload
from autotax.db.records import merge
from autotax.operators import registry
from autotax.operators.registry import variant_digest
from autotax.spaces import space_for
from tests.db.conftest import BSP, PROBLEM, PUSH, keep_winner
from tests.db.test_exchange import an_entry
from tests.db.test_lookup import here, is_fallback  # noqa: F401

FOLDER = Path(autotax.__file__).parent / "shipped"
RESULTS = FOLDER.parents[1] / "results"
OTHER = Config.of("push", block_m=32)


def ship(*named: tuple[str, Config], **more: object) -> None:
    shipped.FOLDER.mkdir(exist_ok=True)
    for name, config in named:
        formats.write(shipped.FOLDER / name, [an_entry(config=config, **more)], anonymous=True)


def test_they_answer_without_a_database(tmp_path: Path) -> None:
    ship(("a.json", PUSH))
    exact = lookup(PROBLEM, db=tmp_path / "none.db")
    assert (exact, exact.match, exact.from_problem) == (PUSH, "exact", PROBLEM.key)
    assert exact.reason.startswith("shipped with autotax; tuned for this problem")
    near = lookup(replace(PROBLEM, m=500), db=tmp_path / "none.db")
    assert (near, near.match) == (PUSH, "nearest") and near.reason.startswith("shipped with autotax; ")
    assert list(tmp_path.iterdir()) == [shipped.FOLDER]


def test_those_of_the_user_go_first(tmp_path: Path) -> None:
    ship(("a.json", PUSH))
    db = tmp_path / "autotax.db"
    with Store.open(db) as store:
        keep_winner(store, config=BSP, interval_low=0.5)
    answer = lookup(PROBLEM, db=db)
    assert answer == BSP and "shipped" not in answer.reason
    near = lookup(replace(PROBLEM, m=500), db=db)
    assert near == BSP and "shipped" not in near.reason


@pytest.mark.parametrize("database", [False, True])
def test_they_can_be_stale_too(tmp_path: Path, database: bool) -> None:
    ship(("a.json", PUSH), kernel_digest="f" * 16)
    db = tmp_path / "autotax.db"
    if database:
        Store.open(db).close()
    answer = lookup(PROBLEM, db=db)
    assert is_fallback(answer)
    assert "the shipped winner of this problem is stale: kernel sources ffffffffffffffff (here" in answer.reason
    assert ("holds no winners" if database else "there is no database") in answer.reason
    allowed = lookup(PROBLEM, db=db, allow_stale=True)
    assert (allowed, allowed.match) == (PUSH, "stale") and allowed.reason.startswith("shipped with autotax; ")


def test_of_several_files_the_better_proven_answers(tmp_path: Path) -> None:
    ship(("a.json", OTHER), ("b.json", PUSH))
    first = lookup(PROBLEM, db=tmp_path / "none.db")
    ship(("a.json", PUSH), ("b.json", OTHER))
    reload()
    assert lookup(PROBLEM, db=tmp_path / "none.db") == first


def test_those_of_the_package_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", FOLDER)
    assert {winner.place.hardware.device for winner in shipped.known_winners()} == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    assert not [path for path in FOLDER.iterdir() if path.suffix not in (".json", ".npz")]  # winners, and priors of searches


def test_a_look_up_reads_the_same_as_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up makes no problems from the files, and takes the keys from the fields as they are."""
    monkeypatch.setattr(shipped, "FOLDER", FOLDER)
    read = {(w.problem.key, w.place, w.kernel_digest, w.config, w.speedup, w.interval_low, w.tie) for w in shipped.winners()}
    known = shipped.known_winners()
    assert {(w.problem_key, w.place, w.kernel_digest, w.config, w.speedup, w.interval_low, w.tie) for w in known} == read


def test_those_of_the_package_hold_for_the_sources_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alternative holds for the torch that it was proven with: its digest covers the version.

    Two kinds do not hold: their kernels changed where such GPUs were not at hand. Look-ups pass them over, searches begin with
    them, and `autotax refresh` proves them again.
    """
    entries = [entry.winner for file in FOLDER.glob("*.json") for entry in formats.read(file)]
    assert len(entries) >= 136
    stale = set()
    for won in entries:
        monkeypatch.setattr(software, "torch_version", lambda of=won.environment.torch: of)
        if won.kernel_digest != variant_digest.__wrapped__(won.problem.op, won.config.variant):
            stale.add(won.key)
    of_h100 = [won for won in entries if "H100" in won.hardware.device]
    quantising = {won.key for won in of_h100 if getattr(won.problem, "quantize", "none") != "none"}
    words = {won.key for won in of_h100 if won.config.variant == "scaled_push_words" and "scales=block" in won.problem.key}
    assert stale == quantising | words and (len(quantising), len(words)) == (28, 1)
    of_libraries = ("bsp", "heads")
    ours = [won for won in entries if won.config.variant not in (*of_libraries, *registry.of(won.problem).peers)]
    assert all(won.machine_code for won in ours), "results/versions/machine_code.py keep"


def test_those_of_the_package_answer_where_sources_are_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped, "FOLDER", FOLDER)
    entries = [entry for file in sorted(FOLDER.glob("h200x4*.json")) for entry in formats.read(file)]
    there = entries[0].winner
    sources = {(entry.winner.problem.op, entry.winner.config.variant): entry.winner.kernel_digest for entry in entries}
    monkeypatch.setattr(module, "environment", lambda _: replace(there.environment, kernels="f" * 16))
    monkeypatch.setattr(records, "variant_digest", lambda *variant: sources[variant])
    answers = [lookup(entry.winner.problem, hardware=there.hardware, db=tmp_path / "none.db") for entry in entries]
    assert {answer.match for answer in answers} == {"exact"}
    # Winners proven in place go before winners proven back to back.
    ranked = sorted((entry.winner for entry in entries), key=lambda won: (won.conditions.mode == "in-place", won.interval_low))
    best = {won.problem: won.config for won in ranked}
    assert answers == [best[entry.winner.problem] for entry in entries]


def test_they_are_declared_as_data_of_the_package() -> None:
    settings = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    assert "shipped/*.json" in settings["tool"]["setuptools"]["package-data"]["autotax"]


def test_their_samples_are_in_the_results() -> None:
    """The shipped files hold no samples. The samples in results/, of seven digits, give the shipped latency."""
    for path in sorted(FOLDER.glob("*.json")):
        recorded = formats.read(RESULTS.joinpath(*path.stem.split("-", 1)) / "winners.json.xz")
        there = {identity(entry.winner): entry.winner for entry in recorded}
        for shipped_winner in (entry.winner for entry in formats.read(path)):
            assert shipped_winner.samples is None
            samples = there[identity(shipped_winner)].samples
            assert samples is not None
            medians = [median(map(max, zip(*ranks, strict=True))) for ranks in samples.values()]
            assert any(us == pytest.approx(shipped_winner.latency_us, rel=1e-6) for us in medians)


def identity(winner: records.WinnerRecord) -> tuple[object, ...]:
    """The fields that a record and its shipped winner share. Shipped figures have seven digits, and times whole seconds."""
    assert winner.created_at is not None
    return winner.problem, winner.created_at.replace(microsecond=0), f"{winner.latency_us:.7g}"


def test_they_go_through_a_database_and_back(tmp_path: Path) -> None:
    entries = formats.read(FOLDER / "h200x4.json")
    with Store.open(tmp_path / "some.db") as store:
        store.merge(entries, "h200x4.json")
        back = store.entries(["all-gather-gemm", "flash-decode"], ["cuda"])
    held = {entry.winner.key: replace(entry.winner, trial_id=0) for entry in back}
    assert held == {key: replace(entry.winner, trial_id=0) for key, entry in merge(entries).items()}


def test_those_with_samples_take_their_place(tmp_path: Path) -> None:
    """Of two winners that differ only in samples, the one with samples is better proven."""
    path = RESULTS / "h200x4/winners.json.xz"
    known = {entry.winner.key for entry in formats.read(FOLDER / "h200x4.json")}
    full = [entry for entry in formats.read(path) if entry.winner.key in known and entry.count]
    assert full
    with Store.open(tmp_path / "some.db") as store:
        store.merge(formats.read(FOLDER / "h200x4.json"), "h200x4.json")
        store.merge(full, path.name)
        assert {winner.key for winner in store.winners() if winner.samples} >= {entry.winner.key for entry in full}


def test_a_wheel_stays_below_a_megabyte() -> None:
    """All files of the package, compressed one by one as in a wheel."""
    package = FOLDER.parent
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".json", ".typed")]
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < 960_000


def test_those_that_hold_have_a_value_of_each_parameter() -> None:
    """A kernel of today asks for parameters that a config may be older than."""
    for path in sorted(FOLDER.glob("*.json")):
        for winner in (entry.winner for entry in formats.read(path)):
            if winner.kernel_digest == variant_digest(winner.problem.op, winner.config.variant):
                space = space_for(winner.problem, winner.hardware)
                assert space.why_not(winner.config) is None, f"{path.name}: {winner.problem.brief()}: {winner.config}"
