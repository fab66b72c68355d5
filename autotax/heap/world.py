"""World, the ranks of one job: the index of this rank, the number of ranks, and the collectives on small values."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autotax.core.errors import UsageError
from autotax.heap.barrier import Barrier
from autotax.heap.exchange import gather
from autotax.heap.peer_check import require_own_peers, sockets

T = TypeVar("T")
CONTROL_TIMEOUT = timedelta(seconds=120)


def reason_of(error: Exception | None) -> str | None:
    """The message of an error in the form that ranks exchange; None without an error."""
    if error is None:
        return None
    return (str(error) or type(error).__name__).encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class World:
    """One rank's view of its group. `control` (gloo) carries decisions, `data` (NCCL, RCCL or gloo) carries tensors."""

    rank: int
    size: int
    backend: str
    device: torch.device
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    _barrier: Barrier | None = field(repr=False, compare=False)

    @classmethod
    def join(cls, store: dist.Store, rank: int, size: int, backend: str) -> World:
        """Initialises torch.distributed in this process. Collective over the `size` processes of this host that share `store`.

        A store serves one group of processes only, because keys of a former group would mislead the next.

        Raises:
            MachineError: another user got into a connection of the group.
        """
        before = sockets()
        on_gpu = backend != "cpu"
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=CONTROL_TIMEOUT,
            device_id=device if on_gpu else None,
        )
        data = dist.group.WORLD
        assert data is not None
        # Control has a separate group, on CPU ranks too: a rank that left a collective half-way must still be able to report it.
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        require_own_peers(sockets() - before)
        return cls(rank, size, backend, device, data, control, Barrier(store, rank, size))

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> World:
        """The ranks of a group that exists already (None: all ranks), with tensors on `device`. Not collective.

        Decisions use the given group. torch names a new group by the number of groups that each rank has, which may differ
        between ranks. Raises UsageError if the group cannot be used.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("torch.distributed is not initialised; a group of ranks needs it: call init_process_group first")
        data = dist.group.WORLD if group is None else group
        rank = dist.get_rank(data)
        if rank < 0 or data is None:
            raise UsageError("this rank is not in the group; it must be one of its ranks: make the module on these only")
        backend = "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
        return cls(rank, dist.get_world_size(data), backend, device, data, data, None)

    def gather(self, value: T, kind: type[T] | Any) -> list[T]:
        """Every rank's value, in rank order, on every rank. Collective.

        Args:
            value: the value of this rank: numbers, texts, lists, tuples, dicts, dataclasses.
            kind: its type, as annotations write it. The values of the peers are decoded as this type, never unpickled.

        Raises:
            MachineError: on all ranks alike; a value is too large or not of its type.
        """
        # Groups that take CPU tensors do not use the device. NCCL takes tensors on the current device.
        device = torch.device("cpu") if torch.device("cpu") in self.control._device_types else self.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return gather(value, kind, self.control, device)

    def barrier(self, timeout: timedelta = CONTROL_TIMEOUT) -> None:
        """Returns when every rank has called it; raises RankTimeout naming the missing ranks.

        In a World made by `of` the group's own timeout holds instead.
        """
        if self._barrier is None:
            self.gather(None, None)
        else:
            self._barrier.wait(timeout)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
