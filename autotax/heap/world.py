"""The ranks of one job as the rest of the package sees them: who am I, how many are we, how do we agree."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autotax.errors import UsageError
from autotax.heap.barrier import Barrier

CONTROL_TIMEOUT = timedelta(seconds=120)


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
        """Initialises torch.distributed in this process. Collective over the `size` processes that share `store`.

        A store serves one group of processes: what it remembers of a former one would mislead the next.
        """
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
        # A group of its own, on CPU ranks too: a rank that left a collective half-way must still be able to say so.
        control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        return cls(rank, size, backend, device, data, control, Barrier(store, rank, size))

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> World:
        """The ranks of a group that exists already (None: all ranks), with tensors on `device`. Not collective.

        Decisions go through the group itself: a group of our own would have to be made by ranks that are in other groups
        too, under a name that torch derives from how many groups each rank has. Raises UsageError where it cannot be.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("torch.distributed is not initialised; a group of ranks needs it: call init_process_group first")
        data = dist.group.WORLD if group is None else group
        rank = dist.get_rank(data)
        if rank < 0 or data is None:
            raise UsageError("this rank is not in the group; it must be one of its ranks: make the module on these only")
        backend = "cpu" if device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
        return cls(rank, dist.get_world_size(data), backend, device, data, data, None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (pickled), in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        # NCCL, where it is the control group, takes the current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self, timeout: timedelta = CONTROL_TIMEOUT) -> None:
        """Returns when every rank is here; raises RankTimeout naming the missing ranks.

        In a World made by `of` the group's own timeout holds instead.
        """
        if self._barrier is None:
            self.gather(None)
        else:
            self._barrier.wait(timeout)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
