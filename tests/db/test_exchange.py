"""Exchange of winners between databases: files, merging by evidence, and refusal of malformed files."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotax.core.conditions import EAGER
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.db import Store, formats
from autotax.db.records import Entry, merge
from autotax.operators import operators
from tests.db.conftest import BSP, ENVIRONMENT, PROBLEM, PUSH, a_winner, keep_winner

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
ALL = (list(operators()), ["cuda", "rocm", "cpu"])
OTHER = replace(PROBLEM, m=64)


def an_entry(by: str | None = "me@here", **more: object) -> Entry:
    return Entry(a_winner(0, **({"created_at": NOW} | more)), by)  # type: ignore[arg-type]


def contents(store: Store) -> dict[tuple[object, ...], dict[str, Any]]:
    return {entry.winner.key: entry.to_dict() for entry in store.entries(*ALL)}


# Merging, as a pure rule

CONFIGS = [PUSH, BSP, Config.of("push", block_m=32)]


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Few values of everything, so that keys and evidence often agree."""
    config = draw(st.sampled_from(CONFIGS))
    taken = [[1.0] * draw(st.integers(0, 2))]
    return an_entry(
        by=draw(st.sampled_from([None, "a@x", "b@y"])),
        config=config,
        problem=draw(st.sampled_from([PROBLEM, OTHER])),
        environment=draw(st.sampled_from([ENVIRONMENT, replace(ENVIRONMENT, triton="3.7.1")])),
        interval_low=draw(st.sampled_from([1.1, 1.2])),
        verified=draw(st.booleans()),
        samples=draw(st.sampled_from([None, {config.digest: taken}])),
    )


SIDES = st.lists(entries(), max_size=6)


@given(SIDES, SIDES)
def test_merging_is_commutative(one: list[Entry], other: list[Entry]) -> None:
    assert merge(one, other) == merge(other, one)


@given(SIDES, SIDES, SIDES)
def test_merging_is_associative(one: list[Entry], two: list[Entry], three: list[Entry]) -> None:
    first, last = merge(merge(one, two).values(), three), merge(one, merge(two, three).values())
    assert first == last == merge(three, one, two)


@given(SIDES)
def test_merging_with_itself_changes_nothing(side: list[Entry]) -> None:
    once = merge(side)
    assert merge(once.values(), once.values()) == once
    assert all(entry in side for entry in once.values())
    assert set(once) == {entry.winner.key for entry in side}


MORE = {PUSH.digest: [[1.0] * 9, [1.0] * 9]}


@pytest.mark.parametrize(
    ("weak", "strong"),
    [
        ({"verified": False, "interval_low": 9.0}, {"interval_low": 1.0}),
        ({"interval_low": 1.2, "speedup": 9.0, "samples": MORE}, {"interval_low": 1.21, "samples": None}),
        ({"samples": None}, {"samples": MORE}),
    ],
    ids=["verified", "lower bound", "samples"],
)
def test_the_better_proven_wins(weak: dict[str, object], strong: dict[str, object]) -> None:
    two = [an_entry(**weak), an_entry(**strong)]
    assert list(merge(two).values()) == list(merge(two[::-1]).values()) == [two[1]]


# Databases


def fill(store: Store, **more: object) -> None:
    keep_winner(store, created_at=NOW, **more)  # type: ignore[arg-type]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other.db"


def test_an_export_brings_winners_to_an_empty_database(store: Store, other: Path, tmp_path: Path) -> None:
    fill(store)
    fill(store, problem=OTHER, config=BSP, conditions=EAGER, tie=True, samples=None)
    file = tmp_path / "winners.json"
    formats.write(file, store.entries(*ALL))
    with Store.open(other) as there:
        outcomes = there.merge(formats.read(file), "winners.json")
        assert [outcome.what for outcome in outcomes] == ["added", "added"]
        winners = there.winners()
        assert [replace(winner, trial_id=0) for winner in winners] == [replace(w, trial_id=0) for w in store.winners()]
        [trial] = there.trials(PROBLEM)
        assert trial.id == winners[0].trial_id and trial.verified and trial.samples == winners[0].samples[PUSH.digest]  # type: ignore[index]
        [run] = there.runs(PROBLEM)
        assert run.status == "done" and run.ended_at is not None
        assert run.settings == {"imported_from": {"by": formats.me(), "at": NOW.isoformat(), "source": "winners.json"}}
        assert {entry.by for entry in there.entries(*ALL)} == {formats.me()}

        again = there.merge(formats.read(file), "winners.json")
        assert [(outcome.what, outcome.reason) for outcome in again] == [("kept", "it is the same")] * 2
        assert there.counts() == {"runs": 2, "trials": 2, "winners": 2}
    back = store.merge(formats.read(file), "winners.json")
    assert {outcome.reason for outcome in back} == {"it is the same"}


def test_who_tuned_it_goes_along_unless_it_is_not_told(other: Path, tmp_path: Path) -> None:
    file = tmp_path / "winners.json"
    with Store.open(other) as store:
        store.merge([an_entry(by="somebody@far")], "a file")
        formats.write(file, store.entries(*ALL))
        assert [entry.by for entry in formats.read(file)] == ["somebody@far"]
        formats.write(file, store.entries(*ALL), anonymous=True)
    assert [entry.by for entry in formats.read(file)] == [None]
    assert formats.me() not in file.read_text() and "somebody" not in file.read_text()


def test_two_databases_merged_either_way_hold_the_same(store: Store, other: Path) -> None:
    fill(store, interval_low=1.1)
    fill(store, problem=OTHER, samples=None)
    fill(store, problem=replace(PROBLEM, m=1), config=BSP)  # as well proven as that of the other: the digest decides
    fill(store, problem=replace(PROBLEM, m=2))
    with Store.open(other) as there:
        fill(there, config=BSP, interval_low=1.15)
        fill(there, problem=OTHER)
        fill(there, problem=replace(PROBLEM, m=1), samples={PUSH.digest: [[1.0], [2.0]]})
        fill(there, problem=replace(PROBLEM, m=3))
        mine, theirs = store.entries(*ALL), there.entries(*ALL)
        outcomes = {outcome.entry.winner.problem.m: outcome for outcome in store.merge(theirs, "there")}  # type: ignore[attr-defined]
        there.merge(mine, "here")
        assert contents(store) == contents(there)
        assert len(contents(store)) == 7
    assert (outcomes[512].what, outcomes[512].reason) == ("replaced", "its speed-up is at least 1.15x, the other's 1.1x")
    assert (outcomes[64].what, outcomes[64].reason) == ("replaced", "the bounds are equal, but it has 2 samples, the other 0")
    assert outcomes[3].what == "added" and outcomes[1].what in ("kept", "replaced")
    assert "digest decides" in outcomes[1].reason


# Malformed files, which are refused


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("good") / "winners.json"
    formats.write(file, [an_entry()])
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_a_good_file_is_read_as_it_was_written(good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "winners.json").write_text(json.dumps(good))
    assert formats.read(tmp_path / "winners.json") == [an_entry()]
    assert [entry.winner.created_at for entry in formats.read(tmp_path / "winners.json")] == [NOW]


EMPTY = b'{"format": "autotax winners", "version": 2, "winners": []}'
PACKED = lzma.compress(EMPTY)
TEXTS = {
    "empty": b"",
    "cut short": b'{"format": "autotax winners", "version": 2, "winners": [',
    "not JSON": b"\x00\xff garbage",
    "deep": b"[" * 100_000,
    "another format": b'{"name": "something"}',
    "a list": b"[]",
    "a later version": b'{"format": "autotax winners", "version": 3, "winners": []}',
    "an earlier version": b'{"format": "autotax winners", "version": 1, "winners": []}',
    "a version of another type": b'{"format": "autotax winners", "version": 2.0, "winners": []}',
    "compressed by xz, but not whole": PACKED[:-9],
    "compressed by xz, but broken": lzma.compress(b"{}")[:12] + bytes(40),
    "compressed by xz, with junk behind": PACKED + b"junk",
    "compressed by xz, with another kind behind": PACKED + gzip.compress(b""),
    "compressed by xz, its second stream not whole": PACKED + PACKED[:-9],
    "compressed by xz in streams without end": lzma.compress(b"") * 101,
    "compressed by the older kind of xz": lzma.compress(EMPTY, lzma.FORMAT_ALONE),
    "compressed, with junk behind": gzip.compress(EMPTY) + b"junk",
    "half a letter of UTF-16": EMPTY.decode().encode("utf-16")[:-1],
    "compressed, but not whole": gzip.compress(EMPTY)[:-9],
    "no winners": b'{"format": "autotax winners", "version": 2}',
    "a winner that is no object": b'{"format": "autotax winners", "version": 2, "winners": [3]}',
    "not a number": b'{"format": "autotax winners", "version": NaN, "winners": []}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_what_is_no_export_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "winners.json"
    file.write_bytes(text)
    refused(file)


REASONS = {
    "compressed, but not whole": "it is compressed, but not whole",
    "compressed, with junk behind": "it is compressed, but something else follows",
    "compressed by xz, with junk behind": "it is compressed, but something else follows",
    "cut short": "input data was truncated",
    "not JSON": "JSON is malformed",
}


@pytest.mark.parametrize(("kind", "reason"), REASONS.items(), ids=REASONS.keys())
def test_the_reason_why_a_file_is_no_export_is_named(tmp_path: Path, kind: str, reason: str) -> None:
    file = tmp_path / "winners.json"
    file.write_bytes(TEXTS[kind])
    assert reason in refused(file)


def test_a_damaged_file_of_gzip_is_named_so(tmp_path: Path) -> None:
    file = tmp_path / "winners.json"
    whole = bytearray(gzip.compress(EMPTY))
    whole[-6] ^= 1  # in the checksum
    file.write_bytes(whole)
    assert "it is compressed, but damaged" in refused(file)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda text: text,
    "with a mark of UTF-8": lambda text: b"\xef\xbb\xbf" + text,
    "in UTF-16": lambda text: text.decode().encode("utf-16"),
    "in UTF-32": lambda text: text.decode().encode("utf-32"),
    "with the line ends of another system": lambda text: text.replace(b"\n", b"\r\n"),
    "compressed by gzip": gzip.compress,
    "in two members of gzip": lambda text: gzip.compress(text[:50]) + gzip.compress(text[50:]),
    "compressed by xz": lzma.compress,
    "in two streams of xz": lambda text: lzma.compress(text[:50]) + lzma.compress(text[50:]),
    "in streams of xz with zeros between": lambda text: lzma.compress(text[:50]) + bytes(8) + lzma.compress(text[50:]) + bytes(4),
    "with a mark, compressed": lambda text: lzma.compress(b"\xef\xbb\xbf" + text),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_file_is_read_in_each_form_of_programs(
    good: dict[str, Any], tmp_path: Path, form: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "winners.json").write_bytes(form(json.dumps(good, indent=1).encode()))
    assert formats.read(tmp_path / "winners.json") == [an_entry()]


DATES = {
    **dict.fromkeys(["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1999-12-31T23:59:59Z"], "in the years 2000"),
    **dict.fromkeys(["2026-02-30T00:00:00Z", "2026-06-30T23:59:60Z", "2026-06-30T12:00:00+99:00", "today"], "datetime"),
    **dict.fromkeys(["2026-06-30T12:00:00", 3, None], "expected datetime"),
}


@pytest.mark.parametrize("date", DATES)
def test_an_impossible_date_is_refused(good: dict[str, Any], tmp_path: Path, date: Any) -> None:
    spoilt = json.loads(json.dumps(good))
    spoilt["winners"][0]["tuned_at"] = date
    (tmp_path / "winners.json").write_text(json.dumps(spoilt))
    assert DATES[date] in refused(tmp_path / "winners.json")


def test_a_file_that_is_not_there_or_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.json")
    refused(tmp_path)
    with pytest.raises(UsageError, match="give another path"):
        formats.write(tmp_path / "no folder" / "winners.json", [])


def refused(file: Path) -> str:
    with pytest.raises(UsageError, match="nothing was taken from it") as caught:
        formats.read(file)
    message = str(caught.value)
    assert "\n" not in message and str(file) in message and len(message) < 700
    return message


Spoil = Callable[[dict[str, Any]], object]
SPOILT: dict[str, Spoil] = {
    "a field that lacks": lambda w: w.pop("speedup"),
    "an unknown field": lambda w: w.update(colour="red"),
    "not verified": lambda w: w.update(verified=False),
    "verified by a word": lambda w: w.update(verified="yes"),
    "a tie that is a number": lambda w: w.update(tie=1),
    "a parameter that is a fraction": lambda w: w["config"]["params"].update(block_m=64.0),
    "a size that is a fraction": lambda w: w["problem"].update(m=512.0),
    "a bound that no axis holds": lambda w: w.update(interval=[1.0, 1e15]),
    "a name that a terminal obeys": lambda w: w["hardware"].update(device="\x1b[31mH200"),
    "a latency of zero": lambda w: w.update(latency_us=0),
    "a latency beyond all": lambda w: w.update(latency_us=10**400),
    "a latency in words": lambda w: w.update(latency_us="fast"),
    "an interval upside down": lambda w: w.update(interval=[1.3, 1.2]),
    "an interval of three": lambda w: w.update(interval=[1.1, 1.2, 1.3]),
    "a problem without a size": lambda w: w["problem"].pop("m"),
    "a problem of nothing": lambda w: w.update(problem=[]),
    "a problem of a bad size": lambda w: w["problem"].update(m="512"),
    "a problem of a list of types": lambda w: w["problem"].update(dtype=["bf16"]),
    "an operator of nobody": lambda w: w["problem"].update(op="all-reduce"),
    "hardware without links": lambda w: w["hardware"].pop("links"),
    "hardware of a text": lambda w: w["hardware"].update(count="4"),
    "hardware beyond a column": lambda w: w["hardware"].update(count=2**31),
    "an unknown backend": lambda w: w["hardware"].update(backend="tpu"),
    "sources of a list": lambda w: w.update(kernel_digest=["f" * 16]),
    "sources beyond a column": lambda w: w.update(kernel_digest="f" * 17),
    "a name beyond a column": lambda w: w["environment"].update(triton="3" * 65),
    "a name that no database takes": lambda w: w["environment"].update(torch="2\0"),
    "a version that is a number": lambda w: w["environment"].update(triton=3.6),
    "conditions of nobody": lambda w: w["conditions"].update(mode="lazy"),
    "conditions in a list": lambda w: w["conditions"].update(mode=["graph"]),
    "a skew in words": lambda w: w["conditions"].update(skew_us="some"),
    "a skew that no key holds": lambda w: w["conditions"].update(skew_us=12.3456789),
    "a config without a variant": lambda w: w["config"].pop("variant"),
    "a parameter that is a list": lambda w: w["config"]["params"].update(block_m=[64]),
    "a parameter that is true": lambda w: w["config"]["params"].update(block_m=True),
    "a baseline that is nothing": lambda w: w.update(baseline=None),
    "samples in a list": lambda w: w.update(samples=[1.0]),
    "samples that are no numbers": lambda w: w.update(samples={"x": [["1.0"]]}),
    "a moment without a zone": lambda w: w.update(tuned_at="2026-01-02T03:04:05"),
    "no moment": lambda w: w.update(tuned_at=None),
    "somebody of two lines": lambda w: w.update(tuned_by=["me"]),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_malformed_winner_is_refused_in_one_line(good: dict[str, Any], tmp_path: Path, spoil: Spoil) -> None:
    document = copy.deepcopy(good)
    document["winners"].append(copy.deepcopy(document["winners"][0]))
    spoil(document["winners"][1])
    file = tmp_path / "winners.json"
    file.write_text(json.dumps(document))
    assert "malformed at winner 2: " in refused(file)
