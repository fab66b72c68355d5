"""Recorded landscapes, and searches that are replayed on them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.software import environment
from autotax.spaces import space_for
from results.search import landscapes, replay
from results.search.__main__ import main
from results.search.record import record, sample
from tests.tuner.shared import DECODE, GEMM, H200
from tests.tuner.synthetic import SyntheticRunner

pytestmark = pytest.mark.usefixtures("without_syncing")


def latency(config: Config) -> float | str:
    if config.variant == "gather":
        return "compile_error"
    return 30.0 + abs(config["splits"] - 16) / 4 + abs(config["block_s"] - 64) / 32


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recording") / "landscapes.json.gz"
    counts = record(DECODE, H200, SyntheticRunner(latency), environment("cpu"), Conditions(), 90, 3, path)
    assert counts["ok"] + counts["compile_error"] == 90 and counts["compile_error"]
    return path.read_bytes()


@pytest.fixture
def recorded(recording: bytes, tmp_path: Path) -> Path:
    """A copy of its own for each test: some edit it."""
    path = tmp_path / "landscapes.json.gz"
    path.write_bytes(recording)
    return path


def test_a_sample_is_dense_seeded_and_without_repetition() -> None:
    space = space_for(DECODE, H200)
    first, again, other = (list(sample(space, seed, 200))[:200] for seed in (0, 0, 1))
    assert first == again != other and len(set(first)) == 200
    assert first[: len(space.seeds())] == space.seeds() and all(config in space for config in first)


def test_what_was_recorded_is_all_that_a_replay_asks_for_and_it_is_deterministic(recorded: Path) -> None:
    file = landscapes.read(recorded)
    (key,) = file.problems
    points = replay.recorded_us(file, key)
    ground = replay.recorded(file, key)
    assert ground and ground.best_us == min(points.values())
    for name, strategy in replay.STRATEGIES.items():
        one, two = (replay.play(ground, strategy, 20, 1, 4, None, whole=True) for _ in range(2))
        assert one == two and len(one.losses) == 20 and min(one.losses) >= 1.0, name
    whole = replay.play(ground, replay.STRATEGIES["random"], 10_000, 0, 4, None, whole=True)
    assert len(whole.losses) == len(points) and whole.best_after(10_000) == 1.0
    assert whole.within(0.0) == whole.losses.index(1.0) + 1


def test_replays_are_told_as_a_table_and_as_a_document(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded), "--trials", "16", "--seeds", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [result["strategy"] for result in document["results"]] == list(replay.STRATEGIES)
    assert document["about"]["problems"] == [DECODE.to_dict()] and "no --models" in err
    assert main(["replay", str(recorded), "--trials", "12", "--seeds", "1"]) == 0
    assert "in turn with the queue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no file given"),
        (["FILE", "--landscape", "moon"], "landscape is 'moon'; allowed are recorded, boosted, forest"),
        (["FILE", "--landscape", "forest"], "a surrogate needs --models"),
        (["FILE", "--landscape", "forest", "--models", "nowhere"], "folder nowhere has no trees"),
        (["FILE", "--op", "sort"], "operator is 'sort'"),
        (["FILE", "--op", GEMM.op], "hold no problem with 40 recorded configs"),
        (["FILE", "--seeds", "0"], "seeds is 0; it must be from 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", *(str(recorded) if word == "FILE" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


HARDWARE, RESULT = ("hardware", H200.digest), ("results", 0)
EDITS: dict[str, tuple[tuple[str | int, ...], object, str]] = {
    "a target that is no text": ((*HARDWARE, "target"), 0, "expected str, got int"),
    "processors that are no number": ((*HARDWARE, "processors"), "x", "expected int, got str"),
    "a field that hardware lacks": ((*HARDWARE, "7"), 1, "unknown field 7"),
    "hardware without a device": ((*HARDWARE, "device"), None, "missing required field device"),
    "a skew that is no number": (("conditions", 0, "skew_us"), "\0", "expected float, got str"),
    "a mode that is none": (("conditions", 0, "mode"), "x", "mode is 'x'"),
    "a latency beyond all bounds": ((*RESULT, "measurements", 0, "value"), 1e300, "expected float < 1000000000000000.0"),
    "a problem without a run of its own": (("runs", 0, "settings"), {"imported_from": "x"}, "hold no problem with 40 recorded"),
    "latencies of 0": ((), 0.0, "hold no problem with 40 recorded"),
    "latencies below 0": ((), -1.0, "hold no problem with 40 recorded"),
}


@pytest.mark.parametrize(("at", "value", "message"), EDITS.values(), ids=EDITS.keys())
def test_an_edited_landscape_is_refused_in_one_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], at: tuple[str | int, ...], value: object, message: str
) -> None:
    document = json.loads(gzip.decompress(recorded.read_bytes()))
    place = document
    for name in at[:-1]:
        place = place[name]
    if value is None:
        del place[at[-1]]
    elif at:
        place[at[-1]] = value
    for result in () if at else document["results"]:
        result["measurements"][0]["value"] = value
    recorded.write_text(json.dumps(document))
    assert main(["replay", str(recorded), "--trials", "12", "--seeds", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_a_record_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "flash-decode", "--batch", "1", "--q-heads", "8", "--kv-heads", "2", "--head-dim", "32",
                 "--kv-len", "128", "--backend", "cpu"]) == 2  # fmt: skip
    assert "give one as --file" in capsys.readouterr().err
