"""Files that a command is asked to write: whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotax.core.errors import MachineError, UsageError

_ELSEWHERE = "give another path"
_MACHINE = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space of your quota",
    errno.EIO: "see that its disk works",
}
"""What is no fault of the name that was given, and what to do."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, or leaves what was there; a file that is replaced keeps its mode. Raises UsageError where nothing can be
    written, and for what is no regular file: a link, a device, a pipe or a folder is never replaced. Raises MachineError where
    the disk fails or is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    unfinished: str | None = None
    try:
        mode = _mode(path)
        # A name that nobody can guess, and a file that was not there: else it might be a link that somebody laid out.
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
        Path(unfinished).rename(path)
    except OSError as error:
        if unfinished:
            with suppress(OSError):
                Path(unfinished).unlink()
        raise _refusal(path, error) from None


def _refusal(path: Path, error: OSError) -> UsageError | MachineError:
    said = f"file {path} cannot be written ({error.strerror})"
    if error.errno in _MACHINE:
        return MachineError(f"{said}: {_MACHINE[error.errno]}, or {_ELSEWHERE}")
    return UsageError(f"{said}: {_ELSEWHERE}")


def _mode(path: Path) -> int:
    """The mode of the existing file, or of a new one."""
    if not path.name:
        raise UsageError(f"file {path} cannot be written (it is a folder): {_ELSEWHERE}")
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    if not stat.S_ISREG(found):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}
        told = kinds.get(stat.S_IFMT(found), "no regular file")
        raise UsageError(f"file {path} cannot be written (it is {told}): {_ELSEWHERE}")
    return stat.S_IMODE(found)


def refuse_unwritable(path: Path) -> None:
    """Raises as `write_whole` would, which may come to the file much later."""
    try:
        _mode(path)
        Path(tempfile.mkdtemp(prefix=".autotax-", dir=path.parent)).rmdir()
    except OSError as error:
        raise _refusal(path, error) from None


@contextmanager
def a_home() -> Iterator[None]:
    """Gives a user without a home directory an empty one for a while. Some libraries ask for a home when they are imported.

    The folder is new and of mode 0700: in the shared folder of temporary files another user may lay out what they would read.
    """
    try:
        Path.home()
    except RuntimeError:
        with tempfile.TemporaryDirectory(prefix="autotax-home-") as folder:
            os.environ["HOME"] = folder
            try:
                yield
            finally:
                del os.environ["HOME"]
    else:
        yield
