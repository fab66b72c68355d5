"""Child processes: a child runs a module in a separate Python with a pipe to it, and never outlives its parent."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Protocol

from autotax.core.errors import MachineError

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PARENT = "AUTOTAX_PARENT"
"""Environment variable with the process id of a child's parent."""
TAIL_BYTES = 2000
ENDING_S = 30.0
"""Timeout for a killed process to be gone."""
MESSAGE_S = 10
"""Timeout for the rest of a message; the sender may be stopped in the middle of it."""


def die_with_parent(name: str) -> None:
    """Makes the kernel kill this process when its parent dies. Also sets the name that tools like `top` show."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, name.encode())
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # the parent died before the call of prctl
        os._exit(1)


def python_of(module: str, *arguments: str) -> list[str]:
    # -P: files in the user's folder must not shadow modules of the same name.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment_with(ours: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a child. Kernels are compiled unless `ours` says otherwise, and warnings are no errors."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONWARNINGS")}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return inherited | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | dict(ours)


def _bound_reading(pipe: Connection) -> None:
    """Makes reads fail with an OSError instead of waiting for ever. A read begins only after the first bytes have arrived."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_S, 0))


class Process(Protocol):
    """The process of a child. `poll` and `wait` are those of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def end(self) -> None:
        """Kills it with all it started, without waiting until it is gone."""
        ...


class _Executed(subprocess.Popen[bytes]):
    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass
class Child:
    """A process with a pipe to it. Its output goes to a file without a name; if it dies, the error message quotes the last line
    of its present task.
    """

    process: Process
    pipe: Connection
    output: IO[bytes]
    printed: int = 0
    """Bytes of the output that belong to earlier tasks."""

    @classmethod
    def begin(cls, start: Callable[[int, int], Process]) -> Child:
        """`start(pipe, output)` begins a process that has these two file descriptors."""
        here, remote = multiprocessing.Pipe()
        _bound_reading(here)
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        with remote:
            return cls(start(remote.fileno(), output.fileno()), here, output)

    @classmethod
    def start(cls, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """`python -m module FD arguments...`, FD being its end of the pipe."""

        def execute(pipe: int, output: int) -> Process:
            return _Executed(
                python_of(module, str(pipe), *arguments),
                pass_fds=[pipe],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_with(environment),
                start_new_session=True,
            )

        return cls.begin(execute)

    def send(self, task: object) -> None:
        """Sends an idle process its next task. Raises BrokenPipeError if it has ended."""
        self.printed = os.fstat(self.output.fileno()).st_size
        self.pipe.send(task)

    def stop(self) -> None:
        """Ends it at once with all it started, without waiting until it is gone."""
        if not self.pipe.closed:  # once the pipe is closed, another process may have this process id
            self.process.end()

    def kill(self) -> None:
        """Ends it at once with all it started, and waits until it is gone. Safe to call twice. Raises MachineError if it stays,
        as a process stuck in a driver does.
        """
        self.stop()
        try:
            self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            stuck = f"process {self.process.pid} cannot be ended, it is stuck in the operating system"
            raise MachineError(f"{stuck}: restart the machine") from None
        self.pipe.close()
        self.output.close()

    def last_words(self) -> str:
        """How a process ended whose pipe has closed, and the last line that its present task printed."""
        try:
            code = self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return "fell silent without ending"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(self.printed, size - TAIL_BYTES))
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1] if lines else 'it printed nothing'}"


# Full disks. They are errors of the machine and never of the config being measured.

SIGNS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


def tells_of_full_disk(text: str | None) -> bool:
    """Whether a message says that no space is left."""
    return any(sign in (text or "") for sign in SIGNS)


def full_disk(error: BaseException) -> str | None:
    """The message about a full disk in an exception or its causes; None if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        if tells_of_full_disk(str(seen)):
            return f"{type(seen).__name__}: {seen}"
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{type(seen).__name__}: {os.strerror(seen.errno)}"
        seen = seen.__cause__ or seen.__context__
    return None


def disk_is_full(where: str, why: str) -> MachineError:
    """The error to raise for a full disk. `why` is the message of the operating system."""
    return MachineError(f"the disk is full {where} ({why}): free space and run the same command again")
