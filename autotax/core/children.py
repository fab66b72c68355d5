"""A child process gets a path for its imports from its parent, and ends with it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def import_path() -> str:
    """The import path of this process as PYTHONPATH of a child. Relative entries but the current folder are left out: finders use
    names as marks, and a stranger may make such a folder where a program runs.
    """
    entries = (str(Path.cwd()) if entry == "" else entry for entry in sys.path)
    return os.pathsep.join(entry for entry in entries if Path(entry).is_absolute() and os.pathsep not in entry)


def end_with_parent(number: int) -> None:
    """Lets the kernel send this signal when the parent of this process dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
