"""Another user of the host, against ranks that start: `python -m tests.adversarial.stranger STARTS FOLDER`, as root.

Runs in a network namespace of its own, so that no other process of the machine is attacked. Prints JSON: the ways in, the
number of attempts, how the starts ended. STARTS 0 attacks a store on a port instead, as ranks met before.
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 - before the files of Python are out of reach
import fcntl
import json
import multiprocessing
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autotax.heap.world import World
from autotax.runner.ranks import RankFailure, Ranks

NOBODY = 65534
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1
LISTEN = "0A"


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


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


def attack(folder: str, parent: int, stop: Any, out: Any) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    bad = pickle.dumps(Payload(f"{folder}/unpickled"))
    ways, attempts, held, joined = set[str](), 0, list[socket.socket](), set[int]()
    while not stop.is_set():
        for port in set(ports()):
            attempts += 1
            for first in range(4):  # the numbers by which gloo distinguishes its connections
                with suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), 0.2)
                    connection.sendall(struct.pack("<q", first) + bad)
                    held.append(connection)
            if port not in joined:
                joined.add(port)
                with suppress(Exception):
                    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.3))
                    store.set("stranger", bad)
                    ways.add("a store on a port")
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            name = line.split()[7:]
            if name and name[0].startswith("@autotax"):
                attempts += 1
                with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                    client.settimeout(1)
                    client.connect("\0" + name[0][1:])
                    client.sendall(struct.pack("i", len(bad)) + bad)
                    if client.recv(4):
                        ways.add("the fork server")
        for process in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) >= parent):
            with suppress(OSError):
                if Path(f"/proc/{process}").stat().st_uid != NOBODY and int(process) != os.getpid():
                    attempts += 1
                    for fd in range(3, 32):
                        with suppress(FileNotFoundError):
                            os.close(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR))
                            ways.add("a file of a process")
        for connection in held[:-64]:
            connection.close()
        del held[:-64]
    out.send((sorted(ways), attempts))


def exchange(world: World) -> list[str]:
    return world.gather(f"of rank {world.rank}", str)


def main(starts: int, folder: str) -> None:
    alone()
    fork = multiprocessing.get_context("fork")
    stop, (here, there) = fork.Event(), fork.Pipe(duplex=False)
    stranger = fork.Process(target=attack, args=(folder, os.getpid(), stop, there), daemon=True)
    stranger.start()
    ends = {"right": 0, "refused": 0}
    others: list[str] = []
    if not starts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        deadline = time.monotonic() + 30
        while not store.check(["stranger"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if store.check(["stranger"]):
            with suppress(Exception):
                pickle.loads(store.get("stranger"))
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
    ways, attempts = here.recv() if here.poll(30) else (["the stranger did not end"], 0)
    print(json.dumps({"ways": ways, "attempts": attempts, **ends, "others": others, "unpickled": [entry.name for entry in Path(folder).iterdir()]}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
