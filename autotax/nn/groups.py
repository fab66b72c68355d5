"""State that all modules of one group share in this process, and the watch for lost ranks.

Ranks meet in the order of their calls, so a rank enqueues the calls of a group one after the other. Any thread may call, as long
as the program keeps the calls of its threads apart, by a lock or by waiting. A call that begins within another's is refused.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

import torch
import torch.distributed as dist

from autotax.core.errors import MachineError, UsageError

_lock = threading.Lock()


class GroupCalls:
    """The calls of one group's modules, as a context: within it this thread enqueues a call.

    The fastest calls repeat the statements of the context inline, which costs 0.05 us instead of 0.2. Python changes threads only
    at calls and jumps: nothing comes between the test of `thread` and its assignment.
    """

    __slots__ = ("__weakref__", "modules", "thread")

    def __init__(self) -> None:
        self.thread = 0
        """Identifies the thread whose call is running; 0 between calls."""
        self.modules = 0
        """Number of modules prepared so far. The next module takes it as its number, which is the same on all ranks."""

    @staticmethod
    def of(group: dist.ProcessGroup) -> GroupCalls:
        with _lock:
            return _calls.setdefault(group, GroupCalls())

    def __enter__(self) -> None:
        here = get_ident()
        if self.thread and self.thread != here:
            raise self.overlap()
        self.thread = here

    def __exit__(self, *_: object) -> None:
        self.thread = 0

    def overlap(self) -> UsageError:
        """The error for a call of this thread during another thread's call."""
        busy = self.thread
        other = next((thread.name for thread in threading.enumerate() if thread.ident == busy), "that has ended since")
        return UsageError(
            f"thread {threading.current_thread().name!r} calls a module of a group within a call of thread {other!r}; ranks meet "
            "in the order of their calls, so calls must not overlap: hold one lock around the calls of all threads"
        )


_calls: WeakKeyDictionary[dist.ProcessGroup, GroupCalls] = WeakKeyDictionary()

current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of this thread's current GPU. torch.cuda.current_device would ask each time whether CUDA is initialised."""


_here = nullcontext()


def on_device(index: int | None) -> AbstractContextManager[object]:
    """Makes a GPU the current one: kernels start on the thread's current device and its current stream."""
    return _here if index is None or current_device() == index else torch.cuda.device(index)


def capturing(device: torch.device) -> bool:
    """Whether the current stream captures a graph. The host cannot wait for the device during a capture."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Lost ranks: after a kernel's wait for a rank has timed out, calls of its module raise MachineError. A kernel that gives up
# leaves a note in its control block. A call must not wait for the device to read it. So about once a second a thread requests a
# look: the next call enqueues a copy of the notes to the host, and a later look reads the copy. Calls in between pay nothing. On
# CPU ranks a call has ended when it returns, so each call reads the notes in place.

VARIABLE = "AUTOTAX_WAIT_S"
DEFAULT_WAIT_S = 600.0
"""NCCL's default, in seconds. A rank of a model may be late, for instance while it loads or compiles."""
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 600.0
"""See prepare.MOST_POLLS."""
LOOK_S = 1.0
NOTE = slice(4, 9)
"""The words of a control block that hold the note; the first is not zero once a wait has given up."""

_watched: WeakSet[Watchdog] = WeakSet()
_thread: threading.Thread | None = None


def wait_s() -> float:
    """How long a kernel waits for another rank: $AUTOTAX_WAIT_S, or ten minutes. Raises UsageError."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text.strip() else DEFAULT_WAIT_S
    except ValueError:
        seconds = math.nan
    if not LEAST_WAIT_S <= seconds <= MOST_WAIT_S:
        raise UsageError(
            f"{VARIABLE} is {text!r}; it must be a number of seconds from {LEAST_WAIT_S:g} to {MOST_WAIT_S:g}: "
            "set another, or none"
        )
    return seconds


class Watchdog:
    """The error notes of one module's kernels, as of the last look of the host.

    The callbacks are bound methods and held weakly, so that a watchdog keeps no module alive.

    Args:
        controls: control blocks of the module's kernels, int32, all on one device.
        failure: says which wait for a rank timed out, or None; waits for the device.
        request: sets whether the next call looks at the notes.
    """

    def __init__(
        self, controls: Sequence[torch.Tensor], failure: Callable[[], str | None], request: Callable[[bool], None]
    ) -> None:
        self._controls = controls
        self._failure, self._request = WeakMethod(failure), WeakMethod(request)
        self._broken: str | None = None
        on_gpu = any(control.is_cuda for control in controls)
        self.copies = torch.zeros(len(controls), 5, dtype=torch.int32, pin_memory=True) if on_gpu else None
        """The notes on the host, [kernels, 5]; None on CPU ranks, where they are read in place."""
        if controls and not on_gpu:
            self.request_look()
        elif controls:
            watch(self)

    def request_look(self, due: bool = True) -> None:
        """Sets whether the next call looks at the notes."""
        if request := self._request():
            request(due)

    def look(self) -> None:
        """Raises MachineError if a wait for a rank timed out. Only then does it wait for the device."""
        failure = self._failure()
        if failure is None:
            return
        if self._broken is None and self.copies is None:
            self._broken = failure()
        elif self._broken is None and self.copies is not None:
            self.request_look(False)
            if self.copies[:, 0].any():
                self._broken = failure()
            else:
                for copy, control in zip(self.copies, self._controls, strict=True):
                    copy.copy_(control[NOTE], non_blocking=True)
        if self._broken is not None:
            self.request_look()
            raise MachineError(
                f"{self._broken}: that rank is gone, or came later than {VARIABLE}={wait_s():g} allows, and results since are "
                "wrong: end this program on all ranks and start it again"
            )


def watch(watchdog: Watchdog) -> None:
    """Requests a look from the watchdog's module about once a second."""
    global _thread
    with _lock:
        _watched.add(watchdog)
        if _thread is None or not _thread.is_alive():  # a forked process has no threads
            _thread = threading.Thread(target=_request_looks, name="autotax watchdog", daemon=True)
            _thread.start()


def _request_looks() -> None:
    while True:
        time.sleep(LOOK_S)
        with _lock:
            watched = list(_watched)
        for watchdog in watched:
            watchdog.request_look()
        del watched
