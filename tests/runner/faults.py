"""Variants that go wrong, each in one way: a plugin for the ranks of fault-injection tests (see RankPool.plugins).

They compute All-Gather + GEMM as `bsp` does, and do their harm on rank 1 only, so that the other ranks are victims.
"""

from __future__ import annotations

import os
import signal
import time

import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels import register
from autotax.kernels.all_gather_gemm.bsp import Bsp
from autotax.kernels.primitives import wait

CULPRIT = 1


@triton.jit
def wait_in_vain(flags, control, source, TARGET: tl.constexpr):
    wait(flags, 1, source, 0, control, TARGET)


@triton.jit
def store_nowhere(somewhere, TARGET: tl.constexpr):  # noqa: ARG001 - every launch gives it
    tl.store(somewhere + (1 << 45), 1)


class Faulty(Bsp):
    """`harm` is what the culprit does in each call, after it has computed the right result."""

    calls = 0

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        super().__call__(a, b, out)
        if not self.context.dry and self.context.rank == CULPRIT:
            self.calls += 1
            self.harm(out)

    def harm(self, out: Tensor) -> None:
        """One right result is as good as another here."""


class WrongElement(Faulty):
    def harm(self, out: Tensor) -> None:
        out[3, 5] = out[3, 5] * -1 + 1


class SkipsTile(Faulty):
    """Leaves the poison of a tile in place."""

    def harm(self, out: Tensor) -> None:
        out[:16, :16] = float("nan")


class OnlyFirstInput(Faulty):
    """Returns what it computed in its first call, whatever the inputs are now."""

    def harm(self, out: Tensor) -> None:
        if self.calls == 1:
            self.first = out.clone()
        out.copy_(self.first)


class Raises(Faulty):
    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        raise ValueError("as the test wants it")


class Exits(Faulty):
    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        os._exit(3)


class Killed(Faulty):
    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(Faulty):
    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        os.kill(os.getpid(), signal.SIGSTOP)


class Sleeps(Faulty):
    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        time.sleep(10_000)


class Late(Faulty):
    """Raises after it has been verified."""

    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        if self.calls > 4:
            raise ValueError("as the test wants it")


class Hiccup(Faulty):
    """Is disturbed in the second of its first samples: four calls verify, four rehearse, two warm up."""

    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        if self.calls == 12:
            time.sleep(1.0)


class SpoilsInputs(Faulty):
    """Writes over what it reads."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        super().__call__(a, b, out)
        if not self.context.dry:
            a.zero_()


class KernelHang(Faulty):
    """Waits inside a kernel for a flag that nobody sets; the wait is bounded."""

    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        self.context.launch(wait_in_vain, (1,), self.context.flags(1), self.control, 0)


class IllegalAccess(Faulty):
    """Stores where there is no memory; for GPUs only."""

    def harm(self, out: Tensor) -> None:  # noqa: ARG002
        self.context.launch(store_nowhere, (1,), self.control)


class NoMemory(Bsp):
    """Asks for more heap than there is."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.context.heap.alloc((1 << 50,), self.gathered.dtype)


class DoesNotCompile(Bsp):
    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry:
            raise RuntimeError("error: expected something else")
        super().__call__(a, b, out)


VARIANTS = {
    "wrong_element": WrongElement,
    "skips_tile": SkipsTile,
    "only_first_input": OnlyFirstInput,
    "raises": Raises,
    "exits": Exits,
    "killed": Killed,
    "stopped": Stopped,
    "sleeps": Sleeps,
    "late": Late,
    "hiccup": Hiccup,
    "spoils_inputs": SpoilsInputs,
    "kernel_hang": KernelHang,
    "illegal_access": IllegalAccess,
    "no_memory": NoMemory,
    "does_not_compile": DoesNotCompile,
}

for name, operator in VARIANTS.items():
    register("all-gather-gemm", name, operator)
