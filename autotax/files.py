"""Files that a command is asked to write: whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from autotax.errors import UsageError


def write_whole(path: Path, text: str) -> None:
    """Writes a text, or leaves what was there. Raises UsageError where nothing can be written."""
    if not path.name:
        raise UsageError(f"file {path} cannot be written (it is a folder): give another --output")
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.rename(path)
    except OSError as error:
        with suppress(OSError):  # where it could not be made it cannot be removed either
            unfinished.unlink()
        raise UsageError(f"file {path} cannot be written ({error.strerror}): give another --output") from None
