"""Decodes files and rows: data from outside this process is read as a declared type, or raises Malformed.

Types are compared, not values: 32.0 is no whole number, and true is no 1. Every number and text has a bound, so that later loops,
axes and columns can handle it.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.files import as_utf8, read_once
from autotax.core.problem import Problem
from autotax.core.terminal import printable
from autotax.operators.registry import problem_from_dict

T = TypeVar("T")

LARGEST = 1e15
"""Bound for microseconds (some thirty years), and for ratios of two latencies."""
LONGEST_NAME = 200
"""Most characters of the name of a parameter, a digest or a user."""
XZ = b"\xfd7zXZ\0"
"""The first bytes of a file that xz made."""
XZ_MEMORY = 2**28
"""Bytes that unpacking may take in addition to the content. It limits headers that ask for more."""
LARGEST_FILE = 2**30
"""Bytes of a file, after decompression."""
MOST_STREAMS = 100
"""Streams of xz in a file: `cat a.xz b.xz` makes two."""

PLAIN = r"\A[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z"
"""No control characters, because terminals execute them, and nothing that is not UTF-8."""
Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME, pattern=PLAIN)]
Positive = Annotated[float, msgspec.Meta(gt=0.0, lt=LARGEST)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Small = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Sample = Annotated[float, msgspec.Meta(gt=-LARGEST, lt=LARGEST)]
"""Microseconds. A sample in place is a difference and may be negative."""
SampleLists = list[list[Sample]]


class Malformed(Exception):
    """A value is invalid; the message says why in a few words."""


class ConfigShape(msgspec.Struct, forbid_unknown_fields=True):
    """A Config as a file or a row holds it."""

    variant: Annotated[str, msgspec.Meta(max_length=64, pattern=PLAIN)]
    params: dict[Name, Integer | Name]

    @property
    def config(self) -> Config:
        return Config.of(self.variant, self.params)


def from_json(text: str | bytes, shape: type[T]) -> T:
    """A JSON text as a value of this type. Raises Malformed."""
    try:
        return msgspec.json.decode(text, type=shape)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Malformed(reason(error)) from None


def converted(values: object, shape: Any, *, attributes: bool = False) -> Any:
    """Converts plain values, or with `attributes` the attributes of an object, to this type. Raises Malformed."""
    try:
        return msgspec.convert(values, shape, from_attributes=attributes)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Malformed(reason(error)) from None


def problem_of(values: object) -> Problem:
    """The inverse of `Problem.to_dict`. Raises Malformed."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if type(value) is int and (bits := value.bit_length()) > 63:  # Python refuses to print the largest
            raise Malformed(f"{printable(str(name))[:LONGEST_NAME]} is a number of {bits} bits; at most 63 are allowed")
    try:
        return problem_from_dict(converted(values, dict[Name, int | float | bool | Name]))
    except UsageError as error:
        raise Malformed(reason(error)) from None


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


def reason(error: Exception) -> str:
    """The error message for people: on one line, without control characters."""
    message = " ".join(printable(str(error)).replace("`", "").split())
    first = message[:1] if message[1:2].isupper() else message[:1].lower()  # as JSON
    return "it is nested too deep" if isinstance(error, RecursionError) else first + message[1:300]
