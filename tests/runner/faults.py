"""Faulty variants, each with one kind of fault: a plugin for the ranks of fault-injection tests (see RankPool.modules).

They compute All-Gather + GEMM like `bsp`. Only rank 1, the culprit, has the fault; the other ranks are victims.
"""

from __future__ import annotations

import errno
import os
import signal
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.kernels.all_gather_gemm.bsp import Bsp
from autotax.kernels.primitives import flag_address, wait
from autotax.kernels.primitives import signal as tell
from autotax.operators import named
from autotax.runner.sampling import Yardstick

CULPRIT = 1


@triton.jit
def wait_in_vain(flags, control, source, TARGET: tl.constexpr):
    wait(flags, 1, source, 0, control, TARGET)


@triton.jit
def wait_in_vain_later(calls, after, flags, control, source, TARGET: tl.constexpr):
    if tl.atomic_add(calls, 1) > after:
        wait(flags, 1, source, 0, control, TARGET)


@triton.jit
def tell_peer(flags, bases, rank, peer, TARGET: tl.constexpr):
    tell(flag_address(flags, 0, bases, rank, peer), 1, TARGET, "sys")


@triton.jit
def multiply_too_much(x, STAGES: tl.constexpr, TARGET: tl.constexpr):  # noqa: ARG001 - every launch gives it
    rows, inner = tl.arange(0, 256), tl.arange(0, 128)
    acc = tl.zeros((256, 256), tl.float32)
    for start in tl.range(0, 1024, 128, num_stages=STAGES):
        a = tl.load(x + rows[:, None] * 1024 + start + inner[None, :])
        acc += tl.dot(a, tl.load(x + (start + inner)[:, None] * 256 + rows[None, :]))
    tl.store(x + rows[:, None] * 256 + rows[None, :], acc.to(x.dtype.element_ty))


@triton.jit
def store_nowhere(somewhere, TARGET: tl.constexpr):  # noqa: ARG001 - every launch gives it
    tl.store(somewhere + (1 << 45), 1)


class Faulty(Bsp):
    """The culprit calls `harm` in each call, after it has computed the right result."""

    calls = 0

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        super().__call__(a, b, out)
        if not self.context.dry and self.context.rank == CULPRIT:
            self.calls += 1
            self.harm(out)

    def harm(self, out: Tensor) -> None:
        """Damages the result; does nothing by default."""


class WrongShape(Faulty):
    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:  # type: ignore[override]
        super().__call__(a, b, out)
        return out[:-1] if self.context.rank == CULPRIT else out


class WrongElement(Faulty):
    def harm(self, out: Tensor) -> None:
        out[3, 5] = out[3, 5] * -1 + 1


class SkipsTile(Faulty):
    """Leaves the poison of a tile in place."""

    def harm(self, out: Tensor) -> None:
        out[:16, :16] = float("nan")


class LosesSmall(Faulty):
    """Rounds each row to steps of its largest number: right to 1e-6 as long as no column is an outlier."""

    def harm(self, out: Tensor) -> None:
        step = out.nan_to_num(0.0, 0.0, 0.0).abs().amax(1, keepdim=True) * 2.0**-22
        out.copy_(torch.where(out.isfinite(), (out / step).round() * step, out))


class LosesNaN(Faulty):
    """Replaces infinities and NaNs by finite numbers."""

    def harm(self, out: Tensor) -> None:
        out.nan_to_num_()


class OnlyFirstInput(Faulty):
    """Returns the result of its first call for all inputs."""

    def harm(self, out: Tensor) -> None:
        if self.calls == 1:
            self.first = out.clone()
        out.copy_(self.first)


class Stale(Faulty):
    """Returns the result of the previous call."""

    def harm(self, out: Tensor) -> None:
        now = out.clone()
        if self.calls > 1:
            out.copy_(self.before)
        self.before = now


class Races(Faulty):
    """Is wrong in one of 997 calls, first in the 500th. It counts on the device, so replays of a graph count too."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.count = torch.zeros((), dtype=torch.int64, device=self.gathered.device)

    def harm(self, out: Tensor) -> None:
        self.count += 1
        out[3, 5] = torch.where(self.count % 997 == 500, out[3, 5] * -1 + 1, out[3, 5])


class Lucky(Faulty):
    """Takes 40 ms, but for one of the samples: six calls make it ready, two warm up."""

    def harm(self, out: Tensor) -> None:
        if self.calls != 13:
            time.sleep(0.04)


class Dawdles(Faulty):
    def harm(self, out: Tensor) -> None:
        time.sleep(0.02)


class Burdened(Bsp):
    """Makes the culprit's fixed work eight times as long, as other work on its device would."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        if self.context.rank == CULPRIT:
            work = Yardstick._multiply
            Yardstick._multiply = lambda self: [work(self) for _ in range(16)] and None  # type: ignore[method-assign]


class FullDisk(Faulty):
    def harm(self, out: Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDiskAtCompile(Bsp):
    """Like a compiler that cannot write its output, and wraps the reason in another error."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if self.context.dry and self.context.rank == CULPRIT:
            try:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            except OSError as error:
                raise RuntimeError("the kernel could not be compiled") from error
        super().__call__(a, b, out)


class Raises(Faulty):
    def harm(self, out: Tensor) -> None:
        raise ValueError("as the test wants it")


class RaisesEarly(Faulty):
    """Raises before its part of the call, so that the other ranks wait for it."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if not self.context.dry and self.context.rank == CULPRIT:
            raise ValueError("as the test wants it")
        super().__call__(a, b, out)


class LacksMemory(Faulty):
    """Raises for lack of memory; the others wait in a kernel and soon give up."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.never = self.context.flags(1)
        self.control[3] = 100

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if not self.context.dry and self.context.rank == CULPRIT:
            raise torch.OutOfMemoryError("as the test wants it")
        self.context.launch(wait_in_vain, (1,), self.never, self.control, CULPRIT)


class Noisy(Faulty):
    """Is right, and prints a line in each call."""

    def harm(self, out: Tensor) -> None:
        print("noise of a candidate that is right")


class Exits(Faulty):
    def harm(self, out: Tensor) -> None:
        os._exit(3)


class Killed(Faulty):
    def harm(self, out: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(Faulty):
    def harm(self, out: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Sleeps(Faulty):
    def harm(self, out: Tensor) -> None:
        time.sleep(10_000)


class SleepsLate(Faulty):
    """Sleeps after verification and the first samples."""

    after = 60

    def harm(self, out: Tensor) -> None:
        if self.calls > self.after:
            time.sleep(10_000)


class SleepsInSoak(SleepsLate):
    """Like SleepsLate, for GPUs, where a sample consists of many calls."""

    after = 1000


class ExitsLate(Faulty):
    """Exits among the samples: four calls verify, two rehearse."""

    def harm(self, out: Tensor) -> None:
        if self.calls > 12:
            os._exit(3)


class Late(Faulty):
    """Raises after it has been verified."""

    def harm(self, out: Tensor) -> None:
        if self.calls > 4:
            raise ValueError("as the test wants it")


class Hiccup(Faulty):
    """Is disturbed in the second of its first samples: four calls verify, two rehearse, two warm up."""

    def harm(self, out: Tensor) -> None:
        if self.calls == 10:
            time.sleep(1.0)


class ArrivesLate(Faulty):
    """Comes to its first call seconds after its peers, which wait for it inside a kernel."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.arrived = self.context.flags(1)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        super().__call__(a, b, out)
        if not self.context.dry and self.context.rank != CULPRIT:
            self.context.launch(wait_in_vain, (1,), self.arrived, self.control, CULPRIT)

    def harm(self, out: Tensor) -> None:
        if self.calls == 1:
            time.sleep(2.5)
            self.context.launch(tell_peer, (1,), self.arrived, self.context.heap.bases, self.context.rank, 1 - CULPRIT)


class SpoilsInputs(Faulty):
    """Overwrites its inputs."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        super().__call__(a, b, out)
        if not self.context.dry:
            a.zero_()


class KernelHang(Faulty):
    """Waits inside a kernel for a flag that nobody sets; the wait is bounded."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        if self.context.interpreted:
            self.control[3] = 1000  # polls, which are slow on a busy machine

    def harm(self, out: Tensor) -> None:
        self.context.launch(wait_in_vain, (1,), self.context.flags(1), self.control, 0)


class KernelHangLater(Faulty):
    """Hangs in a kernel in call 2000, which only a soak reaches."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        self.count = self.context.flags(1)
        self.never = self.context.flags(1)

    def harm(self, out: Tensor) -> None:
        self.context.launch(wait_in_vain_later, (1,), self.count, 2000, self.never, self.control, 0)


class TooMuchSharedMemory(Bsp):
    """A kernel whose tiles do not fit; for GPUs only."""

    def __call__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        super().__call__(a, b, out)
        self.context.launch(multiply_too_much, (1,), out, STAGES=4, num_warps=8)


class NoDeviceMemory(Bsp):
    """Takes all the memory that the culprit's device has; for GPUs only."""

    def __init__(self, *args) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args)
        taken = []
        while self.context.rank == CULPRIT:
            taken.append(self.context.empty((1 << 30,), torch.uint8))


class IllegalAccess(Faulty):
    """Stores where there is no memory; for GPUs only."""

    def harm(self, out: Tensor) -> None:
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
    "wrong_shape": WrongShape,
    "skips_tile": SkipsTile,
    "loses_small": LosesSmall,
    "loses_nan": LosesNaN,
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

"""Faulty variants that a single ordinary trial detects."""

APART = {
    "raises_early": RaisesEarly,
    "lacks_memory": LacksMemory,
    "noisy": Noisy,
    "stale": Stale,
    "races": Races,
    "lucky": Lucky,
    "dawdles": Dawdles,
    "arrives_late": ArrivesLate,
    "burdened": Burdened,
    "full_disk": FullDisk,
    "full_disk_at_compile": FullDiskAtCompile,
    "sleeps_late": SleepsLate,
    "exits_late": ExitsLate,
    "sleeps_in_soak": SleepsInSoak,
    "kernel_hang_later": KernelHangLater,
    "too_much_shared_memory": TooMuchSharedMemory,
    "no_device_memory": NoDeviceMemory,
}
"""Variants that a single trial does not detect, whose fault is not the config's, or that need a GPU."""

for name, operator in (VARIANTS | APART).items():
    named("all-gather-gemm").peer(name, operator)
