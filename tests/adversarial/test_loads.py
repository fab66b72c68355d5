"""Modules that `--load`, AUTOTAX_LOAD and installed packages bring: a bad one is one line, and a chatty one spoils no document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotax.core.errors import UsageError
from autotax.operators import load, loaded, named, operators
from tests.volume import volume

ROOT = Path(__file__).parents[2]
GEMM = ["all-gather-gemm", "--m", "64", "--n", "96", "--k", "64", "--backend", "cpu"]
TUNE = ["tune", *GEMM, "--trials", "1"]

BAD: dict[str, tuple[str | bytes, str]] = {
    "ends with 0": ("import sys\nsys.exit(0)", "it ends the program"),
    "ends with 1": ("raise SystemExit(1)", "it ends the program"),
    "ends without a code": ("raise SystemExit", "it ends the program"),
    "ends as a generator": ("raise GeneratorExit", "GeneratorExit"),
    "an error of its own root": ("class Odd(BaseException): pass\nraise Odd('so')", "Odd: so"),
    "an error": ("1 / 0", "ZeroDivisionError"),
    "an import that is not there": ("import nothing.like.it", "ModuleNotFoundError"),
    "no Python": ("def", "SyntaxError"),
    "no text": (b"\xff\xfe\x00", "SyntaxError"),
    "a zero": (b"x = 1\0", "SyntaxError"),
    "calls without end": ("def f(): f()\nf()", "RecursionError"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_line_and_leaves_nothing(tmp_path: Path, text: str | bytes, said: str) -> None:
    file = tmp_path / "bad_module_of_a_test.py"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = list(operators()), loaded(), list(sys.modules)
    with pytest.raises(UsageError, match=r"bad_module_of_a_test\.py cannot be loaded \(.*mend it, or give another --load") as refused:
        load(str(file))
    assert said in str(refused.value)
    assert (list(operators()), loaded(), list(sys.modules)) == before


@pytest.mark.parametrize("command", [*volume(TUNE), [*TUNE, "--json"]])
def test_a_space_that_raises_is_one_line_with_its_place(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "mine.py").write_text("""
from autotax.operators import named

def space(problem, hardware):
    return nothing_like_it

named("all-gather-gemm").variant("mine", "autotax.kernels.all_gather_gemm.bsp:Bsp", space)
""")
    line = [sys.executable, "-m", "autotax", *command, "--load", "mine.py"]
    here = os.environ | {"PYTHONPATH": str(ROOT), "AUTOTAX_DB": "none.db"}
    ended = subprocess.run(line, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 1, ended
    assert "fails: NameError: name 'nothing_like_it' is not defined (mine.py:5): mend it" in ended.stderr.splitlines()[-1]
    assert not ended.stdout or "(mine.py:5)" in json.loads(ended.stdout)["error"]["message"]


DECLARES = """
from dataclasses import dataclass
import autotax.operators as ops

@dataclass(frozen=True)
class Half(ops.Problem):
    op = "half-declared"
    m: int = ops.size("rows")
    dtype: str = ops.dtype()
    world_size: int = ops.ranks()
    nbytes = 1

ops.Operator(Half)
ops.named("all-gather-gemm").variant("half", "autotax.kernels.all_gather_gemm.bsp:Bsp", lambda *_: None)
ops.named("all-gather-gemm").peer("half_peer", "autotax.kernels.all_gather_gemm.bsp:Bsp")
raise ValueError("afterwards")
"""


def test_what_a_bad_file_declared_is_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "half_module_of_a_test.py"
    file.write_text(DECLARES)
    with pytest.raises(UsageError, match="ValueError: afterwards"):
        load(str(file))
    gemm = named("all-gather-gemm")
    assert "half-declared" not in operators() and "half" not in gemm.variants and "half_peer" not in gemm.peers


PLACE = [__file__, __name__, "test_a_bad_word_is_one_line"]
FUNCTIONS = dict.fromkeys(("make", "inputs", "reference", "baseline"), PLACE)
GOOD = {"name": "a-word", "functions": FUNCTIONS, "tunables": {"kind": [1, 2]}}
WORDS: dict[str, str] = {
    "nothing": "",
    "an empty object": "{}",
    "a list": "[]",
    "null": "null",
    "cut short": '{"name": ',
    "nested too deep": "[" * 100_000,
    "no functions": json.dumps(GOOD | {"functions": {}}),
    "a function that lacks": json.dumps(GOOD | {"functions": dict.fromkeys(("make", "inputs"), PLACE)}),
    "a function too many": json.dumps(GOOD | {"functions": FUNCTIONS | {"more": PLACE}}),
    "a place that is a number": json.dumps(GOOD | {"functions": FUNCTIONS | {"make": 3}}),
    "a place that is short": json.dumps(GOOD | {"functions": FUNCTIONS | {"make": PLACE[:2]}}),
    "a file that is not there": json.dumps(GOOD | {"functions": FUNCTIONS | {"make": ["/nowhere/at_all.py", "", "make"]}}),
    "a module that is not there": json.dumps(GOOD | {"functions": FUNCTIONS | {"make": [__file__, "nothing.like.it", "make"]}}),
    "a function that is not there": json.dumps(GOOD | {"functions": FUNCTIONS | {"make": [__file__, __name__, "nowhere"]}}),
    "a function that is a constant": json.dumps(GOOD | {"functions": FUNCTIONS | {"make": [__file__, __name__, "GEMM"]}}),
    "no tunables": json.dumps({name: value for name, value in GOOD.items() if name != "tunables"}),
    "tunables that are a list": json.dumps(GOOD | {"tunables": [1]}),
    "a tunable without values": json.dumps(GOOD | {"tunables": {"kind": []}}),
    "a tunable that is a fraction": json.dumps(GOOD | {"tunables": {"kind": [0.5]}}),
    "a name that is a number": json.dumps(GOOD | {"name": 3}),
    "a name that a terminal obeys": json.dumps(GOOD | {"name": "\x1b[31m"}),
}


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS.keys())
def test_a_bad_word_is_one_line(word: str) -> None:
    before = list(operators()), loaded()
    with pytest.raises(UsageError, match=r"(?s)cannot be loaded|is not there") as refused:
        load(f"callable:{word}")
    assert len(str(refused.value)) < 700
    assert (list(operators()), loaded()) == before


@pytest.mark.parametrize("name", ["my.op_of_a_test.py", "v1.2.op_of_a_test.py", "a-b.op_of_a_test.py"])
def test_a_file_may_have_several_dots(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotax.operators.registry.digests", {})
    (tmp_path / name).write_text("VALUE = 7\n")
    load(str(tmp_path / name))
    assert sys.modules.pop(name[:-3].replace(".", "_")).VALUE == 7


@pytest.mark.parametrize("change", ["VALUE = 8\n", None])
def test_a_file_that_has_changed_is_not_loaded_again_in_silence(
    tmp_path: Path, change: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotax.operators.registry.digests", {})
    file = tmp_path / "changing_module_of_a_test.py"
    file.write_text("VALUE = 7\n")
    load(str(file))
    load(str(file))
    file.write_text(change) if change else file.unlink()
    with pytest.raises(UsageError, match="has changed since it was loaded, and Python keeps the old one: start again"):
        load(str(file))
    sys.modules.pop("changing_module_of_a_test")


def command(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, whose modules may come from `folder`."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    own = {"PYTHONPATH": path, "AUTOTAX_DB": str(folder / "none.db")}
    line = [sys.executable, "-m", "autotax", *map(str, arguments)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | own, check=False)


PLAN = ["tune", *GEMM, "--dry-run", "--variants", "push", "--json"]
CHATTY = """
import sys
from autotax.operators import named
print("noise of a module", flush=True)
sys.stdout.write("more of it")
def space(problem, hardware):
    print("noise of a space")
    return None
named("all-gather-gemm").variant("chatty", "autotax.kernels.all_gather_gemm.bsp:Bsp", space)
"""
ENDS = CHATTY.replace('    print("noise of a space")', "    sys.exit(0)")


def test_a_chatty_module_spoils_no_document(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    done = command(tmp_path, *PLAN, "--load", "chatty.py")
    assert done.returncode == 0 and len(json.loads(done.stdout)["results"]) == 1, done
    assert "noise of a module" in done.stderr and "noise of a space" in done.stderr


@pytest.mark.parametrize(
    ("load", "arguments", "code"),
    [
        ("import sys; sys.exit(0)", ["winners"], 2),
        ("import sys; sys.exit(0)", [*PLAN], 2),
        ("import sys; sys.exit(0)", ["--help"], 2),
        (ENDS, [*PLAN], 1),
    ],
)
def test_a_module_that_ends_the_program_is_no_success(tmp_path: Path, load: str, arguments: list[str], code: int) -> None:
    (tmp_path / "ends.py").write_text(load)
    done = command(tmp_path, *arguments, "--load", "ends.py")
    assert done.returncode == code and "end" in done.stderr.splitlines()[-1], done
    if "--json" in arguments:
        assert json.loads(done.stdout)["error"]["code"] == code


ENTRIES: dict[str, tuple[str, str]] = {
    "a module that is not there": ("[autotax.operators]\nsome-op = nothing.like.it\n", "ModuleNotFoundError"),
    "a module that ends the program": ("[autotax.operators]\nsome-op = ends\n", "it ends the program"),
    "an attribute": ("[autotax.operators]\nsome-op = json:loads\n", "ModuleNotFoundError"),
    "no module": ("[autotax.operators]\nsome-op =\n", "cannot be loaded"),
    "a bad word": ("[autotax.operators]\nsome-op = callable:{}\n", "cannot be loaded"),
}


@pytest.mark.sampled(by=lambda text, said, arguments: {"text": text, "arguments": arguments})
@pytest.mark.parametrize(("text", "said"), ENTRIES.values(), ids=ENTRIES.keys())
@pytest.mark.parametrize("arguments", [["--help"], PLAN], ids=["help", "plan"])
def test_a_broken_package_costs_its_operators_only(tmp_path: Path, text: str, said: str, arguments: list[str]) -> None:
    package = tmp_path / "some_package-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(text)
    (tmp_path / "ends.py").write_text("import sys; sys.exit(0)")
    done = command(tmp_path, *arguments)
    [line] = done.stderr.splitlines()
    assert done.returncode == 0 and "entry point 'some-op' are left out" in line and said in line, done
    assert "Usage" in done.stdout if arguments == ["--help"] else json.loads(done.stdout)["ok"]
