"""The program that the tests of the fork server fork: it reports its surroundings and ends in the requested way."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        if command == "speak":
            print("words of an earlier task")
            pipe.send(command)
            continue
        if command == "leave":
            return
        if command == "raise":
            raise ValueError("as the test wants it")
        if command == "exit":
            print("and says so")
            sys.exit(3)
        if command == "abort":
            os.abort()
        pipe.send(subprocess.Popen(["sleep", "600"]).pid if command == "start another" else _seen())


def _seen() -> dict[str, object]:
    return {
        "arguments": sys.argv[2:],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


if __name__ == "__main__":
    main()
