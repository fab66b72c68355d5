"""World, the ranks of one job: the index of this rank, the number of ranks, their barrier, and the values that they exchange.

Values are msgpack of a bounded size, decoded as a declared type. Bytes of a peer are never executed or unpickled.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.errors import MachineError, UsageError
from autotax.heap.rendezvous import require_own_peers, sockets

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 10e-3
"""Pauses between two polls of the store. The wait of a file store itself takes at least 10 ms."""
LOOKS = 8
"""Polls before the first pause. Ranks that measure arrive almost together, and a pause takes 50 us longer than requested."""


class RankTimeout(RuntimeError):
    """Some rank did not come to a barrier in time; the message names the missing ranks."""


class Barrier:
    """Each rank leaves a key in the store and waits for the others'.

    torch's monitored barrier bounds only the wait of rank 0: if rank 0 is missing, the others hang until the group times out. A
    rank that comes after the others gave up passes the barrier, so the counters of all ranks stay in step.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        # The clone has a separate connection, so a long wait does not block other users of the store.
        self._store = dist.PrefixStore("autotax/barrier", store.clone())  # type: ignore[attr-defined]
        self._rank = rank
        self._size = size
        self._turn = 0

    def wait(self, timeout: timedelta) -> None:
        keys = [f"{self._turn}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "here")
        former = f"{self._turn - 1}/{self._rank}"
        self._turn += 1
        deadline, pause_s, looks = time.monotonic() + timeout.total_seconds(), SHORTEST_PAUSE_S, 0
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:
                    break
                waited = f"rank {self._rank} waited {timeout.total_seconds():g} s at a barrier"
                raise RankTimeout(f"{waited} for rank {', '.join(map(str, missing))}")
            looks += 1
            if looks < LOOKS:
                time.sleep(0)  # lets a rank on the same core run
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        # All ranks have arrived here, so all have left the previous barrier.
        self._store.delete_key(former)


LARGEST = 2**24
"""Bytes of one rank's value."""
FIRST = 504
"""Bytes of a value that travel with its size, so that a short value takes one collective."""
SIZE = 8
REFUSED = -1
"""Replaces the size if a rank could not encode its value."""


def gather(value: Any, kind: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Collective.

    Args:
        value: the value of this rank.
        kind: its type, as msgspec knows types; the same on all ranks.
        group: the ranks.
        device: the device of the tensors that the group's collectives take.

    Raises:
        MachineError: on all ranks alike; a value is too large or not of its type.
    """
    cause = None
    try:
        data = msgspec.msgpack.encode(value)
        size = len(data)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        data, size, cause = b"", REFUSED, error
    heads = _all(size.to_bytes(SIZE, "little", signed=True) + data[:FIRST], SIZE + FIRST, group, device)
    sizes = [int.from_bytes(head[:SIZE], "little", signed=True) for head in heads]
    for rank, length in enumerate(sizes):
        if length == REFUSED:
            raise MachineError(f"rank {rank} cannot encode what it tells the others; it must be a {_name(kind)}") from cause
        if not 0 <= length <= LARGEST:
            raise MachineError(f"rank {rank} tells the others {length} bytes; at most {LARGEST} are taken")
    rests = [b""] * len(heads)
    if (longest := max(sizes)) > FIRST:
        rests = _all(data[FIRST:], longest - FIRST, group, device)
    return [
        _decoded(rank, (head[SIZE:] + rest)[:size], kind)
        for rank, (head, rest, size) in enumerate(zip(heads, rests, sizes, strict=True))
    ]


def _all(data: bytes, width: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """The bytes of every rank, filled up to `width` (at most that, unless the exchange is refused anyway)."""
    mine = torch.frombuffer(bytearray(data[:width].ljust(width, b"\0")), dtype=torch.uint8).to(device)
    everybody: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, mine, group=group)
    return [buffer.cpu().numpy().tobytes() for buffer in everybody]


def _decoded(rank: int, data: bytes, kind: Any) -> Any:
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MachineError(f"what rank {rank} tells the others is no {_name(kind)} ({error})") from None


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)


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
