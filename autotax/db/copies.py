"""COPIES of a SQLite database, whole and consistent whoever is writing to it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from itertools import count
from pathlib import Path

from autotax.db import sqlite
from autotax.db.trouble import Unusable


def beside(path: Path, version: int) -> Path:
    """A copy in the same folder, `NAME.v1.bak` of a database of schema version 1; no copy replaces an earlier one."""
    names = (f"{path.name}.v{version}{'' if number == 1 else f'.{number}'}.bak" for number in count(1))
    copy = next(free for name in names if not (free := path.with_name(name)).exists())
    unfinished = copy.with_name(copy.name + ".part")
    try:
        unfinished.write_bytes(b"")
        shutil.copymode(path, unfinished)
        with closing(sqlite3.connect(unfinished)) as target:
            _copy(path, target)
        unfinished.rename(copy)
    except OSError as error:
        raise Unusable(f"cannot be upgraded, for there can be no copy beside it ({error.strerror})") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return copy


def in_memory(path: Path) -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _copy(path, memory)
    return memory


def _copy(path: Path, target: sqlite3.Connection) -> None:
    with closing(sqlite.connect(path, writes=False)) as source:
        source.backup(target)
