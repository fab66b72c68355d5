"""A full disk, wherever it shows: it is the machine's fault, never that of the config that was at work."""

from __future__ import annotations

import errno
import os

from autotax.core.errors import MachineError

SIGNS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


def tells_of_full_disk(text: str | None) -> bool:
    """Whether a message says that no space is left."""
    return any(sign in (text or "") for sign in SIGNS)


def full_disk(error: BaseException) -> str | None:
    """What says that no space is left, in an exception or in one that led to it; None if nothing does."""
    seen: BaseException | None = error
    while seen is not None:
        if tells_of_full_disk(str(seen)):
            return f"{type(seen).__name__}: {seen}"
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{type(seen).__name__}: {os.strerror(seen.errno)}"
        seen = seen.__cause__ or seen.__context__
    return None


def disk_is_full(where: str, why: str) -> MachineError:
    """What to raise then, `why` being what the operating system said."""
    return MachineError(f"the disk is full {where} ({why}): free space and run the same command again")
