"""Files that a command reads, once if they are pipes; and those that it writes, whole or not at all."""

from __future__ import annotations

import codecs
import errno
import gzip
import lzma
import os
import select
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

from autotax.core.decoding import Malformed, reason
from autotax.core.errors import MachineError, UsageError

_ELSEWHERE = "give another path"
_MACHINE = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space of your quota",
    errno.EIO: "see that its disk works",
}
"""Disk errors that do not depend on the given path, each with its remedy."""


_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # that of UTF-32 begins with this one
SILENT_S = 60
"""Longest silence of a pipe that is read."""
_streams: dict[tuple[int, int], bytes] = {}
"""Bytes read from pipes and devices, by device number and inode. A command checks a file before it uses it."""


def read_once(path: Path, limit: int) -> bytes:
    """The first `limit + 1` bytes of a file. A pipe delivers them once, so later calls return the same. Raises OSError."""
    about = path.stat()
    if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
        with path.open("rb") as file:
            return file.read(limit + 1)
    identity = about.st_dev, about.st_ino
    if identity not in _streams:
        _streams[identity] = _of_stream(path, limit)
    return _streams[identity]


def _of_stream(path: Path, limit: int) -> bytes:
    """The first bytes of a pipe or device. Raises TimeoutError if nothing comes for SILENT_S seconds."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody has opened to write must not block
    with os.fdopen(handle, "rb", buffering=0) as file:
        parts, left = [], limit + 1
        poller = select.poll()
        poller.register(file, select.POLLIN)
        while left:
            if not poller.poll(1000 * SILENT_S):
                raise TimeoutError(errno.ETIMEDOUT, f"nobody writes to it within {SILENT_S} s")
            part = file.read(left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


def as_utf8(text: bytes) -> bytes:
    """A text in UTF-8 without a byte order mark, which editors and shells put first. Raises UnicodeError."""
    for mark, encoding in _MARKS.items():
        if text.startswith(mark):
            return text.decode(encoding).removeprefix("\ufeff").encode()
    return text


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file completely, or leaves the old file as it was. A replaced file keeps its mode. Raises UsageError if the path
    cannot be written, or if it is no regular file: links, devices, pipes and folders are never replaced. Raises MachineError if
    the disk fails or is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    unfinished: str | None = None
    try:
        mode = _mode(path)
        # The temporary file is new and its name cannot be guessed, so it cannot be a link planted by another user.
        handle, unfinished = tempfile.mkstemp(prefix=f".{_shortened(path.name)}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
        Path(unfinished).rename(path)
    except OSError as error:
        if unfinished:
            with suppress(OSError):
                Path(unfinished).unlink()
        raise _refusal(path, error) from None


def _shortened(name: str) -> str:
    """The beginning of a name. File systems limit its bytes, not its letters."""
    return os.fsencode(name)[:100].decode(errors="ignore")


def _refusal(path: Path, error: OSError) -> UsageError | MachineError:
    message = f"file {path} cannot be written ({error.strerror})"
    if error.errno in _MACHINE:
        return MachineError(f"{message}: {_MACHINE[error.errno]}, or {_ELSEWHERE}")
    return UsageError(f"{message}: {_ELSEWHERE}")


def _mode(path: Path) -> int:
    """The mode of the existing file, or of a new one."""
    if not path.name:
        raise UsageError(f"file {path} cannot be written (it is a folder): {_ELSEWHERE}")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}
        description = kinds.get(stat.S_IFMT(mode), "no regular file")
        raise UsageError(f"file {path} cannot be written (it is {description}): {_ELSEWHERE}")
    return stat.S_IMODE(mode)


def refuse_unwritable(path: Path) -> None:
    """Raises the errors of `write_whole` early, because the write itself may come much later."""
    try:
        _mode(path)
        Path(tempfile.mkdtemp(prefix=".autotax-", dir=path.parent)).rmdir()
    except OSError as error:
        raise _refusal(path, error) from None


@contextmanager
def a_home() -> Iterator[None]:
    """Gives a user without a home directory an empty one of mode 0700. Some libraries ask for a home when they are imported.

    The shared temporary folder would be unsafe: other users could plant files that such a library reads.
    """
    try:
        Path.home()
    except RuntimeError:
        with tempfile.TemporaryDirectory(prefix="autotax-home-") as home:
            os.environ["HOME"] = home
            try:
                yield
            finally:
                del os.environ["HOME"]
    else:
        yield


XZ = b"\xfd7zXZ\0"
"""The first bytes of a file that xz made."""
XZ_MEMORY = 2**28
"""Bytes that unpacking may take in addition to the content. It limits headers that ask for more."""
LARGEST_FILE = 2**30
"""Bytes of a file, after decompression."""
MOST_STREAMS = 100
"""Streams of xz in a file: `cat a.xz b.xz` makes two."""

def read_bytes(path: Path) -> bytes:
    """The text of a file in UTF-8, which may be compressed by gzip or xz. Raises OSError or Malformed."""
    data = read_once(path, LARGEST_FILE)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.GzipFile(fileobj=BytesIO(data)).read(LARGEST_FILE + 1)
        except EOFError:
            raise Malformed("it is compressed, but not whole") from None
        except gzip.BadGzipFile as error:
            junk = str(error).startswith("Not a gzipped file")
            raise Malformed(f"it is compressed, but {'something else follows' if junk else 'damaged'}") from None
        except zlib.error:
            raise Malformed("it is compressed, but damaged") from None
    elif data.startswith(XZ):
        data = _unpacked(data)
    if len(data) > LARGEST_FILE:
        raise Malformed(f"it holds more than {LARGEST_FILE >> 20} MiB")
    try:
        return as_utf8(data)
    except UnicodeError as error:
        raise Malformed(reason(error)) from None


def _unpacked(data: bytes) -> bytes:
    """The content of all streams of xz, cut after `LARGEST_FILE` bytes. Raises Malformed."""
    content = b""
    for _ in range(MOST_STREAMS):
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
        try:
            content += unpacker.decompress(data, LARGEST_FILE + 1 - len(content))
        except lzma.LZMAError as error:
            raise Malformed(f"it is compressed, but {error}") from None
        if len(content) > LARGEST_FILE:
            return content
        if not unpacker.eof:
            raise Malformed("it is compressed, but not whole")
        data = unpacker.unused_data.lstrip(b"\0")  # zeros may stand between streams
        if not data:
            return content
        if not data.startswith(XZ):
            raise Malformed("it is compressed, but something else follows")
    raise Malformed(f"it is compressed in more than {MOST_STREAMS} streams")
