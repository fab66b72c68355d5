"""Kernel sources as if somebody had edited them, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from autotax import hardware, sources

_CACHED = (sources.kernel_digest, sources.variant_digest, sources._modules, sources._imports, hardware.environment)


@contextmanager
def edited(path: str, text: bytes = b"# another line\n") -> Iterator[None]:
    """The sources with more text in one (`kernels/flash_decode/bsp.py`), as a process sees them that starts after the edit."""
    before = sources._texts()
    try:
        with mock.patch.object(sources, "_texts", lambda: before | {path: before.get(path, b"") + text}):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    for cached in _CACHED:
        cached.cache_clear()
