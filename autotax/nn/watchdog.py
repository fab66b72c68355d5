"""Looking out for ranks that are gone: a kernel that waited for one in vain says so, and the next calls raise.

Kernels leave a note in their control blocks. A call cannot wait for the device to read it. So about once a second one call
enqueues a copy of the notes to the host behind its predecessors, and a later one reads what has arrived by then. A thread
asks for it by `_guards`, and calls in between pay nothing. On CPU ranks, where a call is over when it returns, each one reads.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import torch

from autotax.core.errors import MachineError, UsageError
from autotax.nn.groups import capturing

if TYPE_CHECKING:
    from autotax.nn.base import Module

VARIABLE = "AUTOTAX_WAIT_S"
USUAL_WAIT_S = 600.0
"""As long as NCCL waits: a rank of a model may come late, for instance while it loads or compiles."""
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 2400.0
"""A kernel counts its polls in 31 bits."""
LOOK_S = 1.0
NOTE = slice(4, 9)
"""Where a control block has its note; its first word is not zero once a wait has given up."""

_lock = threading.Lock()
_watched: WeakSet[Lookout] = WeakSet()
_thread: threading.Thread | None = None


def wait_s() -> float:
    """How long a kernel waits for another rank: $AUTOTAX_WAIT_S, or ten minutes. Raises UsageError."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text.strip() else USUAL_WAIT_S
    except ValueError:
        seconds = math.nan
    if not LEAST_WAIT_S <= seconds <= MOST_WAIT_S:
        raise UsageError(
            f"{VARIABLE} is {text!r}; it must be a number of seconds from {LEAST_WAIT_S:g} to {MOST_WAIT_S:g}: "
            "set another, or none"
        )
    return seconds


class Lookout:
    """The notes of one module's kernels, as the host last saw them."""

    def __init__(self, module: Module) -> None:
        self._module = ref(module)
        operators = module._prepared.operators if module._prepared else []
        self._controls = [operator.control for operator in operators if operator]
        self._broken: str | None = None
        on_gpu = any(control.is_cuda for control in self._controls)
        self._seen = torch.zeros(len(self._controls), 5, dtype=torch.int32, pin_memory=on_gpu) if on_gpu else None
        if self._controls and not on_gpu:
            self.ask()
        elif self._controls:
            _watch(self)

    def ask(self) -> None:
        """Has the next call look."""
        if module := self._module():
            calls, index, _ = module._guards
            vars(module)["_guards"] = calls, index, True

    def look(self) -> None:
        """Raises MachineError once a rank was waited for in vain. Does not wait for the device before that."""
        module = self._module()
        if module is None or capturing(module._device):
            return
        if self._broken is None and self._seen is None:
            self._broken = module.failure()
        elif self._broken is None and self._seen is not None:
            calls, index, _ = module._guards
            vars(module)["_guards"] = calls, index, module._check
            if self._seen[:, 0].any():
                self._broken = module.failure()
            else:
                for seen, control in zip(self._seen, self._controls, strict=True):
                    seen.copy_(control[NOTE], non_blocking=True)
        if self._broken is not None:
            self.ask()
            raise MachineError(
                f"{self._broken}: that rank is gone, or came later than {VARIABLE}={wait_s():g} allows, and results since are "
                "wrong: end this program on all ranks and start it again"
            )


def _watch(lookout: Lookout) -> None:
    """Has a call of this module look about once a second."""
    global _thread
    with _lock:
        _watched.add(lookout)
        if _thread is None or not _thread.is_alive():  # a fork has no threads
            _thread = threading.Thread(target=_ask_all, name="autotax lookout", daemon=True)
            _thread.start()


def _ask_all() -> None:
    while True:
        time.sleep(LOOK_S)
        with _lock:
            watched = list(_watched)
        for lookout in watched:
            lookout.ask()
        del watched
