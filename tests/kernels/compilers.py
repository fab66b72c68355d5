"""Processes that compile for GPUs that are not here.

Their output stays in a Triton cache below `.pytest_cache`, keyed by sources, options and compiler. So a later run compiles only
edited kernels. A fresh clone has an empty cache, and `make clean` deletes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "triton"


@contextmanager
def compilers(workers: int = 2) -> Iterator[ProcessPoolExecutor]:
    """A pool of them. The compiler may end its process on a fatal error, so it never runs in ours."""
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as pool:
        yield pool
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    os.environ["TRITON_CACHE_DIR"] = str(CACHE)
