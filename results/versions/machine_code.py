"""Digests of the machine code of shipped winners under the Triton at hand, to compare with those of another Triton:

    PYTHONPATH=. python results/versions/machine_code.py 37 > triton-$VERSION.txt     # every 37th winner

One line a kernel: problem, variant, kernel, digest of its instructions. Everything is compiled offline for the winner's GPU.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from typing import Any

from autotax.db.shipped import winners
from autotax.kernels.context import Context
from autotax.kernels.offline import compile_offline
from autotax.software import triton_version


def instructions(cubin: bytes) -> bytes:
    """The sections of an ELF file that hold instructions: those named `.text.KERNEL`."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + index * size) for index in range(count)]
    texts = sections[names][4]
    found = b""
    for name, _, _, _, offset, length in sections:
        if cubin[texts + name :].startswith(b".text."):
            found += cubin[offset : offset + length]
    return found


class Digesting(Context):
    """Prints the digest of each kernel that would be launched."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """See Context.launch."""
        binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
        digest = hashlib.sha256(instructions(binary.asm["cubin"])).hexdigest()[:16]
        print(f"  {kernel.__name__} {digest}", flush=True)


def main(every: int) -> None:
    """Compiles each `every`-th shipped winner of an NVIDIA GPU."""
    print(f"# Triton {triton_version()}")
    chosen = [winner for winner in winners() if winner.place.hardware.backend == "cuda" and winner.config.values]
    for winner in chosen[::every]:
        print(f"{winner.problem.key} {winner.config.variant}", flush=True)
        compile_offline(winner.problem, winner.config, winner.place.hardware, Digesting)


if __name__ == "__main__":
    main(int(sys.argv[1]))
