"""Publishes the counts of a server's process, so that `autotax status` can show which calls tuned kernels ran.

A thread writes them to a file of this user every EVERY_S seconds, if they have changed. The log of the process gets one line at
the first call that a tuned kernel ran, and one if there was none for QUIET_S.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

from autotax.core.errors import UsageError
from autotax.core.files import Malformed, from_json, read_bytes, write_whole

EVERY_S = 5.0
QUIET_S = 300.0
CAPTURED = "a call in a captured graph counts once, when it is captured"
_lock = threading.Lock()
_publishing = False


class Counted(msgspec.Struct):
    """Calls of one kind, as in autotax.torch.status."""

    operator: str
    call: str
    runs: str
    reason: str
    calls: int


class Published(msgspec.Struct):
    """The counts of one process."""

    pid: int
    framework: str
    taken: int
    left: int
    calls: list[Counted]


def folder() -> Path:
    """The folder of this user's files."""
    return user_cache_path("autotax") / "status"


def publish(framework: str, log: logging.Logger) -> None:
    """Begins to publish the counts of this process, once. Never raises: a process without a folder to write to goes on."""
    global _publishing
    with _lock:
        if _publishing:
            return
        _publishing = True
    path = folder() / f"{os.getpid()}.json"
    atexit.register(path.unlink, missing_ok=True)
    threading.Thread(target=_keep, args=(framework, path, log), name="autotax-status", daemon=True).start()


def _keep(framework: str, path: Path, log: logging.Logger) -> None:
    began, said, before = time.monotonic(), False, ""
    while True:
        with suppress(UsageError, RuntimeError, OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            now = counts(framework)
            if (text := json.dumps(msgspec.to_builtins(now))) != before:
                write_whole(path, text)
                before = text
            if not said and (now.taken or time.monotonic() - began > QUIET_S):
                said = True
                # A warning, because servers show no other lines of loggers that are not theirs.
                log.warning("autotax: %s; `autotax status %d` counts on", summary(now), os.getpid())
        time.sleep(EVERY_S)


def counts(framework: str) -> Published:
    """The counts of this process now."""
    from autotax.torch.status import status

    now = status()
    calls = [Counted(call.operator, call.call, call.runs, call.reason, call.calls) for call in now.calls]
    return Published(os.getpid(), framework, now.taken, now.left, calls)


def summary(counted: Published) -> str:
    """`12 calls of vLLM ran tuned kernels, 3 were left to it`, or why there are none."""
    whole = counted.taken + counted.left
    if not whole:
        return f"0 calls: {counted.framework} emitted no fused operator, so nothing is taken"
    return f"{counted.taken} of {whole} calls of {counted.framework} ran tuned kernels"


def published(pid: int | None = None) -> list[Published]:
    """The counts of a process, or of all processes of this user that still run. Raises UsageError for a damaged file."""
    servers = []
    for path in sorted(folder().glob("*.json")) if pid is None else [folder() / f"{pid}.json"]:
        if path.stem.isdecimal() and Path(f"/proc/{path.stem}").exists():
            try:
                servers.append(from_json(read_bytes(path), Published))
            except FileNotFoundError:
                continue
            except (OSError, Malformed) as error:
                raise UsageError(f"file {path} holds no counts ({error}): remove it") from None
    return servers
