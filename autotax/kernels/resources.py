"""The GPU resources and the machine code of a kernel, read from the compiler's output without loading it on a GPU."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from autotax.hardware import content_digest

READING_S = 20.0
"""Seconds that cuobjdump may take to read a binary."""


@dataclass(frozen=True)
class Resources:
    """Bytes of shared memory per program, registers and bytes of local memory (spills) per thread; None where not readable."""

    kernel: str
    shared: int
    registers: int | None = None
    local: int | None = None
    code: str = ""
    """Digest of its machine code; empty where there is none."""


def resources_of(kernel: str, binary: Any) -> Resources:
    """Those of a compiled kernel: `cuobjdump` reads them on NVIDIA; on AMD the metadata of the assembly has them."""
    if "cubin" in binary.asm:
        registers, local = _of_cubin(binary.asm["cubin"])
    else:
        registers, local = _of_assembly(binary.asm.get("amdgcn", ""))
    return Resources(kernel, binary.metadata.shared, registers, local, _digest_of(binary.asm.get("cubin") or binary.asm.get("hsaco")))


# Sections of an ELF file that decide what a kernel does. Others hold names, lines of the source, and notes of the compiler.
_CODE = b".text", b".nv.constant", b".rodata"


def _digest_of(elf: bytes | None) -> str:
    if not elf:
        return ""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, start + index * size) for index in range(count)]
    texts = sections[names][4]
    named = sorted((elf[texts + name : elf.index(b"\0", texts + name)], offset, length) for name, _, _, _, offset, length in sections)
    digest = hashlib.sha256()
    for name, offset, length in named:
        if name.startswith(_CODE):
            digest.update(name + b"\0" + elf[offset : offset + length])
    return digest.hexdigest()[:16]


def machine_code(kernels: Sequence[Resources]) -> str | None:
    """Digest of the machine code of all kernels of a config; None where it is unknown, and for a config without own kernels."""
    if not kernels or not all(kernel.code for kernel in kernels):
        return None
    return content_digest({"kernels": [(kernel.kernel, kernel.code) for kernel in kernels]})


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
