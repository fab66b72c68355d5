"""The rendezvous of the ranks of one host: a store in a memory file that only processes of the same user can open.

A store that listens on a port, even of the loopback, can be joined by every user of the host. The file has no name in any file
system. Other processes reach it through /proc/PID/fd, which the kernel opens only to the same user (and root). The kernel frees
the file when the last process that has it open ends, even by a crash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from autotax.core.errors import MachineError

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
