"""The rendezvous of the ranks of one host: a store in a memory file that only processes of the same user can open.

A store that listens on a port, even of the loopback, can be joined by every user of the host. The file has no name in any file
system. Other processes reach it through /proc/PID/fd, which the kernel opens only to the same user (and root). The kernel frees
the file when the last process that has it open ends, even by a crash.
"""

from __future__ import annotations

import os
from pathlib import Path

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
