"""World, the ranks of one job: where they meet, their barrier, the values that they exchange, and errors of all together."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.decoding import readable
from autotax.core.errors import MachineError, UsageError

# Where the ranks of one host meet: a store in a memory file without a name, which only processes of the same user can open. A
# store that listens on a port, even of the loopback, can be joined by every user of the host. Other processes reach the file
# through /proc/PID/fd, which the kernel opens to the same user and root. It is freed with the last process that has it open.

NAME = "autotax-meeting"


class Meeting:
    """A new store for one group of processes of this host. They find it at `address` as long as this object is open."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME)
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Ranks can no longer join; stores that are open stay usable. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def meet(address: str) -> dist.FileStore:
    """The store at the address of a Meeting.

    Args:
        address: `Meeting.address` of a process that is alive.

    Returns:
        A store that all ranks of the group share.

    Raises:
        MachineError: the address is no store of a Meeting of this user.
    """
    try:
        fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        cannot = f"the ranks' meeting place {address} cannot be opened ({error.strerror})"
        raise MachineError(f"{cannot}: start the job again") from None
    try:
        owner, link = os.fstat(fd).st_uid, str(Path(f"/proc/self/fd/{fd}").readlink())
        if owner != os.geteuid() or not link.startswith(f"/memfd:{NAME} "):
            wrong = f"the ranks' meeting place {address} is {link} of user {owner}"
            raise MachineError(f"{wrong}; it must be a memory file of user {os.geteuid()}: start the job again")
        return dist.FileStore(address, -1)
    finally:
        os.close(fd)


# Peers of TCP connections on this host, checked by their user.

ESTABLISHED = "01"
ACCEPTED_S = 10.0
"""Timeout for a peer to accept a connection."""
LOOK_S = 0.002


class _End(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int
    inode: int


def sockets() -> set[int]:
    """The inodes of this process's open sockets."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed since the listing
            link = str(fd.readlink())
            if link.startswith("socket:["):
                inodes.add(int(link[8:-1]))
    return inodes


def require_own_peers(inodes: Collection[int]) -> None:
    """Raises MachineError unless the peer of each of these connections belongs to this process's user.

    Args:
        inodes: sockets of this process; those without a TCP connection are ignored. All peers must be on this host.

    Raises:
        MachineError: the peer of a connection belongs to another user or has gone.
    """
    deadline = time.monotonic() + ACCEPTED_S
    while strange := _strange(inodes):
        if any(owner is not None for owner in strange) or time.monotonic() > deadline:
            owners = sorted({owner for owner in strange if owner is not None})
            whose = f"belongs to user {', '.join(map(str, owners))}" if owners else "has gone"
            raise MachineError(
                f"a peer of this rank {whose}; all ranks must be of user {os.geteuid()}: end what connects to the ranks' "
                "ports, and start the job again"
            )
        time.sleep(LOOK_S)


def _strange(inodes: Collection[int]) -> list[int | None]:
    """The owners of peers that belong to other users; None for a peer that no process holds (yet)."""
    ends = list(_ends())
    owners = {(end.local, end.remote): end.uid for end in ends if end.inode}  # without an inode it was not accepted yet
    peers = [(end.remote, end.local) for end in ends if end.inode in inodes and end.state == ESTABLISHED]
    return [owners.get(peer) for peer in peers if owners.get(peer) != os.geteuid()]


def _ends() -> Iterator[_End]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # a host without IPv6
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                yield _End(words[1], words[2], words[3], int(words[7]), int(words[9]))


SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 10e-3
"""Pauses between two polls of the store. The wait of a file store itself takes at least 10 ms."""
LOOKS = 8
"""Polls before the first pause. Ranks that measure arrive almost together, and a pause takes 50 us longer than requested."""


# The world: its errors, its barrier, and values as msgpack of a bounded size, decoded as a declared type. Bytes of a peer are
# never executed or unpickled.

class HeapError(RuntimeError):
    """The heap is full, or its ranks made different allocations."""


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
            raise MachineError(f"rank {rank} cannot encode what it sends; it must be a {_name(kind)}") from cause
        if not 0 <= length <= LARGEST:
            raise MachineError(f"rank {rank} sends {length} bytes; at most {LARGEST} are taken")
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
        raise MachineError(f"what rank {rank} sends is no {_name(kind)} ({error})") from None


_decoder = cache(lambda kind: msgspec.msgpack.Decoder(readable(kind)))


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
        """Waits for all ranks; raises RankTimeout naming the missing ones. A World made by `of` has its group's timeout."""
        if self._barrier is None:
            self.gather(None, None)
        else:
            self._barrier.wait(timeout)

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# Collective errors: if one rank fails, all ranks raise.

ASKING_S = 0.02
_calls: Counter[str] = Counter()


@contextmanager
def together(world: World, task: str) -> Iterator[None]:
    """Raises HeapError on every rank if the block raised on one of them. Collective at the end of the block."""
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        cause = error
    reasons = world.gather(reason_of(cause), str | None)
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if failures:
        raise HeapError(f"cannot {task} ({'; '.join(failures)})") from cause


def by_rank(values: Sequence[object]) -> str:
    """`rank 0: this; rank 1: that`."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def all_or_none(world: World | None, make: Callable[[], T]) -> T:
    """Calls `make` on every rank and returns its result, unless it raised on one of them. Collective.

    Raises:
        UsageError: `make` raised on some rank. A rank whose `make` raised another error raises that one.
    """
    if world is None:
        return make()
    value, cause = None, None
    try:
        value = make()
    except Exception as error:
        cause = error
    errors = world.gather(reason_of(cause), str | None)
    if cause and not isinstance(cause, UsageError):
        raise cause
    if any(errors):
        raise UsageError(errors[0] if len(set(errors)) == 1 else by_rank([line or "ready" for line in errors])) from cause
    return value  # type: ignore[return-value]


def agreed(world: World, what: str, value: int) -> int:
    """The value, if it is the same on every rank; else HeapError on every rank. Collective."""
    values = world.gather(value, int)
    if len(set(values)) > 1:
        raise HeapError(f"the ranks disagree on {what} ({', '.join(map(str, values))}); it must be the same on all")
    return value


def apart(world: World, task: str, work: Callable[[], T]) -> T:
    """Like `together`, for work that contains collectives, where the other ranks would wait for ever for a rank that fails alone.

    The work runs in a thread, and each rank reports its outcome through the store. If a rank fails, the threads of the other
    ranks remain blocked in their collective. The processes can report the error and should then end.
    """
    done: list[T] = []
    group = str(world.control.group_name)
    _calls[group] += 1
    # The clone has a separate connection, which the collectives of the thread do not block.
    clone = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"autotax/apart/{group}/{_calls[group]}", clone)

    def run() -> None:
        reason = ""
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)  # the current device is per thread
            done.append(work())
        except BaseException as error:
            reason = " ".join((str(error) or type(error).__name__).split())
        store.set(str(world.rank), reason)

    threading.Thread(target=run, daemon=True, name=task).start()
    waiting, failures, last = set(range(world.size)), list[str](), time.monotonic() + CONTROL_TIMEOUT.total_seconds()
    while waiting and not failures:
        ended = {rank for rank in waiting if store.check([str(rank)])}
        endings = {rank: store.get(str(rank)).decode() for rank in sorted(ended)}
        failures = [f"rank {rank}: {reason}" for rank, reason in endings.items() if reason]
        waiting -= ended
        if waiting and time.monotonic() > last:
            raise RankTimeout(f"rank {world.rank} waited to {task} for rank {', '.join(map(str, sorted(waiting)))}")
        time.sleep(ASKING_S if waiting else 0)
    if failures:
        # All ranks raise the same error, the first that was reported.
        first = store.compare_set("failures", "", "; ".join(failures)).decode()
        raise HeapError(f"cannot {task} ({first})")
    return done[0]
