"""Peers of TCP connections on this host, checked by their user.

gloo connects ranks over TCP on the loopback, where every user can connect, and its handshake is a number that can be
guessed. The kernel lists the owner of both ends of such a connection, which no other user can forge.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from autotax.core.errors import MachineError

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
