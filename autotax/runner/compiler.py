"""A compiler process: `python -m autotax.runner.compiler FD`, fills Triton's cache with what the ranks will load.

It sees no GPU and never runs a kernel. A compiler that aborts or hangs takes only this process with it.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from autotax.operators import load
from autotax.runner.disk_full import full_disk
from autotax.runner.processes import die_with_parent
from autotax.runner.protocol import Compilation, CompilerAnswer, CompilerReady


def main() -> None:
    die_with_parent("autotax-compile")
    pipe = Connection(int(sys.argv[1]))
    for name in sys.argv[2:]:
        load(name)
    from autotax.kernels.offline import resources_offline

    pipe.send(CompilerReady())
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        assert isinstance(task, Compilation)
        try:
            answer = CompilerAnswer(None, kernels=tuple(resources_offline(task.problem, task.config, task.hardware)))
        except Exception as failure:
            answer = CompilerAnswer(full_disk(failure) or f"{type(failure).__name__}: {failure}"[-600:])
        pipe.send(answer)


if __name__ == "__main__":
    main()
