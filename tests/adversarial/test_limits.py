"""Machines at a limit: few open files, little memory, no loopback, an installation that goes, warnings that are errors.

A command ends in bounded time: it works, or it fails with one line of its own.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from autotax.core.errors import UsageError, limit_met
from autotax.db import Store
from autotax.report.renderer import MOST_LOSSES, Renderer, Undrawn
from tests.db.conftest import keep_winner

pytestmark = pytest.mark.volume

ROOT = Path(__file__).parents[2]
TUNE = ["tune", "all-gather-gemm", "--m", "32", "--n", "32", "--k", "32", "--dtype", "fp32", "--trials", "2", "--backend", "cpu"]
LOOKUP = ["lookup", "all-gather-gemm", "--m", "32", "--n", "32", "--k", "32", "--backend", "cpu"]
MODULE = [sys.executable, "-m", "autotax"]
PATIENCE_S = 280
CHART = {"data": {"values": [{"x": 1}]}, "mark": "point", "encoding": {"x": {"field": "x", "type": "quantitative"}}}


def ended(folder: Path, *command: str, path: Path | str = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The end of a command in `folder`. Its stderr must name the fault and show no stack."""
    own = {"PYTHONPATH": str(path), "AUTOTAX_DB": str(folder / "own.db")} | environment
    variables = {name: value for name, value in os.environ.items() if name != "AUTOTAX_FORK_SERVER"} | own
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, env=variables, check=False)
    assert "Traceback" not in done.stderr and "frame #" not in done.stderr, done
    assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("autotax: "), done
    return done


def limited(limit: str, *command: str) -> list[str]:
    return ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *command]


@pytest.mark.timeout(PATIENCE_S + 20)
@pytest.mark.parametrize(("files", "code"), [(8, 1), (14, 1), (18, 1), (24, 0)])
def test_few_open_files(tmp_path: Path, files: int, code: int) -> None:
    done = ended(tmp_path, *limited(f"-n {files}", *MODULE, *TUNE))
    assert done.returncode == code
    assert code == 0 or "oo many open files" in done.stderr.splitlines()[-1]


@pytest.mark.timeout(PATIENCE_S + 20)
@pytest.mark.parametrize(
    ("kib", "command", "code", "said"),
    [
        (60_000, TUNE, 1, "the memory is at its limit: `ulimit -v` is 60000, two CPU ranks need 2000000"),
        (60_000, ["winners"], 1, "the memory is at its limit: `ulimit -v` is 60000"),
        (130_000, LOOKUP, 1, "the memory is at its limit: `ulimit -v` is 130000"),
        (100_000, ["report", "-o", "page.html"], 1, "the memory is at its limit: `ulimit -v` is 100000"),
        (600_000, TUNE, 1, "the memory is at its limit: `ulimit -v` is 600000"),
        (1_300_000, TUNE, 1, "the ranks do not start"),
        (4_000_000, LOOKUP, 0, ""),
        (400_000, ["report", "-o", "page.html"], 0, "plots are left out (the process that draws was killed by SIG"),
        (200_000, TUNE, 1, "the memory is at its limit"),
        (700_000, TUNE, 1, "the memory is at its limit|the ranks do not start"),  # what torch reserves differs by machine
    ],
)
def test_little_memory(tmp_path: Path, kib: int, command: list[str], code: int, said: str) -> None:
    with Store.open(tmp_path / "own.db") as store:
        keep_winner(store)
    backend = ["--backend", "cuda"] if command[0] == "report" else []  # that of the winner
    done = ended(tmp_path, *limited(f"-v {kib}", *MODULE, *command, *backend))
    last = "".join(done.stderr.splitlines()[-1:])
    assert done.returncode == code and any(words in last for words in said.split("|")), done
    if command[0] == "report" and code == 0:
        assert "This plot is left out: the process that draws" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("command", [TUNE, ["doctor", "--backend", "cpu"]], ids=["tune", "doctor"])
def test_a_loopback_that_is_down(tmp_path: Path, command: list[str]) -> None:
    if os.getuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare to be without a network")
    done = subprocess.run(
        ["unshare", "-n", *MODULE, *command], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "AUTOTAX_DB": str(tmp_path / "own.db")},
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert "the network interface lo is down" in (done.stdout if "doctor" in command else done.stderr.splitlines()[-1])


@pytest.mark.timeout(PATIENCE_S + 20)
@pytest.mark.parametrize("command", [TUNE, ["winners"], ["doctor", "--backend", "cpu"]], ids=["tune", "winners", "doctor"])
def test_warnings_that_are_errors(tmp_path: Path, command: list[str]) -> None:
    assert ended(tmp_path, *MODULE, *command, PYTHONWARNINGS="error").returncode == 0


GOES = "import shutil\nfrom pathlib import Path\nshutil.rmtree(Path('copy'))\n"


@pytest.mark.parametrize("command", [TUNE, ["report"], ["compare", *TUNE[1:10]]], ids=["tune", "report", "compare"])
def test_an_installation_that_goes(tmp_path: Path, command: list[str]) -> None:
    shutil.copytree(ROOT / "autotax", tmp_path / "copy" / "autotax", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "goes.py").write_text(GOES)
    # Without the finder of an editable installation, which would find the modules that go.
    alone = [sys.executable, "-S", "-m", "autotax"]
    paths = f"{tmp_path / 'copy'}{os.pathsep}{sysconfig.get_path('purelib')}"
    done = ended(tmp_path, *alone, *command, "--load", "goes.py", path=paths)
    assert done.returncode == 1 and "cannot be imported" in done.stderr and "install autotax again" in done.stderr, done


def test_an_interpreter_that_goes(tmp_path: Path) -> None:
    program = f"import sys; sys.executable = '/nowhere/python'; sys.argv[1:] = {TUNE}\nfrom autotax.cli.start import main\nexit(main())"
    done = ended(tmp_path, sys.executable, "-c", program)
    assert done.returncode == 1 and "/nowhere/python is gone, and ranks run it" in done.stderr.splitlines()[-1], done


def _caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


ERRORS: dict[str, tuple[BaseException, str | None]] = {
    "open files": (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    "open files of the machine": (OSError(errno.ENFILE, "Too many open files in system"), "close other programs"),
    "processes": (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
    "memory of the system": (OSError(errno.ENOMEM, "Cannot allocate memory"), "free memory"),
    "memory": (MemoryError(), "free memory"),
    "memory of a library": (ImportError("libtriton.so: failed to map segment from shared object"), "free memory"),
    "memory beneath another error": (_caused(RuntimeError("x"), MemoryError()), "free memory"),
    "a module": (ModuleNotFoundError("No module named 'x'", name="x"), "x cannot be imported (No module named 'x'): install"),
    "a module with much to say": (ImportError("\n".join(["first", *["x" * 500] * 9, "last", ""])), "a module cannot be imported (last)"),
    "the interpreter": (FileNotFoundError(errno.ENOENT, "No such file", sys.executable), "is gone, and ranks run it"),
    "another file": (FileNotFoundError(errno.ENOENT, "No such file", "x"), None),
    "another error": (ValueError("x"), None),
    "bad input": (UsageError("x"), None),
}


@pytest.mark.parametrize(("error", "said"), ERRORS.values(), ids=ERRORS.keys())
def test_a_limit_is_one_line_with_its_remedy(error: BaseException, said: str | None) -> None:
    line = limit_met(error)
    assert line is None if said is None else line and said in line and "\n" not in line


def test_a_chart_that_cannot_be_drawn_costs_no_other() -> None:
    renderer = Renderer()
    try:
        assert "<svg" in renderer.svg(CHART)
        with pytest.raises(Undrawn, match="Error"):
            renderer.svg({"mark": 3})
        for _ in range(MOST_LOSSES):
            assert "<svg" in renderer.svg(CHART)
            assert renderer.child
            os.kill(renderer.child.process.pid, signal.SIGKILL)
            with pytest.raises(Undrawn, match=r"^the process that draws was killed by SIGKILL$"):
                renderer.svg(CHART)
        with pytest.raises(Undrawn, match="was killed by SIGKILL"):
            renderer.svg(CHART)
        assert len(renderer.undrawn) == MOST_LOSSES + 2 and renderer.child is None
    finally:
        renderer.close()
