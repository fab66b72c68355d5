"""Bad input: exit code 2, one line that names what was given and what to do, nothing started, nothing written."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import GPUS, Run, Tuner, on_machine
from tests.engines.test_architectures import LLAMA_70B

GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64"]
DECODE = ["flash-decode", "--batch", "2", "--q-heads", "8", "--kv-heads", "2", "--head-dim", "32", "--kv-len", "128"]

PROBLEMS = {
    "a size of zero": ["all-gather-gemm", "--m", "0", "--n", "96", "--k", "64"],
    "a negative size": ["all-gather-gemm", "--m", "-5", "--n", "96", "--k", "64"],
    "an enormous size": ["all-gather-gemm", "--m", "1" * 30, "--n", "96", "--k", "64"],
    "a size that is no number": ["all-gather-gemm", "--m", "many", "--n", "96", "--k", "64"],
    "a size that is no whole number": ["all-gather-gemm", "--m", "1.5", "--n", "96", "--k", "64"],
    "sizes that lack": ["all-gather-gemm", "--m", "64"],
    "no sizes": ["flash-decode"],
    "an option without its value": [*GEMM, "--dtype"],
    "sizes of the other operator": [*GEMM, "--batch", "1"],
    "an unknown dtype": [*GEMM, "--dtype", "fp8"],
    "an unknown shard": [*GEMM, "--shard", "n"],
    "a k that the ranks cannot share": [*GEMM, "--shard", "k", "--world-size", "3"],
    "query heads that KV heads cannot share": [*DECODE[:3], "--q-heads", "7", *DECODE[5:]],
    "an unknown output": [*DECODE, "--output", "scatter"],
    "heads that the ranks cannot own": [*DECODE, "--output", "head_scatter", "--world-size", "3"],
    "an unknown page": [*DECODE, "--page", "32"],
    "a page that is no number": [*DECODE, "--page", "few"],
    "a world size of zero": [*GEMM, "--world-size", "0"],
    "a world size beyond all": [*GEMM, "--world-size", "65"],
    "an unknown operator": ["all-reduce", "--m", "64"],
    "two operators": [*GEMM, "flash-decode"],
    "an unknown option": [*GEMM, "--speed", "9"],
    "an unknown backend": [*GEMM, "--backend", "tpu"],
    "a backend that is not here": [*GEMM, "--backend", "cuda"],
    "an unknown kind of database": [*GEMM, "--db", "nonsense://x/y"],
    "a database without a name": [*GEMM, "--db", ""],
}

CONDITIONS = {
    "an unknown mode": ["--mode", "lazy"],
    "graphs on CPU ranks": ["--mode", "graph"],
    "a cold L2 on CPU ranks": ["--l2", "cold"],
    "an unknown L2": ["--l2", "tepid"],
    "a negative skew": ["--skew", "-1"],
    "too much skew": ["--skew", "1e6"],
    "a skew that is no number": ["--skew", "some"],
    "a skew that is NaN": ["--skew", "nan"],
}

SEARCHES = {
    "no trials": ["--trials", "0"],
    "a negative number of trials": ["--trials", "-3"],
    "trials that are no number": ["--trials", "few"],
    "a timeout of zero": ["--timeout", "0"],
    "a negative timeout": ["--timeout", "-10m"],
    "an unknown unit of time": ["--timeout", "10d"],
    "a timeout that is no time": ["--timeout", "soon"],
    "a timeout without end": ["--timeout", "inf"],
    "an empty timeout": ["--timeout", ""],
    "an empty effort": ["--effort", ""],
    "an unknown effort": ["--effort", "some"],
    "an empty sampler": ["--sampler", ""],
    "an empty number of trials": ["--trials", ""],
    "an unknown sampler": ["--sampler", "cma"],
    "a negative seed": ["--seed", "-1"],
    "an unknown variant": ["--variants", "bsp,teleport"],
    "no variant": ["--variants", ","],
    "a negative soak": ["--soak", "-1"],
    "a soak that is no number": ["--soak", "long"],
    "a shapes file beside an operator": ["--shapes", "shapes.toml"],
}


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["tune", "compare", "taxes", "lookup", "trials"])
@pytest.mark.parametrize("arguments", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_of_any_command(run: Run, tuner: Tuner, db: Path, command: str, arguments: list[str], form: list[str]) -> None:
    assert run(command, *arguments, *form).complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["tune", "compare", "taxes", "lookup"])
@pytest.mark.parametrize("arguments", CONDITIONS.values(), ids=CONDITIONS.keys())
def test_of_conditions(run: Run, tuner: Tuner, db: Path, command: str, arguments: list[str]) -> None:
    assert arguments[0].lstrip("-") in run(command, *GEMM, *arguments).complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.parametrize("command", ["tune", "compare"])
def test_of_sizes_beyond_the_memory(run: Run, tuner: Tuner, db: Path, command: str) -> None:
    huge = ["all-gather-gemm", "--m", str(2**30), "--n", "4096", "--k", "4096"]
    assert "GiB a rank to be measured" in run(command, *huge).complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.parametrize("arguments", SEARCHES.values(), ids=SEARCHES.keys())
def test_of_a_search(run: Run, tuner: Tuner, db: Path, arguments: list[str]) -> None:
    assert run("tune", *GEMM, *arguments).complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "'frobnicate'; allowed are tune, compare, taxes, refresh, lookup, winners, trials, report"),
        (["tunes"], "no such command 'tunes': did you mean tune? See `autotax --help`"),
        (["tune", *GEMM, "--trails", "3"], "did you mean --trials?"),
        (["tune", *GEMM, "--variants", "bsp,pusch"], "variant is 'pusch'; allowed are bsp, "),
        (["tune", *GEMM, "--variants", "bsp,pusch"], "did you mean push?"),
        (["lookup", "flash-decod"], "did you mean flash-decode?"),
        (["tune", *GEMM, "--batch", "1"], "did you mean --backend? See `autotax tune all-gather-gemm --help`"),
        (["trials", "--sort", "latancy"], "did you mean latency?"),
        (["trials", "--status", "wrong"], "allowed are ok, "),
        (["trials", "--top", "0"], "top is 0; it must be at least 1"),
        (["trials", "--csv", "--json"], "--csv and --json given"),
        (["winners", "flash"], "operator is 'flash'; allowed are all-gather-gemm"),
        (["refresh", "--shapes", "nowhere.toml"], "file nowhere.toml cannot be read"),
        (["refresh", "--soak", "-1"], "soak is -1"),
        (["trace"], "no operator given"),
        (["trace", *GEMM, "--variant", "pushh"], "did you mean push?"),
        (["--fast"], "--fast"),
        (["tune", "--m", "64"], "--m given without an operator"),
        (["tune", "--dtype", "fp32"], "--dtype given without an operator"),
        (["trials", "--m", "64"], "--m given, but no operator"),
        (["compare"], "allowed are all-gather-gemm, all-reduce-norm, decode-merge, flash-decode"),
        (["lookup"], "allowed are all-gather-gemm, all-reduce-norm, decode-merge, flash-decode"),
        (["taxes"], "allowed are all-gather-gemm, all-reduce-norm, decode-merge, flash-decode"),
        (["compare", "--shapes", "nowhere.toml"], "file nowhere.toml cannot be read"),
        (["tune", "all-gather-gemm", "--m", "64"], "lacks --n, --k; it needs --m, --n, --k: give them all"),
        (["tune", "all-gather-gemm"], "all-gather-gemm lacks --m, --n, --k: give them all"),
        (["tune", *GEMM, "--m", "many"], "'many'"),
        (["tune", *GEMM, "--speed", "9"], "--speed"),
        (["doctor", "--backend", "tpu"], "cuda, rocm, cpu"),
    ],
)
def test_says_what_was_given_and_what_is_allowed(run: Run, tuner: Tuner, db: Path, arguments: list[str], said: str) -> None:
    assert said in run(*arguments).complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.parametrize("command", ["tune", "compare", "taxes"])
def test_more_ranks_than_gpus(run: Run, tuner: Tuner, db: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    on_machine(monkeypatch, GPUS)
    complaint = run(command, *GEMM, "--world-size", 8).complaint
    assert "8" in complaint and "4 GPUs" in complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.sampled
@pytest.mark.parametrize("command", ["tune", "compare", "lookup", "trials"])
@pytest.mark.parametrize("kind", ["text", "a folder", "cut short", "of another program"])
def test_a_database_that_is_none(run: Run, tuner: Tuner, tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / "my.db"
    if kind == "a folder":
        path.mkdir()
    elif kind == "of another program":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.close()
    else:
        path.write_bytes(b"SQLite format 3\0" if kind == "cut short" else b"notes, not a database\n" * 100)
    before = path.read_bytes() if path.is_file() else None
    assert str(path) in run(command, *GEMM, "--db", path).complaint
    assert (path.read_bytes() if path.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [path] and not tuner.asked


def test_a_folder_that_may_not_be_written(run: Run, tuner: Tuner) -> None:
    """In /proc nobody can make a file, not even root."""
    assert "/proc/my.db" in run("tune", *GEMM, "--db", "/proc/my.db").complaint
    assert not tuner.asked


def test_a_folder_that_cannot_be_made(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert "my.db" in run("tune", *GEMM, "--db", tmp_path / "file" / "my.db").complaint
    assert not tuner.asked


SHAPES = {
    "nothing": "",
    "no TOML": "[[all-gather-gemm\nm = 64",
    "not UTF-8": "name = '\udcff'",
    "an unknown operator": "[[all-reduce]]\nm = 64",
    "an unknown field": "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\nspeed = 9",
    "a field that lacks": "[[all-gather-gemm]]\nm = 64\nn = 96",
    "text as a size": "[[all-gather-gemm]]\nm = '64'\nn = 96\nk = 64",
    "a truth as a size": "[[all-gather-gemm]]\nm = true\nn = 96\nk = 64",
    "an array as a dtype": "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\ndtype = ['bf16']",
    "a negative size in the second table": "[[flash-decode]]\nbatch = 2\nq_heads = 8\nkv_heads = 2\nhead_dim = 32\n"
    "kv_len = 128\n[[flash-decode]]\nbatch = -2\nq_heads = 8\nkv_heads = 2\nhead_dim = 32\nkv_len = 128",
    "a table instead of an array": "[all-gather-gemm]\nm = 64\nn = 96\nk = 64",
    "numbers in an array": "all-gather-gemm = [64, 96, 64]",
    "an empty array": "all-gather-gemm = []",
    "a number too long to read": "[[all-gather-gemm]]\nm = " + "1" * 5000,
    "arrays nested too deep to read": "a = " + "[" * 3000,
    "a number too long to print": "[[all-gather-gemm]]\nm = 0x" + "f" * 10000,
    "a number of many digits": "[[all-gather-gemm]]\nn = 96\nk = 64\nm = " + "9" * 4000,
    "a number of many digits below zero": "[[all-gather-gemm]]\nn = 96\nk = 64\nm = -" + "9" * 4000,
    "an operator of many letters": '"' + "k" * 100_000 + '" = 1',
    "a field of many letters": '[[all-gather-gemm]]\n"' + "k" * 100_000 + '" = 1',
    "a value of many letters": '[[all-gather-gemm]]\nn = 96\nk = 64\nm = "' + "v" * 100_000 + '"',
    "a day": "[[all-gather-gemm]]\nn = 96\nk = 64\nm = 1979-05-27",
    "infinity": "[[all-gather-gemm]]\nn = 96\nk = 64\nm = inf",
    "another operator in a table": '[[all-gather-gemm]]\nop = "flash-decode"\nm = 64\nn = 96\nk = 64',
    "an operator that is a number": "[[all-gather-gemm]]\nop = 3\nm = 64\nn = 96\nk = 64",
    "an operator in a table of many letters": '[[all-gather-gemm]]\nop = "' + "o" * 100_000 + '"',
    "UTF-16 without its mark": "a\0=\x001\0",
    "more problems than anybody tunes": "all-gather-gemm = [" + "{m = 64}, " * 10_001 + "]",
    "a size nested too deep to tell": "[[all-gather-gemm]]\nn = 96\nk = 64\nm" + ".a" * 3000 + " = 64",
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_a_shapes_file(run: Run, tuner: Tuner, db: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    complaint = run("tune", "--shapes", file).complaint
    assert str(file) in complaint and len(complaint) < 500
    assert_nothing_happened(tuner, db)


ENCODED: dict[str, str] = {"a mark of UTF-8": "utf-8-sig", "UTF-16": "utf-16", "UTF-32": "utf-32", "no mark": "utf-8"}
TABLE = "# é\r\n[[all-gather-gemm]]\r\nm = 64\r\nn = 96\r\nk = 64\r\nworld_size = 2\r\n"


@pytest.mark.parametrize("encoding", ENCODED.values(), ids=ENCODED.keys())
def test_a_shapes_file_of_any_editor_is_read(run: Run, tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "shapes.toml"
    file.write_bytes(TABLE.encode(encoding))
    [planned] = run("tune", "--shapes", file, "--dry-run", "--json").results
    assert (planned["problem"]["m"], planned["problem"]["n"]) == (64, 96)


@pytest.mark.parametrize("encoding", ENCODED.values(), ids=ENCODED.keys())
@pytest.mark.parametrize("wrong", ["[[all-gather-gemm]\n", "é = 1"])
def test_a_shapes_file_of_any_editor_may_be_wrong(run: Run, tmp_path: Path, encoding: str, wrong: str) -> None:
    file = tmp_path / "shapes.toml"
    file.write_bytes(wrong.encode(encoding)[:-1])
    assert str(file) in run("tune", "--shapes", file).complaint


@pytest.fixture
def pipe() -> Iterator[Callable[[str], str]]:
    """pipe("text"): the path of a pipe that delivers a text once, as `<(...)` of a shell."""
    ends: list[int] = []

    def written(text: str) -> str:
        reading, writing = os.pipe()
        ends.append(reading)
        os.write(writing, text.encode())
        os.close(writing)
        return f"/dev/fd/{reading}"

    yield written
    for end in ends:
        os.close(end)


PIPED: dict[str, tuple[list[str], str]] = {
    "shapes": (["tune", "--dry-run", "--shapes"], TABLE),
    "a model": (["tune", "--dry-run", "--tp", "2", "--tokens", "8", "--model"], json.dumps(LLAMA_70B)),
    "winners": (["import"], '{"format": "autotax winners", "version": 2, "winners": []}'),
}


@pytest.mark.parametrize(("command", "text"), PIPED.values(), ids=PIPED.keys())
def test_a_pipe_is_read_once(run: Run, pipe: Callable[[str], str], command: list[str], text: str) -> None:
    result = run(*command, pipe(text), "--json")
    assert result.code == 0 and result.whole["ok"], result
    assert bool(result.results) == (command != ["import"])


def test_a_pipe_may_be_empty(run: Run, pipe: Callable[[str], str]) -> None:
    assert "holds no problems" in run("tune", "--shapes", pipe("")).complaint


def test_an_operator_beside_a_shapes_file(run: Run, tuner: Tuner, db: Path, tmp_path: Path) -> None:
    (tmp_path / "shapes.toml").write_text("[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\n")
    complaint = run("compare", *GEMM, "--shapes", tmp_path / "shapes.toml").complaint
    assert "operator all-gather-gemm, --m, --n, --k given with --shapes" in complaint
    assert_nothing_happened(tuner, db)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_shapes_file_that_cannot_be_read(run: Run, tuner: Tuner, db: Path, tmp_path: Path, name: str) -> None:
    assert str(tmp_path / name) in run("tune", "--shapes", tmp_path / name).complaint
    assert_nothing_happened(tuner, db)


def test_names_the_table_of_a_shapes_file(run: Run, tuner: Tuner, tmp_path: Path) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(SHAPES["a negative size in the second table"])
    assert "[[flash-decode]] number 2: batch is -2" in run("tune", "--shapes", file).complaint
    assert not tuner.asked


def test_one_of_many_problems_spoils_all(
    run: Run, tuner: Tuner, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, GPUS)
    file = tmp_path / "shapes.toml"
    table = "[[all-gather-gemm]]\nm = 64\nn = 96\nk = 64\n"
    file.write_text(f"{table}\n{table}world_size = 8\n")
    assert "4 GPUs" in run("tune", "--shapes", file).complaint
    assert_nothing_happened(tuner, db)


def assert_nothing_happened(tuner: Tuner, db: Path) -> None:
    assert not tuner.asked and not tuner.compared
    assert not db.parent.exists()


def test_an_interrupt_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autotax.db.lookup.lookup", asked)
    result = run("lookup", *GEMM)
    assert (result.code, result.out) == (130, "")
    assert result.err.startswith("autotax: interrupted") and result.err.count("\n") == 1
