"""Values that others wrote: their types, and how JSON and plain values become them. Invalid values raise Malformed."""

from __future__ import annotations

import os
from threading import Lock
from typing import Annotated, Any, TypeVar, cast

import msgspec

from autotax.core.config import Config
from autotax.core.terminal import printable

T = TypeVar("T")

LARGEST = 1e15
"""Bound for microseconds (some thirty years), and for ratios of two latencies."""
LONGEST_NAME = 200
"""Most characters of the name of a parameter, a digest or a user."""
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
        return msgspec.json.decode(text, type=cast(type[T], readable(shape)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Malformed(reason(error)) from None


def converted(values: object, shape: Any, *, attributes: bool = False) -> Any:
    """Converts plain values, or with `attributes` the attributes of an object, to this type. Raises Malformed."""
    try:
        return msgspec.convert(values, readable(shape), from_attributes=attributes)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Malformed(reason(error)) from None


def reason(error: Exception) -> str:
    """The error message for people: on one line, without control characters."""
    message = " ".join(printable(str(error)).replace("`", "").split())
    first = message[:1] if message[1:2].isupper() else message[:1].lower()  # as JSON
    return "it is nested too deep" if isinstance(error, RecursionError) else first + message[1:300]


_reading = Lock()
_read: set[Any] = set()


def readable(shape: Any) -> Any:
    """The same type, once msgspec has read its annotations. Two threads that decode a type first, at once, crash the process
    (msgspec 0.22), so one of them reads it for all.
    """
    if shape not in _read:
        with _reading:
            msgspec.msgpack.Decoder(shape)
            _read.add(shape)
    return shape


def _renew() -> None:
    global _reading
    _reading = Lock()


os.register_at_fork(after_in_child=_renew)  # a thread that is not in the child may hold the other one
