"""Any operator as a torch module: it runs the tuned config of a problem, or the operator's baseline without a valid winner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotax.core.conditions import Conditions
from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.hardware import Hardware, require_problem
from autotax.nn.base import Module, Request, increment_version
from autotax.nn.consensus import require_alike
from autotax.nn.groups import on_device
from autotax.nn.tensor_checks import plain, recorded, require_apart, require_no_tangent, require_tensor
from autotax.operators import registry
from autotax.operators.inputs import Call
from autotax.operators.verification import make_inputs


class Tuned(Module):
    """Calls of an operator, built in or loaded: `module(*inputs)`, or `module(*inputs, out=...)`.

    Construction is collective over `group` (None: all ranks), which must have the problems' number of ranks.

    - `problems`: the problems of calls, each prepared separately. A call computes the first, or the one given as `problem=`.
      For another problem it uses a kernel that accepts smaller calls, if there is one.
    - `device`: where the tensors are; default: the current GPU, or else the CPU.
    - `db`, `conditions`, `config`, `check`, `prove`: see AllGatherLinear.

    Inputs are contiguous, of the shapes that the operator's declaration draws. There is no backward. Raises UsageError on all
    ranks alike for what is not allowed. Falls back and warns as AllGatherLinear does.
    """

    NAMES: tuple[str, ...] = ()
    """Of the inputs, in messages; ("input 1", "input 2" ...) without."""
    _problems: tuple[Problem, ...]
    _request: Request
    _kernels: dict[Problem, list[Any]]
    _calls: dict[Problem, tuple[Any, Call]]

    def __init__(
        self,
        problems: Problem | Sequence[Problem],
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        db: str | Path | None = None,
        conditions: Conditions | None = None,
        config: Config | None = None,
        check: bool | None = None,
        prove: bool | float = False,
    ) -> None:
        super().__init__(group, db, check, prove, device)
        self._problems = tuple(problems) if isinstance(problems, Iterable) else (problems,)
        self._request = Request(conditions, config)
        self.prepare(group)

    def _blank(self) -> dict[str, Any]:
        return super()._blank() | {"_calls": {}, "_kernels": {}}

    def _make(self) -> None:
        problems, deployed = self._agreed(self._prepared_for, self._request.conditions)
        world = self._world
        ranks = world.size if world else 1
        if not problems or world is None or any(problem.world_size != ranks for problem in problems):
            raise UsageError(f"the group has {ranks} ranks; problems are for as many, two at least: give others or another group")
        loaded = ", ".join(f"{name} {digest}" for name, digest in registry.fingerprints().items())
        require_alike(world, "what is loaded", loaded)
        self._look_up(problems, deployed, self._request.config)

    def _baselines(self, pairs: list[tuple[Any, Config | None]], hardware: Hardware) -> list[tuple[Any, Config]]:
        return [(problem, registry.of(problem).fallback(problem, hardware)) for problem, _ in pairs]

    def _store(self, operators: list[Any], notes: list[str]) -> None:
        for kernel in operators:
            self._kernels.setdefault(kernel.problem, []).append(kernel)
        if missing := [problem.key for problem in self._prepared_for() if problem not in self._kernels]:
            raise UsageError(f"no kernel could be prepared for {', '.join(missing)} ({'; '.join(notes) or 'see above'})")

    def _prepared_for(self) -> list[Problem]:
        """The problems to prepare. Raises UsageError."""
        for problem in self._problems:
            require_problem(problem)
        return list(self._problems)

    def _rehearsals(self, problem: Problem) -> Iterator[tuple[Problem, tuple[Tensor, ...]]]:
        assert self._world is not None
        call = make_inputs(problem, 0, self._world.rank, self._device)
        yield problem, (*call.tensors, call.out)

    def forward(self, *inputs: Tensor, out: Tensor | None = None, problem: Problem | None = None) -> Tensor:
        """One call of the operator. Enqueues on the current stream of the module's device.

        Args:
            inputs: The tensors of the operator, contiguous, as its declaration draws them.
            out: Where to store the output. Default: a new tensor.
            problem: The problem of the call. Default: the first one of the module.

        Returns:
            The output.

        Raises:
            UsageError: A tensor or the problem is not allowed; nothing is enqueued.
        """
        self._ensure_ready()
        requested = problem or self._problems[0]
        if self._guards[2]:
            self._compare(lambda: self._described(requested, inputs, out))
        return self._call(*self._calls.get(requested) or self._choose(requested), inputs, out)

    def _described(self, problem: Problem, inputs: tuple[Tensor, ...], out: Tensor | None) -> str:
        """A description of the call, which must be the same on all ranks. Raises UsageError for what this rank refuses."""
        kernel, like = self._calls.get(problem) or self._choose(problem)
        self._usable(kernel, like, inputs, out)
        return problem.key

    def _call(self, kernel: Any, like: Call, inputs: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
        """Enqueues a call of a kernel, after a check that its tensors are as those of `like`."""
        inputs = self._usable(kernel, like, inputs, out)
        made = torch.empty(like.out.shape, dtype=like.out.dtype, device=self._device) if out is None else out
        if out is not None:
            increment_version((out,))
        with on_device(self._guards[1]), self._guards[0]:
            result = kernel(*inputs, made)
        if result is None or result is made:
            return made
        return result if out is None else out.copy_(result)

    def _usable(self, kernel: Any, like: Call, inputs: tuple[Tensor, ...], out: Tensor | None) -> tuple[Tensor, ...]:
        """The inputs of a call as kernels take them. Raises UsageError."""
        if torch.is_grad_enabled() and recorded(*inputs, out):
            self._record(*inputs, out)
        require_no_tangent(*inputs, out)
        if len(inputs) != len(like.tensors):
            raise UsageError(f"{len(inputs)} inputs given; {kernel.problem.op} takes {len(like.tensors)}: give as many")
        names = self.NAMES or tuple(f"input {number}" for number in range(1, len(inputs) + 1))
        inputs = tuple(plain(name, tensor) for name, tensor in zip(names, inputs, strict=True))
        for name, tensor, expected in zip(names, inputs, like.tensors, strict=True):
            require_tensor(name, tensor, tuple(expected.shape), expected.dtype, self._device)
        if out is not None:
            require_tensor("out", out, tuple(like.out.shape), like.out.dtype, self._device)
            require_apart("out", out, **dict(zip(names, inputs, strict=True)))
        return inputs

    def _choose(self, problem: Problem) -> tuple[Any, Call]:
        """The kernel of a problem, and tensors without memory that have the shapes of a call. Host work, done once."""
        if not isinstance(problem, Problem):
            raise UsageError(f"problem is of type {type(problem).__name__}; it must be a Problem: give one, or none")
        candidates = self._kernels.get(problem) or [
            fit for kernels in self._kernels.values() for kernel in kernels if (fit := self._fitted(kernel, problem))
        ]
        if not candidates:
            keys = ", ".join(prepared.key for prepared in self._kernels)
            raise UsageError(f"problem is {problem.key}; this module was made for {keys}: give one of these")
        self._calls[problem] = candidates[0], make_inputs(problem, 0, 0, torch.device("meta"))
        answer: tuple[Any, Call] = self._calls[problem]
        return answer

    @staticmethod
    def _fitted(kernel: Any, problem: Problem) -> Any:
        """The kernel for calls of a problem that differs from its own in smaller varying sizes alone; or None."""
        own = kernel.problem
        if type(own) is not type(problem):
            return None
        varying = problem.varying()
        mine, theirs = own.to_dict(), problem.to_dict()
        alike = all(mine.get(name) == value for name, value in theirs.items() if name not in varying)
        smaller = all(theirs[name] <= mine[name] for name in varying)
        return kernel.fitted(problem) if alike and smaller else None

    def extra_repr(self) -> str:
        return ", ".join(problem.key for problem in self._problems)
