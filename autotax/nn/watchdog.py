"""Watches for lost ranks: after a kernel's wait for a rank has timed out, calls of its module raise MachineError.

A kernel that gives up leaves a note in its control block. A call must not wait for the device to read it. So about once a second
a thread requests a look: the next call enqueues a copy of the notes to the host, and a later look reads the copy. Calls in
between pay nothing. On CPU ranks a call has ended when it returns, so each call reads the notes in place.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakMethod, WeakSet

import torch

from autotax.core.errors import MachineError, UsageError

VARIABLE = "AUTOTAX_WAIT_S"
DEFAULT_WAIT_S = 600.0
"""NCCL's default, in seconds. A rank of a model may be late, for instance while it loads or compiles."""
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 600.0
"""See prepare.MOST_POLLS."""
LOOK_S = 1.0
NOTE = slice(4, 9)
"""The words of a control block that hold the note; the first is not zero once a wait has given up."""

_lock = threading.Lock()
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
