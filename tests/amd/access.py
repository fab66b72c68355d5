"""Memory instructions of CDNA: global and buffer accesses, atomics, the LDS, scratch, cache control."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.amd.listing import Instruction, Operand
from tests.amd.memory import Store
from tests.amd.scalar import reader, signed, writer
from tests.amd.vector import source
from tests.amd.wave import LANES, MASK32, Action, Array, Wave

_WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ushort": 2, "sshort": 2, "short": 2}
_WIDTHS |= {"ubyte": 1, "sbyte": 1, "byte": 1}
_WIDTHS |= {"short_d16": 2, "short_d16_hi": 2, "byte_d16_hi": 1, "ubyte_d16": 1, "ubyte_d16_hi": 1}
_CACHES = {"sc0", "sc1", "nt", "offset", "offen"}
_LDS_WIDTHS = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "u16": 2, "b16": 2, "u8": 1, "b8": 1, "i8": 1, "i16": 2}


def memory_access(instruction: Instruction) -> Action:
    """Returns the action of an instruction named global_, buffer_, scratch_, ds_ or s_load_."""
    name = instruction.name
    if name == "buffer_wbl2":
        return _write_back
    if name == "buffer_inv":
        return lambda w: w.group.memory.invalidate(w.group.die)
    if name.startswith("s_load_dword"):
        return _scalar_load(instruction)
    if name.startswith("ds_"):
        return _local(instruction)
    unit, how, kind = name.split("_", 2)
    if how == "atomic":
        return _atomic(kind, instruction)
    if unknown := set(instruction.modifiers) - _CACHES:
        raise NotImplementedError(f"modifiers {unknown} of {instruction.text}")
    if unit == "scratch":
        return _scratch(how, kind, instruction)
    places = _buffer_places if unit == "buffer" else _global_places
    if how == "load":
        return _load(kind, instruction, places(instruction, instruction.operands[1:]))
    data, where = instruction.operands[0], instruction.operands[1:]
    if unit == "global":
        data, where = instruction.operands[1], (instruction.operands[0], *instruction.operands[2:])
    return _store(kind, instruction, data, places(instruction, where))


Places = Callable[[Wave], tuple[Array, Array]]
"""Lanes that access memory, and their addresses."""


def _offset(instruction: Instruction) -> int:
    return int(instruction.modifiers.get("offset", "0"), 0)


def _global_places(instruction: Instruction, operands: tuple[Operand, ...]) -> Places:
    address, base = operands
    constant = _offset(instruction)
    if base.text == "off":
        of = source(address, "u64")
        return lambda w: (lanes := w.active(), of(w)[lanes].astype(np.int64) + constant)
    index, start = address.index, reader(base, 2)
    return lambda w: (lanes := w.active(), w.v[index][lanes].astype(np.int64) + (start(w) + constant))


def _buffer_places(instruction: Instruction, operands: tuple[Operand, ...]) -> Places:
    """A lane whose offset is not below the size of the buffer stores nothing and loads zeros."""
    address, resource, scalar = operands
    constant, offen = _offset(instruction), "offen" in instruction.modifiers
    base, more = reader(resource, 2), reader(scalar)
    index, first = address.index, resource.index

    def act(w: Wave) -> tuple[Array, Array]:
        lanes = w.active()
        offsets = (w.v[index][lanes].astype(np.int64) if offen else np.zeros(len(lanes), np.int64)) + constant
        inside = offsets < w.s[first + 2]
        start = (base(w) & (1 << 48) - 1) + more(w)
        return lanes[inside], offsets[inside] + start

    return act


def _load(kind: str, instruction: Instruction, places: Places) -> Action:
    width, index = _WIDTHS[kind], instruction.operands[0].index
    past, checked = "sc1" in instruction.modifiers, instruction.name.startswith("buffer")
    signs, high, low = kind in ("sshort", "sbyte"), kind.endswith("d16_hi"), kind.endswith("d16")

    def act(w: Wave) -> None:
        w.take_stores()
        w.issued.append(None)
        lanes, addresses = places(w)
        memory = w.group.memory
        if checked and len(lanes) < len(w.active()) and not (high or low):
            for word in range(-(-width // 4)):
                w.v[index + word][w.active()] = 0
        if not len(lanes):
            return
        data = memory.load(w.group.die, addresses, width, past)
        if width >= 4:
            words = np.ascontiguousarray(data).view(np.uint32)
            for word in range(width // 4):
                w.v[index + word][lanes] = words[:, word]
            return
        values = np.ascontiguousarray(data).view(f"u{width}")[:, 0].astype(np.uint32)
        if signs:
            values = (values.astype(np.int32) << (32 - 8 * width) >> (32 - 8 * width)).view(np.uint32)
        old = w.v[index][lanes]
        w.v[index][lanes] = old & 0xFFFF | values << 16 if high else old & 0xFFFF0000 | values if low else values

    return act


def _store(kind: str, instruction: Instruction, data: Operand, places: Places) -> Action:
    width, index, shift = _WIDTHS[kind], data.index, 16 if kind.endswith("d16_hi") else 0
    through = "sc1" in instruction.modifiers

    def act(w: Wave) -> None:
        lanes, addresses = places(w)
        if not len(lanes):
            w.issued.append(None)
            return
        words = w.v[index : index + max(1, width // 4)][:, lanes] >> np.uint32(shift)
        values = np.ascontiguousarray(words.T).view(np.uint8)[:, :width].copy()
        w.issued.append(Store(w.group.die, addresses, values, through))
        if not w.group.memory.weak:
            w.take_stores()

    return act


def _write_back(w: Wave) -> None:
    memory, die = w.group.memory, w.group.die
    last = memory.begin_write_back(die)
    w.issued.append((die, last) if last else None)


_ATOMICS: dict[str, Callable[[int, int, int, int], int]] = {
    # (old, data, what is compared, bits)
    "add": lambda a, b, _, bits: a + b & (1 << bits) - 1,
    "sub": lambda a, b, _, bits: a - b & (1 << bits) - 1,
    "swap": lambda _a, b, _, _bits: b,
    "or": lambda a, b, _, _bits: a | b,
    "and": lambda a, b, _, _bits: a & b,
    "xor": lambda a, b, _, _bits: a ^ b,
    "umax": lambda a, b, _, _bits: max(a, b),
    "umin": lambda a, b, _, _bits: min(a, b),
    "smax": lambda a, b, _, bits: a if signed(a, bits) > signed(b, bits) else b,
    "smin": lambda a, b, _, bits: a if signed(a, bits) < signed(b, bits) else b,
    "cmpswap": lambda a, b, wanted, _: b if a == wanted else a,
}


def _atomic(kind: str, instruction: Instruction) -> Action:
    wide = kind.endswith("_x2")
    operation, size, words = _ATOMICS[kind.removesuffix("_x2")], 8 if wide else 4, 2 if wide else 1
    returns = "sc0" in instruction.modifiers
    to = instruction.operands[0].index
    address, data, base = instruction.operands[1:] if returns else instruction.operands
    places, index = _global_places(instruction, (address, base)), data.index

    def value(w: Wave, register: int, lane: int) -> int:
        low = int(w.v[register, lane])
        return low | int(w.v[register + 1, lane]) << 32 if wide else low

    def act(w: Wave) -> None:
        w.take_stores()
        w.issued.append(None)
        lanes, addresses = places(w)
        for lane, at in zip(lanes.tolist(), addresses.tolist(), strict=True):
            word = w.group.memory.word(w.group.die, at, size)
            old = int.from_bytes(word.tobytes(), "little")
            new = operation(old, value(w, index, lane), value(w, index + words, lane) if "cmp" in kind else 0, 8 * size)
            word[:] = np.frombuffer(new.to_bytes(size, "little"), np.uint8)
            if returns:
                for part in range(words):
                    w.v[to + part, lane] = old >> 32 * part & MASK32

    return act


def _scalar_load(instruction: Instruction) -> Action:
    to, base, last = instruction.operands
    count = int(instruction.name.removeprefix("s_load_dword").removeprefix("x") or 1)
    start, more, constant = reader(base, 2), reader(last), _offset(instruction)

    def act(w: Wave) -> None:
        w.take_stores()
        at = np.array([(start(w) + more(w) + constant) & ~3], np.int64)
        words = w.group.memory.load(w.group.die, at, 4 * count, past=False).view(np.uint32)[0]
        for word in range(count):
            if to.kind == "s":
                w.s[to.index + word] = int(words[word])
            else:
                writer(to, count)(w, int(words.view(np.uint64)[0]) if count == 2 else int(words[0]))

    return act


# The LDS


def _local(instruction: Instruction) -> Action:
    name = instruction.name.removeprefix("ds_")
    if name == "swizzle_b32":
        return _swizzle(instruction)
    if name in ("bpermute_b32", "permute_b32"):
        return _permute(instruction, pushes=name == "permute_b32")
    if unknown := set(instruction.modifiers) - {"offset", "offset0", "offset1"}:
        raise NotImplementedError(f"modifiers {unknown} of {instruction.text}")
    match = re.match(r"(read|write)(2st64|2|)_([bui]\d+)(_d16_hi|_d16|)$", name)
    if not match:
        raise NotImplementedError(instruction.text)
    reads, two, kind, part = match[1] == "read", match[2], match[3], match[4]
    width = _LDS_WIDTHS[kind]
    if two:
        scale = width * (64 if two == "2st64" else 1)
        offsets = [scale * int(instruction.modifiers.get(key, 0)) for key in ("offset0", "offset1")]
    else:
        offsets = [_offset(instruction)]
    operands = instruction.operands
    address = operands[1 if reads else 0].index
    data = [operand.index for operand in operands[1:]]
    if reads:
        data = [operands[0].index + at * max(1, width // 4) for at in range(len(offsets))]
    bytes_of = np.arange(width)

    def places(w: Wave, offset: int, lanes: Array) -> Array:
        first = w.v[address][lanes].astype(np.int64) + offset
        assert not len(first) or int(first.max()) + width <= len(w.group.shared), f"{instruction.text} beyond the LDS"
        return first[:, None] + bytes_of

    def read(w: Wave) -> None:
        lanes = w.active()
        chunks = [w.group.shared[places(w, offset, lanes)] for offset in offsets]
        for values, register in zip(chunks, data, strict=True):
            _to_registers(w, values, register, lanes, kind, part)

    def write(w: Wave) -> None:
        lanes = w.active()
        for offset, register in zip(offsets, data, strict=True):
            words = w.v[register : register + max(1, width // 4)][:, lanes] >> np.uint32(16 if part == "_d16_hi" else 0)
            w.group.shared[places(w, offset, lanes)] = np.ascontiguousarray(words.T).view(np.uint8)[:, :width]

    return read if reads else write


def _to_registers(w: Wave, values: Array, register: int, lanes: Array, kind: str, part: str) -> None:
    width = values.shape[1]
    if width >= 4:
        words = np.ascontiguousarray(values).view(np.uint32)
        for word in range(width // 4):
            w.v[register + word][lanes] = words[:, word]
        return
    numbers = np.ascontiguousarray(values).view(f"{'i' if kind[0] == 'i' else 'u'}{width}")[:, 0].astype(np.int32).view(np.uint32)
    old = w.v[register][lanes]
    if part == "_d16_hi":
        numbers = old & 0xFFFF | numbers << 16
    elif part == "_d16":
        numbers = old & 0xFFFF0000 | numbers & 0xFFFF
    w.v[register][lanes] = numbers


def _permute(instruction: Instruction, pushes: bool) -> Action:
    to, address, data = (operand.index for operand in instruction.operands)
    constant = _offset(instruction)

    def act(w: Wave) -> None:
        lanes = (w.v[address].astype(np.int64) + constant >> 2) & 63
        given: Any = np.where(w.mask, w.v[data], 0)
        if pushes:
            values = np.zeros(LANES, np.uint32)
            values[lanes[w.mask]] = w.v[data][w.mask]
        else:
            values = given[lanes]
        w.write(to, values)

    return act


def _swizzle(instruction: Instruction) -> Action:
    match = re.match(r"swizzle\((\w+),(.*)\)", instruction.modifiers["offset"])
    assert match, instruction.text
    lanes = np.arange(LANES)
    low, rest = lanes & 31, lanes & 32
    how, given = match[1], match[2]
    if how == "SWAP":
        picked = low ^ int(given)
    elif how == "REVERSE":
        picked = low ^ (int(given) - 1)
    elif how == "BROADCAST":
        size, which = (int(number) for number in given.split(","))
        picked = low & ~(size - 1) | which
    elif how == "QUAD_PERM":
        picked = low & ~3 | np.array([int(number) for number in given.split(",")])[low & 3]
    elif how == "BITMASK_PERM":
        picked = np.zeros(LANES, np.int64)
        for bit, letter in enumerate(reversed(given.strip('"'))):
            of = low >> bit & 1
            picked |= {"0": of * 0, "1": of * 0 + 1, "p": of, "i": 1 - of}[letter] << bit
    else:
        raise NotImplementedError(instruction.text)
    lanes = rest | picked
    to, data = (operand.index for operand in instruction.operands)
    return lambda w: w.write(to, np.where(w.mask, w.v[data], 0).astype(np.uint32)[lanes])


# Scratch: registers that spilled


def _scratch(how: str, kind: str, instruction: Instruction) -> Action:
    """Operands: registers and places, of which one is `off`; the other is an address within the lane's scratch."""
    width, constant = _WIDTHS[kind], _offset(instruction)
    operands = instruction.operands
    data, where = (operands[0], operands[1:]) if how == "load" else (operands[1], (operands[0], *operands[2:]))
    vector, base = where
    more = reader(base) if base.text != "off" else None
    index = data.index

    def act(w: Wave) -> None:
        lanes = w.active()
        first = np.full(len(lanes), constant + (more(w) if more else 0), np.int64)
        if vector.kind == "v":
            first += w.v[vector.index][lanes]
        places = first[:, None] + np.arange(width)
        if how == "load":
            _to_registers(w, w.scratch[lanes[:, None], places], index, lanes, "u", "")
        else:
            words = w.v[index : index + max(1, width // 4)][:, lanes]
            w.scratch[lanes[:, None], places] = np.ascontiguousarray(words.T).view(np.uint8)[:, :width]

    return act
