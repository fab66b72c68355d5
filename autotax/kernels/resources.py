"""The GPU resources of a kernel, read from the compiler's output without loading it on a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

READING_S = 20.0
"""Seconds that cuobjdump may take to read a binary."""


@dataclass(frozen=True)
class Resources:
    """Bytes of shared memory per program, registers and bytes of local memory (spills) per thread; None where not readable."""

    kernel: str
    shared: int
    registers: int | None = None
    local: int | None = None


def resources_of(kernel: str, binary: Any) -> Resources:
    """The resources of a compiled kernel: read by `cuobjdump` on NVIDIA, and from the metadata of the assembly on AMD."""
    if "cubin" in binary.asm:
        registers, local = _of_cubin(binary.asm["cubin"])
    else:
        registers, local = _of_assembly(binary.asm.get("amdgcn", ""))
    return Resources(kernel, binary.metadata.shared, registers, local)


def _of_cubin(cubin: bytes) -> tuple[int | None, int | None]:
    listing = ""
    with suppress(OSError, RuntimeError, subprocess.SubprocessError), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        from triton import knobs

        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=READING_S).stdout
    registers, stack, arrays = (_number(rf"\b{name}:(\d+)", listing) for name in ("REG", "STACK", "LOCAL"))
    return registers, None if stack is None or arrays is None else stack + arrays


def _of_assembly(listing: str) -> tuple[int | None, int | None]:
    """Vector registers, including those of the matrix units, and bytes of local memory."""
    return _number(r"\.vgpr_count:\s+(\d+)", listing), _number(r"\.private_segment_fixed_size:\s+(\d+)", listing)


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None
