"""The memory of emulated GPUs: stores reach other programs late, and loads may return old values.

Each die of a GPU has an L2. A store first waits in its wave, then lies in the L2 of its die, and reaches memory when a write-back
ends. Loads take what the L2 holds, new or old. A load with `sc1` looks past clean lines; atomics act on memory. So code that is
right here does not depend on when a cache gives its lines back. L1 is not modelled.

Addresses are those of the process, and every access must lie in a tensor that kernels were given.
"""

from __future__ import annotations

import ctypes
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]

ABSENT, CLEAN, DIRTY, FLYING = 0, 1, 2, 3
LINE = 64
PAGE = 4096
"""The first address: numpy treats an array at address 0 as missing."""


class Wild(Exception):
    """An access outside all tensors."""


@dataclass(eq=False)
class WriteBack:
    """Lines of an L2 on their way to memory."""

    places: Array
    addresses: Array
    values: Array


@dataclass(eq=False)
class Die:
    """The L2 of a die: the value and the state of each byte of all tensors."""

    data: Array
    state: Array
    clean: list[Array] = field(default_factory=list)
    dirty: list[tuple[Array, Array]] = field(default_factory=list)
    flying: list[WriteBack] = field(default_factory=list)


@dataclass(eq=False)
class Store:
    """A store that a wave has issued and its L2 has not received yet."""

    die: Die
    addresses: Array
    values: Array
    through: bool


class Memory:
    """All tensors that kernels may touch, and the caches before them. `weak=False`: every store is seen at once."""

    def __init__(self, seed: int, weak: bool = True) -> None:
        self.random = random.Random(seed)
        self.weak = weak
        everything: Any = (ctypes.c_uint8 * ((1 << 47) - PAGE)).from_address(PAGE)
        self.host: Array = np.frombuffer(everything, np.uint8)
        self.starts: Array = np.zeros(0, np.int64)
        self.ends: Array = np.zeros(0, np.int64)
        self.offsets: Array = np.zeros(0, np.int64)
        self.total = 0
        self.backed: Array = np.zeros(0, bool)
        self.dies: list[Die] = []
        self.kept: list[Any] = []
        self.lock = threading.Lock()

    def die(self) -> Die:
        """One more L2."""
        self.dies.append(Die(np.zeros(self.total, np.uint8), np.zeros(self.total, np.uint8)))
        return self.dies[-1]

    def admit(self, tensor: Tensor) -> None:
        """Allows kernels to access the storage of this tensor."""
        storage = tensor.untyped_storage()
        self.admit_range(storage.data_ptr(), storage.nbytes(), storage)

    def admit_range(self, start: int, size: int, keep: Any) -> None:
        """Allows kernels to access these addresses, which `keep` keeps alive. Several ranks may call this at once."""
        with self.lock:
            self.add(start, size, keep)

    def add(self, start: int, size: int, keep: Any) -> None:
        if not size or bool(np.any((self.starts == start) & (self.ends == start + size))):
            return
        inside = (self.starts < start + size) & (self.ends > start)
        assert not inside.any(), "storage that overlaps another, which must have been freed"
        self.kept.append(keep)
        place = self.total + start % LINE  # lines of places are lines of addresses
        room = -(-(start % LINE + size) // LINE) * LINE
        self.backed = np.concatenate([self.backed, np.zeros(room, bool)])
        self.backed[place : place + size] = True
        for die in self.dies:
            die.data = np.concatenate([die.data, np.zeros(room, np.uint8)])
            die.state = np.concatenate([die.state, np.zeros(room, np.uint8)])
        self.total += room
        at = int(np.searchsorted(self.starts, start))
        self.starts = np.insert(self.starts, at, start)
        self.ends = np.insert(self.ends, at, start + size)
        self.offsets = np.insert(self.offsets, at, place - start)

    def located(self, addresses: Array, width: int) -> Array:
        """Places of the first bytes."""
        at = np.searchsorted(self.starts, addresses, side="right") - 1
        if at.size and (at.min() < 0 or bool((addresses + width > self.ends[at]).any())):
            bad = int(addresses[(at < 0) | (addresses + width > self.ends[at])][0])
            raise Wild(f"access of {width} bytes at {bad:#x}, outside all tensors")
        return addresses + self.offsets[at]

    def load(self, die: Die, addresses: Array, width: int, past: bool) -> Array:
        """uint8 [number of addresses, width]. `past` looks past clean lines."""
        bytes_of = np.arange(width)
        places = self.located(addresses, width)[:, None] + bytes_of
        data: Array = self.host[addresses[:, None] + (bytes_of - PAGE)]
        if not self.weak:
            return data
        state = die.state[places]
        held = state >= DIRTY if past else state != ABSENT
        if held.any():
            data = np.where(held, die.data[places], data)
        if not past and not held.all():
            lines = np.unique(places[~held] // LINE)
            fetched = (lines[:, None] * LINE + np.arange(LINE)).ravel()
            fetched = fetched[self.backed[fetched] & (die.state[fetched] == ABSENT)]
            die.data[fetched] = self.host[self.addresses_of(fetched) - PAGE]
            die.state[fetched] = CLEAN
            die.clean.append(fetched)
        return data

    def addresses_of(self, places: Array) -> Array:
        """The addresses of these places."""
        order = np.argsort(self.starts + self.offsets)
        firsts = (self.starts + self.offsets)[order]
        return places - self.offsets[order][np.searchsorted(firsts, places, side="right") - 1]

    def store(self, issued: Store) -> None:
        """The L2 takes a store, or hands it on to memory if it goes through."""
        width = issued.values.shape[1]
        bytes_of = np.arange(width)
        places = (self.located(issued.addresses, width)[:, None] + bytes_of).ravel()
        addresses = (issued.addresses[:, None] + bytes_of).ravel()
        values = issued.values.ravel()
        if issued.through or not self.weak:
            self.forget(issued.die, places)
            self.host[addresses - PAGE] = values
            return
        issued.die.data[places] = values
        issued.die.state[places] = DIRTY
        issued.die.dirty.append((places, addresses))

    def begin_write_back(self, die: Die) -> WriteBack | None:
        """Starts the write-back of all dirty bytes of an L2. Returns the write-back to wait for."""
        if die.dirty:
            places = np.concatenate([places for places, _ in die.dirty])
            addresses = np.concatenate([addresses for _, addresses in die.dirty])
            die.dirty.clear()
            mine = die.state[places] == DIRTY
            places, addresses = places[mine], addresses[mine]
            die.state[places] = FLYING
            die.flying.append(WriteBack(places, addresses, die.data[places]))
        return die.flying[-1] if die.flying else None

    def end_write_back(self, die: Die, last: WriteBack) -> None:
        """Completes a write-back and all earlier ones."""
        while last in die.flying:
            one = die.flying.pop(0)
            self.host[one.addresses - PAGE] = one.values
            landed = one.places[die.state[one.places] == FLYING]
            die.state[landed] = CLEAN
            die.clean.append(landed)
            for later in die.flying:  # bytes that are on their way twice
                die.state[later.places[die.state[later.places] == CLEAN]] = FLYING

    def invalidate(self, die: Die) -> None:
        """Drops all clean bytes of an L2, so that loads fetch them again."""
        for places in die.clean:
            die.state[places[die.state[places] == CLEAN]] = ABSENT
        die.clean.clear()

    def drain(self, die: Die) -> None:
        """Writes an L2 back and invalidates it, as between two kernels."""
        last = self.begin_write_back(die)
        if last:
            self.end_write_back(die, last)
        self.invalidate(die)

    def passes(self, die: Die) -> None:
        """Lets some time pass: the L2 may evict lines, and write-backs end."""
        chance = self.random.random()
        if chance < 0.002:
            self.begin_write_back(die)
        elif chance < 0.01 and die.flying:
            self.end_write_back(die, die.flying[0])

    def word(self, die: Die, address: int, width: int) -> Array:
        """The bytes of a word of memory, for an atomic; the L2 of the die holds them no longer."""
        (place,) = self.located(np.array([address]), width)
        places = slice(int(place), int(place) + width)
        data: Array = self.host[address - PAGE : address - PAGE + width]
        state = die.state[places]
        if self.weak and bool((state >= DIRTY).any()):
            held = state >= DIRTY
            data[held] = die.data[places][held]
        self.forget(die, np.arange(places.start, places.stop))
        return data

    def forget(self, die: Die, places: Array) -> None:
        """Drops these bytes from an L2, and from write-backs that would restore an old value."""
        for one in die.flying if bool((die.state[places] == FLYING).any()) else ():
            keep = ~np.isin(one.places, places)
            one.places, one.addresses, one.values = one.places[keep], one.addresses[keep], one.values[keep]
        die.state[places] = ABSENT
