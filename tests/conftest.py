"""Which tests need the machine for themselves, and which cases are slow or volume: see the markers in pyproject.toml.

`make test` runs the others first, in four processes, long files at once; `make test-slow` runs what is slow, `make test-all` the
volume too.
AUTOTAX_TEST_PART, `2/3` for instance, leaves one part of the cases, the same ones everywhere.
"""

from __future__ import annotations

import functools
import gc
import os
import sqlite3
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import Engine, event

from autotax.operators import declaration, registry
from autotax.runner import processes
from autotax.runner.processes import environment_with
from autotax.runner.ranks import Ranks
from tests.slow import listed

# On a busy machine an example, or making one, takes any time.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
AT_ONCE_S = 30.0
"""A shorter timeout of ranks is what a test is about."""


def _patiently(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """On a busy machine ranks may take many times as long as their tests say, which only bound what never ends."""

    @functools.wraps(run)
    def patient(ranks: Ranks, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        return run(ranks, function, *args, timeout=timeout if timeout < AT_ONCE_S else 5 * timeout)

    return patient


def _with_more(preload: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """The server that forks ranks imports what tests need, too: each rank that compiles a model spent a second on it."""
    return lambda modules: preload([*modules, "tests.preloaded"])


Ranks.run = _patiently(Ranks.run)  # type: ignore[method-assign]
forkserver.set_forkserver_preload = _with_more(forkserver.set_forkserver_preload)
os.environ.pop("COLUMNS", None)  # output is as wide as its content, whatever the terminal of this run

SERVERS = pytest.StashKey[list[subprocess.Popen[bytes]]]()
HERE = Path(__file__).parent
ALONE = [
    HERE / path
    for path in (
        # clusters of many processes, which must be gone in the end
        "fleet/test_ray.py",
        "fleet/test_slurm.py",
        "gpu",  # one job at a time on the GPUs
        "nn/test_on_gpus.py",
        "test_unattended.py",  # what is left of it on the machine
    )
]
LONG = [
    HERE / path
    for path in (
        "test_end_to_end.py",
        "examples/test_outside.py",
        "kernels/test_compile.py",
        "kernels/test_scaled.py",
        "kernels/test_variants.py",
        "nn/test_conformance.py",
        "nn/test_consensus.py",
        "nn/test_gather_attention.py",
        "nn/test_tensor_checks.py",
        "engines/test_plugins.py",
        "tuner/test_tune.py",
    )
]
"""Long files, which start first: if they started last, the run would wait for one process."""
EMULATED = HERE / "amd" / "test_emulated.py"
"""Collecting its cases takes seconds in every process, so it is left out unless requested."""


def pytest_configure(config: pytest.Config) -> None:
    """Ranks on the CPU are forks of one server for the whole run, and compilers of another: imports were a third of its time.

    Collection makes much and drops little: a scan for garbage takes long and frees nothing.
    """
    gc.disable()
    if processes.SHARED not in os.environ:  # processes that share the tests out inherit it, and so do runs within a test
        os.environ[processes.SHARED] = name = f"tests-{os.getpid()}"
        environments = environment_with(processes.INTERPRETED), environment_with({})
        config.stash[SERVERS] = [processes.start(processes.address_of(name, variables), variables) for variables in environments]


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in config.stash.get(SERVERS, []):
        server.kill()
        server.wait()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if "not alone" in config.option.markexpr and collection_path in ALONE:
        return True  # collecting a thousand cases of GPUs only to leave them out takes each process a while
    return True if collection_path == EMULATED and "amd" not in config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    alone = {path: any(path.is_relative_to(place) for place in ALONE) for path in {item.path for item in items}}
    for opt_in in ("full", "amd"):
        if opt_in not in config.option.markexpr:
            items[:] = [item for item in items if not item.get_closest_marker(opt_in)]
    items.sort(key=lambda item: item.path not in LONG)
    for item in items:
        if alone[item.path]:
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))  # one after another with `-n 2 --dist loadgroup` as well
    slow = listed()
    for item in items:
        # What needs the machine for itself is few and runs in `make test`: `make test-slow` shares the machine.
        if not item.get_closest_marker("alone") and not slow.isdisjoint((item.nodeid, item.nodeid.partition("::")[0])):
            item.add_marker(pytest.mark.slow)
    sampled: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            sampled[item.nodeid.partition("[")[0]].append(item)
    for cases in sampled.values():
        for item in set(cases).difference(_covering(cases)):
            item.add_marker(pytest.mark.volume)
    if part := os.environ.get("AUTOTAX_TEST_PART"):
        mine, _, parts = part.partition("/")
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(parts) == int(mine) - 1]


def _covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """A few cases of a test that cover every value of every parameter. Not random: all processes choose the same cases."""
    values = {case: _values(case) for case in cases}
    unseen, chosen = set().union(*values.values()), []
    while unseen:
        best = max(cases, key=lambda case: len(values[case] & unseen))
        chosen.append(best)
        unseen -= values[best]
    return chosen


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    """The parameter values of a case by name, or the result of `sampled(by=...)` for them."""
    assert isinstance(case, pytest.Function)
    (marker,) = case.iter_markers("sampled")
    by: Callable[..., dict[str, Any]] = marker.kwargs.get("by", dict)
    return {(name, str(value)) for name, value in by(**case.callspec.params).items()}


def pytest_collection_finish() -> None:
    """Exempts tests and modules, which live to the end, from garbage collection: scanning them took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture
def without_syncing() -> Iterator[None]:
    """Turns off SQLite's waits for the disk, which dominate frequent commits. Only a power failure could show a difference."""

    def let_be(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", let_be)
    yield
    event.remove(Engine, "connect", let_be)


@pytest.fixture(scope="module")
def one_renderer() -> Iterator[None]:
    """One process draws the charts of all pages of a test file: starting it takes longer than drawing."""
    from autotax.report import charts  # only now: it imports what takes seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts.RENDERER, "close", lambda: None)
        yield
    charts.RENDERER.close()


@pytest.fixture(scope="module", autouse=True)
def _loads_of_a_module() -> Iterator[None]:
    """Forgets the operators and variants that a test file declared or loaded: the next file runs in the same process."""
    yield from _forgetting()


@pytest.fixture(autouse=True)
def _loads_of_a_test() -> Iterator[None]:
    """Forgets the operators and variants that a test declared or loaded: a comparison runs every registered peer."""
    yield from _forgetting()


def _forgetting() -> Iterator[None]:
    known, loaded, places = dict(registry.operators()), dict(registry.digests), list(sys.path)
    own = {name: (dict(operator.variants), dict(operator.peers)) for name, operator in known.items()}
    yield
    for name in registry.digests.keys() - loaded.keys():  # otherwise a second load would not declare it again
        sys.modules.pop(Path(name).stem if name.endswith(".py") else name, None)
    sys.path[:] = places
    declaration.declared.clear()
    declaration.declared.update(known)
    registry.digests.clear()
    registry.digests.update(loaded)
    for name, (variants, peers) in own.items():
        known[name].variants, known[name].peers = variants, peers
