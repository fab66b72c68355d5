"""Another user of the host, against ranks that start: `python -m tests.adversarial.stranger STARTS FOLDER`, as root.

Runs in a network namespace of its own, so that no other process of the machine is attacked. Prints JSON: the ways in, the
number of attempts, how the starts ended, and the error that ended the attack. STARTS 0 attacks ranks of the former way: they
meet in a store on a port of the loopback and unpickle what a peer sends.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autotax.heap.world import World
from autotax.testing.ranks import RankFailure, Ranks

NOBODY = 65534
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1
LISTEN = "0A"


class Payload:
    """Unpickled, it makes a folder with the number of the user that unpickles it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return exec, (f"import os; os.mkdir(f'{self.folder}/{{os.getuid()}}')",)


def alone() -> None:
    """Enters a network with nothing but a loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def ports() -> Iterator[int]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                yield int(words[1].rpartition(":")[2], 16)


def rank_of_the_former_way(store: dist.Store, rank: int, value: Any, timeout_s: float) -> None:
    """Joins a group of two ranks and exchanges pickles, as ranks did when they met in a store on a port."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        dist.all_gather_object([None, None], value)
    finally:
        dist.destroy_process_group()


def become_nobody() -> None:
    """Gives up root. What the attack imports is imported before: the files of Python may be out of reach of another user."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_gather_object([None], "imports what a rank imports late")
    dist.destroy_process_group()
    with suppress(OSError), socket.create_connection(("127.0.0.1", 1), 0.2):
        pass
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


class Attack:
    """Tries whatever another user can reach of the processes numbered `parent` and above."""

    def __init__(self, folder: str, parent: int) -> None:
        self.payload = Payload(folder)
        self.bad = pickle.dumps(self.payload)
        self.parent = parent
        self.ways = set[str]()
        self.attempts = 0
        self._held = list[socket.socket]()
        self._joined = set[int]()

    def once(self) -> None:
        for port in set(ports()):
            self.attempts += 1
            if port not in self._joined:
                self._joined.add(port)
                self._join(port)
            self._connect(port)
        self._ask_fork_servers()
        self._open_files()

    def _join(self, port: int) -> None:
        """As the second rank, which is late."""
        with suppress(Exception):
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
            self.ways.add("a store on a port")
            store.set("stranger", b"here")
            rank_of_the_former_way(store, 1, self.payload, timeout_s=20)
            self.ways.add("a rank of the group")

    def _connect(self, port: int) -> None:
        for first in range(4):  # the numbers by which gloo's connections are told apart
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 0.2)
                connection.sendall(struct.pack("<q", first) + self.bad)
                self._held.append(connection)
        for connection in self._held[:-64]:
            connection.close()
        del self._held[:-64]

    def _ask_fork_servers(self) -> None:
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            name = line.split()[7:]
            if name and name[0].startswith("@autotax"):
                self.attempts += 1
                with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                    client.settimeout(1)
                    client.connect("\0" + name[0][1:])
                    client.sendall(struct.pack("i", len(self.bad)) + self.bad)
                    if client.recv(4):
                        self.ways.add("the fork server")

    def _open_files(self) -> None:
        for process in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            if process < self.parent or process == os.getpid():
                continue
            self.attempts += 1
            for fd in range(3, 32):
                with suppress(OSError):
                    os.close(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR))
                    self.ways.add("a file of a process")


def attack(folder: str, parent: int, stop: Any, out: Any) -> None:
    """Sends True when the attack begins, then the ways in, the number of attempts and the error that ended it."""
    error = ""
    attacker = Attack(folder, parent)
    try:
        become_nobody()
        out.send(True)
        while not stop.is_set():
            attacker.once()
    except BaseException as cause:
        error = repr(cause)
    out.send((sorted(attacker.ways), attacker.attempts, error))


def exchange(world: World) -> list[str]:
    return world.gather(f"of rank {world.rank}", str)


def main(starts: int, folder: str) -> None:
    alone()
    fork = multiprocessing.get_context("fork")
    stop, (here, there) = fork.Event(), fork.Pipe(duplex=False)
    stranger = fork.Process(target=attack, args=(folder, os.getpid(), stop, there), daemon=True)
    stranger.start()
    there.close()
    began = here.recv() if here.poll(60) else None
    if began is not True:
        sys.exit(f"the attack did not begin: {began}")
    ends = {"right": 0, "refused": 0}
    others: list[str] = []
    if not starts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with suppress(RuntimeError):  # ranks began seconds after their store
            store.wait(["stranger"], timedelta(seconds=30))
        with suppress(RuntimeError):  # no second rank came in time
            rank_of_the_former_way(store, 0, "of rank 0", timeout_s=30)
    for _ in range(starts):
        try:
            with Ranks(2) as ranks:
                assert ranks.run(exchange, timeout=60) == [["of rank 0", "of rank 1"]] * 2
            ends["right"] += 1
        except RankFailure as failure:
            if "a peer of this rank" in str(failure):
                ends["refused"] += 1
            else:
                others.append(str(failure)[-600:])
    stop.set()
    ways, attempts, error = here.recv() if here.poll(60) else ([], 0, "the attack did not end")
    unpickled = [entry.name for entry in sorted(Path(folder).iterdir())]
    result = {"ways": ways, "attempts": attempts, "error": error, **ends, "others": others, "unpickled": unpickled}
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
