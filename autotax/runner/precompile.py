"""Compiles ahead: spare cores compile configs that are likely to be measured soon, while the ranks measure other configs.

The compilers write to Triton's cache, under the keys that the ranks will use. There is no thread: `pump` hands out tasks and
takes answers whenever the tuner calls it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from autotax.core.config import Config
from autotax.core.errors import described
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.kernels.resources import Resources, machine_code
from autotax.operators import load, loaded
from autotax.runner.messages import Compilation, CompilerAnswer, CompilerReady
from autotax.runner.processes import Child, ForkServer, die_with_parent, full_disk

DEADLINE_S = 60.0


@dataclass
class _Compiler:
    child: Child
    ready: bool = False
    task: Compilation | None = None
    deadline: float = 0.0


@dataclass
class CompileAhead:
    """`workers` compilers for `hardware`, forked by `server` at the first tasks. Lost compilers are replaced one by one.

    If compilers cannot start, nothing is compiled ahead, and the ranks compile themselves.
    """

    hardware: Hardware
    workers: int
    modules: tuple[str, ...] = ()
    deadline_s: float = DEADLINE_S
    server: ForkServer = field(default_factory=ForkServer)
    _queue: deque[Compilation] = field(default_factory=deque)
    _compilers: list[_Compiler] = field(default_factory=list)
    _outcomes: dict[Compilation, CompilerAnswer] = field(default_factory=dict)

    def expect(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Announces configs that may be measured soon; new ones are compiled."""
        if self.workers == 0:
            self._outcomes |= {task: CompilerAnswer("no compiler could be started") for task in self._tasks(problem, configs)}
        self._queue.extend(self._new(problem, configs))
        self.pump()

    def fill(self, problem: Problem, configs: Iterable[Config]) -> None:
        """Gives the first new configs to idle compilers. The others are dropped and not queued."""
        busy = len(self._queue) + sum(compiler.task is not None for compiler in self._compilers)
        if (idle := self.workers - busy) > 0:
            self._queue.extend(self._new(problem, list(configs))[:idle])
        self.pump()

    def ready(self, problem: Problem, config: Config) -> bool:
        """Whether there is an outcome for this config."""
        self.pump()
        return Compilation(problem, config, self.hardware) in self._outcomes

    def code(self, problem: Problem, config: Config) -> str | None:
        """Digest of a config's machine code; None where it is unknown, as before there is an outcome."""
        return machine_code(self.outcome(problem, config).kernels) if self.ready(problem, config) else None

    def outcome(self, problem: Problem, config: Config) -> CompilerAnswer:
        """Waits for the outcome of a compilation. The wait is bounded by the deadlines of the tasks before it and its own."""
        task = Compilation(problem, config, self.hardware)
        self.expect(problem, [config])
        while task not in self._outcomes:
            self.pump(timeout=0.05)
        return self._outcomes[task]

    def pump(self, timeout: float = 0.0) -> None:
        """Takes answers, replaces compilers that are lost or late, hands out work."""
        busy = [compiler for compiler in self._compilers if compiler.task]
        answered = wait([compiler.child.pipe for compiler in busy], timeout) if busy else []
        for compiler in busy:
            if compiler.child.pipe in answered:
                self._answer(compiler)
            elif time.monotonic() > compiler.deadline:
                self._lose(compiler, f"no answer from the compiler within {self.deadline_s:g} s")
        while self._queue and (idle := self._idle()):
            try:
                idle.child.send(self._queue[0])
            except BrokenPipeError:  # the compiler died while idle
                idle.child.kill()
                self._compilers.remove(idle)
                continue
            idle.task, idle.deadline = self._queue.popleft(), time.monotonic() + self.deadline_s

    def close(self) -> None:
        """Ends all compilers and their server; safe to call twice."""
        for compiler in self._compilers:
            compiler.child.kill()
        self._compilers = []
        self._queue.clear()
        self.server.close()

    def _tasks(self, problem: Problem, configs: Sequence[Config]) -> list[Compilation]:
        return [Compilation(problem, config, self.hardware) for config in configs]

    def _new(self, problem: Problem, configs: Sequence[Config]) -> list[Compilation]:
        """The tasks that are neither done nor running nor queued."""
        tasks = {*self._queue, *self._outcomes, *(compiler.task for compiler in self._compilers)}
        return [task for task in self._tasks(problem, configs) if task not in tasks]

    def _idle(self) -> _Compiler | None:
        """An idle compiler; starts a new one if fewer than `workers` exist."""
        if idle := next((compiler for compiler in self._compilers if compiler.task is None), None):
            return idle
        if len(self._compilers) >= self.workers:
            return None
        unseen = {"HIP_VISIBLE_DEVICES" if self.hardware.backend == "rocm" else "CUDA_VISIBLE_DEVICES": ""}
        self._compilers.append(_Compiler(self.server.child("autotax.runner.precompile", self.modules, unseen)))
        return self._compilers[-1]

    def _answer(self, compiler: _Compiler) -> None:
        assert compiler.task is not None
        try:
            answer = compiler.child.pipe.recv()
        except (EOFError, OSError):
            self._lose(compiler, f"the compiler {compiler.child.last_words()}")
            return
        if isinstance(answer, CompilerReady):
            compiler.ready = True
            return
        assert isinstance(answer, CompilerAnswer)
        self._outcomes[compiler.task] = answer
        compiler.task = None

    def _lose(self, compiler: _Compiler, why: str) -> None:
        assert compiler.task is not None
        self._outcomes[compiler.task] = CompilerAnswer(why, lost=compiler.ready)
        compiler.child.kill()
        self._compilers.remove(compiler)
        if not compiler.ready:
            self.workers = 0
            self._outcomes |= {task: CompilerAnswer(why) for task in self._queue}
            self._queue.clear()


# Compiles many configs for a GPU that may be absent: reports their resources and failures.

@dataclass(frozen=True)
class Surveyed:
    """How a config compiles: `ok`, `compile_error`, or `out_of_resources` if a kernel would not fit the target."""

    config: Config
    status: str
    error: str | None = None
    kernels: tuple[Resources, ...] = ()
    """Empty for a config that uses only kernels of libraries."""


def survey(problem: Problem, configs: Sequence[Config], hardware: Hardware, modules: tuple[str, ...] = ()) -> Iterator[Surveyed]:
    """Compiles each config for `hardware.target`, with one process for each processor of this machine. Yields the results in
    order. A compiler that aborts or hangs affects only its config.
    """
    compilers = CompileAhead(hardware, os.cpu_count() or 1, tuple(dict.fromkeys((*loaded(), *modules))))
    try:
        compilers.expect(problem, configs)
        for config in configs:
            answer = compilers.outcome(problem, config)
            status, error = ("compile_error", answer.error) if answer.error else _fits(answer.kernels, hardware)
            yield Surveyed(config, status, error, answer.kernels)
    finally:
        compilers.close()


def _fits(kernels: Sequence[Resources], hardware: Hardware) -> tuple[str, str | None]:
    limit = hardware.shared_memory
    for kernel in kernels:
        if kernel.shared > limit:
            taken = f"{kernel.kernel} takes {kernel.shared} bytes of shared memory"
            return "out_of_resources", f"{taken}; {hardware.target} has {limit} for a program"
    return "ok", None


# A compiler process: `python -m autotax.runner.precompile FD`, fills Triton's cache with the kernels that the ranks will load.

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
            answer = CompilerAnswer(full_disk(failure) or described(failure))
        pipe.send(answer)


if __name__ == "__main__":
    main()
