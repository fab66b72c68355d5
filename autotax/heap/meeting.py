"""Where the ranks of one host meet: a store that listens on the loopback alone."""

from __future__ import annotations

import socket

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def loopback_store() -> dist.TCPStore:
    """A new store for one group of processes of this host, at `LOOPBACK` and the port that it names.

    A store that chooses its own port listens on all interfaces, where whoever reaches the host could write into it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.fileno())
        listening.detach()  # it is the store's from now on
    return store
