"""Runs a kernel in the interpreter as it is, then twice in the lighter one: `TRITON_INTERPRET=1 python -m tests.interpreted`.

Prints, as JSON, what the kernel computed each time, how often the language was patched and how many types of blocks were made
for it, and whether the patch was undone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from autotax.interpreting import lighten_interpreter

LANES = 8


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
    tl.core.block_type.__init__ = counting_types  # type: ignore[method-assign]
    for lighter in (False, True, True):
        calls.append(0)
        types.append(0)
        if lighter:
            lighten_interpreter()
        out = torch.zeros(2 * LANES, dtype=torch.int32)
        kernel[(1,)](out, torch.arange(LANES, dtype=torch.int32), LANES=LANES)
        results.append(out.tolist())
    print(json.dumps({"results": results, "calls": calls, "types": types, "undone": tl.core.is_builtin(tl.load)}))


if __name__ == "__main__":
    main()
