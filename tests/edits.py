"""Makes this process see edited kernel sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from autotax import digests, software
from autotax.operators import registry

Edit = Callable[[str], str]

_CACHED = (
    digests.kernel_digest, registry.variant_digest, digests.symbol_digest, digests._source, digests._spelled_symbol,
    software.environment,
)  # fmt: skip


def another_line(text: str) -> str:
    """Adds a statement that any definition of the module depends on."""
    return f"{text}\nassert True\n"


@contextmanager
def edited(path: str, edit: Edit = another_line) -> Iterator[None]:
    """Within the context one source is edited (`kernels/flash_decode/bsp.py`; `*`: all), as for a process that starts then."""
    read = digests._read

    def after(file: Path) -> bytes:
        text = read(file)
        return edit(text.decode()).encode() if path == "*" or file.as_posix().endswith(f"/autotax/{path}") else text

    try:
        with mock.patch.object(digests, "_read", after):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    for cached in _CACHED:
        cached.cache_clear()
