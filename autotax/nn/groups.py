"""State that all modules of one group share in this process: the thread whose call is running, and the number of modules.

Ranks meet in the order of their calls, so a rank enqueues the calls of a group one after the other. Any thread may call, as long
as the program keeps the calls of its threads apart, by a lock or by waiting. A call that begins within another's is refused.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autotax.core.errors import UsageError

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
