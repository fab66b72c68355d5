"""What all modules of one group share in this process: the thread that calls them, and how many there are.

Ranks meet in the order of their calls. Two threads of one rank cannot keep an order that the other ranks share, so calls of
a group come from one thread. Asking for it costs less than 0.1 us a call.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autotax.errors import UsageError

_lock = threading.Lock()


class GroupCalls:
    """The calls of one group's modules."""

    def __init__(self) -> None:
        self.thread = 0
        """Identifies the thread whose calls are taken; 0 before the first one."""
        self.modules = 0
        """Modules prepared so far: the next one's number, the same on all ranks."""

    @staticmethod
    def of(group: dist.ProcessGroup) -> GroupCalls:
        with _lock:
            return _calls.setdefault(group, GroupCalls())

    def require_this_thread(self) -> None:
        """Raises UsageError while the calls that are taken come from another thread, which has not ended.

        Autograd may run a backward on a thread of its own while the caller waits: its calls keep the caller's order.
        """
        if self.thread in (0, get_ident()) or torch._C._current_graph_task_id() != -1:
            return
        here = threading.current_thread()
        other = next((thread for thread in threading.enumerate() if thread.ident == self.thread), None)
        if other is not None:
            raise UsageError(
                f"thread {here.name!r} uses a module of a group whose calls come from thread {other.name!r}; two threads cannot "
                "keep the order of calls that all ranks must share: call from one thread, or, after the last call of the other "
                "one, use_from_this_thread()"
            )

    def claim(self) -> None:
        """Takes calls from this thread from now on. Raises UsageError where `require_this_thread` does."""
        with _lock:
            self.require_this_thread()
            if torch._C._current_graph_task_id() == -1:
                self.thread = get_ident()

    def take_over(self) -> None:
        """Makes this thread the one whose calls are taken, whichever was."""
        threading.current_thread()  # registers a thread that Python did not start
        with _lock:
            self.thread = get_ident()


_calls: WeakKeyDictionary[dist.ProcessGroup, GroupCalls] = WeakKeyDictionary()

current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of this thread's current GPU. torch.cuda.current_device would ask each time whether CUDA is initialised."""


_here = nullcontext()


def on_device(index: int | None) -> AbstractContextManager[object]:
    """Makes a GPU the current one: kernels start on the thread's current device and its current stream."""
    return _here if index is None or current_device() == index else torch.cuda.device(index)


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a graph, in which nothing can be waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
