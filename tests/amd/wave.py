"""The state of a wave: registers, lanes that run, memory accesses on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.amd.memory import Die, Memory, Store, WriteBack

Array = np.ndarray[Any, Any]
LANES = 64
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
_NUMBERS = np.arange(LANES)


def lanes_of(bits: int) -> Array:
    """bool [64] of the bits of a mask."""
    return np.unpackbits(np.array([bits], np.uint64).view(np.uint8), bitorder="little").astype(bool)


def bits_of(lanes: Array) -> int:
    """The mask of bool [64]."""
    return int(np.packbits(np.broadcast_to(lanes, (LANES,)), bitorder="little").view(np.uint64)[0])


@dataclass(eq=False)
class Group:
    """State that the waves of a workgroup share."""

    memory: Memory
    die: Die
    shared: Array
    """uint8: the LDS."""


@dataclass(eq=False)
class Wave:
    """`run` is what lanes execute: `exec`; `ended` and `at_barrier` tell the machine why it stands."""

    group: Group
    s: list[int] = field(default_factory=lambda: [0xDEAD0000] * 128)
    v: Array = field(default_factory=lambda: np.full((512, LANES), 0xFFC0DEAD, np.uint32))
    scratch: Array = field(default_factory=lambda: np.zeros((LANES, 0), np.uint8))
    exec: int = MASK64
    mask: Array = field(default_factory=lambda: np.ones(LANES, bool))
    scc: int = 0
    pc: int = 0
    at_barrier: bool = False
    ended: bool = False
    issued: list[Store | tuple[Die, WriteBack] | None] = field(default_factory=list)
    """Memory accesses in order, None for loads, which are done at once. `s_waitcnt vmcnt` counts them."""

    def set_exec(self, bits: int) -> None:
        if bits != self.exec:
            self.exec = bits
            self.mask = lanes_of(bits)

    def write(self, register: int, values: Any) -> None:
        """Writes these values to a register in the active lanes."""
        if self.exec == MASK64:
            self.v[register] = values
        else:
            np.copyto(self.v[register], values, where=self.mask)

    def active(self) -> Array:
        """Numbers of the lanes that run."""
        return _NUMBERS if self.exec == MASK64 else _NUMBERS[self.mask]

    def complete(self, left: int = 0) -> None:
        """Completes all accesses except the last `left`."""
        count = len(self.issued) - left
        if count <= 0:
            return
        memory = self.group.memory
        done, self.issued = self.issued[:count], self.issued[count:]
        for one in done:
            if isinstance(one, Store):
                memory.store(one)
            elif one:
                memory.end_write_back(*one)

    def take_stores(self) -> None:
        """Moves this wave's stores to the L2, so that its later loads and atomics find them."""
        memory = self.group.memory
        for at, one in enumerate(self.issued):
            if isinstance(one, Store):
                memory.store(one)
                self.issued[at] = None


Action = Callable[[Wave], None]
