"""Runs a kernel in the interpreter as it is, then twice in the lighter one: `TRITON_INTERPRET=1 python -m tests.interpreted`.

Prints JSON: the results of each run, the number of patches and of block types made for them, and whether the patch was undone.
It also has the iterations of a loop whose bound Triton 3.6 gives as an array, and the durations of waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from autotax.heap.triton_interpreter import patch_interpreter
from autotax.kernels.head_gather import await_words
from autotax.kernels.primitives import wait

LANES, POLLS = 8, 400


@triton.jit
def device_function(x, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    return x + tl.sum(tl.arange(0, LANES)) - tl.max(x, 0)  # functions of Triton's own library, and builtins


@triton.jit
def kernel(out, x, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, LANES)
    value = tl.load(x + lanes)
    for _ in tl.static_range(2):
        value = device_function(value, LANES)
    tl.store(out + lanes, value * 100_000_000)  # wraps around
    tl.store(out + LANES + lanes, (value.to(tl.float32).to(tl.bfloat16).to(tl.float32) * 0.75).to(tl.int32))


@triton.jit
def looping(out, x):  # type: ignore[no-untyped-def]
    for _ in range(tl.load(x)):
        tl.store(out, tl.load(out) + 1)


@triton.jit
def waiting_for_a_flag(words, control, TARGET: tl.constexpr):  # type: ignore[no-untyped-def]
    wait(words.to(tl.pointer_type(tl.int32)), 1, 0, 0, control, TARGET)


@triton.jit
def waiting_for_words(words, control, TARGET: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    at = words + tl.arange(0, LANES)
    await_words(at, tl.arange(0, LANES) < LANES, at, tl.load(control), 0, control, tl.load(control + 3), TARGET)


def seconds_of(kernel: Any, **constants: int) -> tuple[float, int]:
    """Seconds that a wait of POLLS polls takes to give up, and the note it leaves."""
    control = torch.tensor([1, 0, 0, POLLS] + [0] * 12, dtype=torch.int32)
    started = time.perf_counter()
    kernel[(1,)](torch.zeros(LANES, dtype=torch.int64), control, TARGET="interpreter", **constants)
    return time.perf_counter() - started, int(control[4])


def as_in_3_6(patch: Callable[..., None]) -> Callable[..., None]:
    """Simulates Triton 3.6 with NumPy 2.4 or later, where a loop bound is an array with an axis instead of a number."""

    def number(tensor: Any) -> int:
        if tensor.handle.data.ndim:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return int(tensor.handle.data)

    def patch_tensors(tensors: Any, scope: Any) -> None:
        patch(tensors, scope)
        scope.set_attr(tensors, "__index__", number)

    return patch_tensors


def main() -> None:
    patch = interpreter._patch_lang
    make = tl.core.block_type.__init__
    calls: list[int] = []
    types: list[int] = []
    results = []

    def counting(function: Callable[..., Any]) -> Any:
        calls[-1] += 1
        return patch(function)

    def counting_types(self: Any, element_ty: Any, shape: Any) -> None:
        types[-1] += 1
        make(self, element_ty, shape)

    interpreter._patch_lang = counting
    interpreter._patch_lang_tensor = as_in_3_6(interpreter._patch_lang_tensor)
    tl.core.block_type.__init__ = counting_types  # type: ignore[method-assign]
    for lighter in (False, True, True):
        calls.append(0)
        types.append(0)
        if lighter:
            triton.__version__ = "3.6.0"
            patch_interpreter()
        out = torch.zeros(2 * LANES, dtype=torch.int32)
        kernel[(1,)](out, torch.arange(LANES, dtype=torch.int32), LANES=LANES)
        results.append(out.tolist())
    report = {"results": results, "calls": calls.copy(), "types": types.copy()}
    loops = torch.zeros(1, dtype=torch.int32)
    looping[(1,)](loops, torch.tensor([5], dtype=torch.int32))
    undone = tl.core.is_builtin(tl.load) and not hasattr(tl.tensor, "__index__")
    waits = [seconds_of(waiting_for_a_flag), seconds_of(waiting_for_words, LANES=LANES)]
    print(json.dumps(report | {"undone": undone, "loops": loops.item(), "waits": waits}))


if __name__ == "__main__":
    main()
