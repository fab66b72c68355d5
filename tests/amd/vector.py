"""Vector instructions of CDNA, as numpy functions on 64 lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.amd.listing import Instruction, Operand
from tests.amd.scalar import reader, writer
from tests.amd.wave import LANES, MASK32, Action, Array, Wave, bits_of, lanes_of

Source = Callable[[Wave], Any]

_TYPES: dict[str, type[Any]] = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "f64": np.float64,
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
}  # fmt: skip
_NUMBERS = np.arange(LANES, dtype=np.uint32)


def _constant(value: float, kind: str) -> Any:
    """A literal as an instruction on this type takes it: a number with a point is a float, others are bits."""
    to = _TYPES[kind]
    size = np.dtype(to).itemsize
    if isinstance(value, float):
        floats: dict[int, type[Any]] = {2: np.float16, 4: np.float32, 8: np.float64}
        return np.array(value, floats[size]).view(to)[()]
    bits = np.array(value & ((1 << 8 * size) - 1), np.uint64)
    return bits.astype(f"u{size}").view(to)[()]


def source(operand: Operand, kind: str, select: str = "") -> Source:
    """The values of an operand, an array of the lanes or one number. `select` is the part that SDWA takes of each."""
    values = _signless(operand, kind, select)
    if operand.absolute:
        plain = values
        values = lambda w: np.abs(plain(w))  # noqa: E731
    if operand.negated:
        positive = values
        values = lambda w: -positive(w)  # noqa: E731
    return values


def _signless(operand: Operand, kind: str, select: str) -> Source:
    to, size = _TYPES[kind], np.dtype(_TYPES[kind]).itemsize
    index = operand.index
    if operand.kind == "constant":
        constant = _constant(operand.value, kind)
        return lambda _: constant
    if operand.kind == "v" and size == 8:
        return lambda w: (w.v[index].astype(np.uint64) | w.v[index + 1].astype(np.uint64) << np.uint64(32)).view(to)
    if operand.kind == "v" and select not in ("", "DWORD"):
        shift, mask = (8 * int(select[-1]), 0xFF) if select.startswith("BYTE") else (16 * int(select[-1]), 0xFFFF)
        part: Source = lambda w: w.v[index] >> np.uint32(shift) & np.uint32(mask)  # noqa: E731
        return (lambda w: part(w).view(to)) if size == 4 else (lambda w: part(w).astype(np.uint16).view(to))
    if operand.kind == "v":
        if size == 2:
            return lambda w: w.v[index].astype(np.uint16).view(to)
        return lambda w: w.v[index].view(to)
    words = 2 if size == 8 else 1
    read = reader(operand, words)
    unsigned: type[Any] = np.uint64 if size == 8 else np.uint32
    if size == 2:
        return lambda w: np.array(read(w), unsigned).astype(np.uint16).view(to)[()]
    return lambda w: np.array(read(w), unsigned).view(to)[()]


def put(operand: Operand, values_of: Source) -> Action:
    """Writes a result of 16, 32 or 64 bits to the lanes that run."""
    index = operand.index

    def act(w: Wave) -> None:
        values = values_of(w)
        size = values.dtype.itemsize
        if size == 8:
            bits = values.view(np.uint64)
            w.write(index, bits.astype(np.uint32))
            w.write(index + 1, (bits >> np.uint64(32)).astype(np.uint32))
        elif size == 4:
            w.write(index, values.view(np.uint32))
        else:
            w.write(index, values.view(np.uint16).astype(np.uint32))

    return act


def _u(value: int) -> np.uint32:
    return np.uint32(value)


def _fma(a: Any, b: Any, c: Any) -> Any:
    """In float64, whose product of two float32 is exact; the sum may be rounded twice."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def _permuted(a: Any, b: Any, which: Any) -> Any:
    """Bytes of a (4 to 7) and b (0 to 3)."""
    both = np.uint64(a) << np.uint64(32) | np.uint64(b)
    words = np.zeros(LANES, np.uint32)
    for byte in range(4):
        select = (np.uint32(which) >> _u(8 * byte) & _u(0xFF)) * np.ones(LANES, np.uint32)
        taken = both >> (select & _u(7)).astype(np.uint64) * np.uint64(8) & np.uint64(0xFF)
        assert bool((select <= 7).all() or (select == 0x0C).all()), "signs are not permuted"
        words |= np.where(select == 0x0C, 0, taken).astype(np.uint32) << _u(8 * byte)
    return words


_OF_8_BITS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fnuz).float().numpy().view(np.uint32).astype(np.uint64)
"""The bits of a float32 for each byte, which is an e4m3fnuz on gfx942."""


def _of_8_bits(a: Any) -> Any:
    return _OF_8_BITS[a & _u(0xFF)]


def _extracted(value: Any, first: Any, width: Any) -> Any:
    """The field, shifted to the top by what is left of it and back, which extends the sign of a signed one."""
    first, width = first & 31, width & 31
    room = np.where(width == 0, 31, 32 - width).astype(np.uint32)
    bits = (value.view(np.uint32) >> first.astype(np.uint32)) << room
    return np.where(width == 0, 0, bits.view(value.dtype) >> room.astype(value.dtype)).astype(value.dtype)


def _to_integer(values: Any, kind: str) -> Any:
    """Truncated and saturated; NaN is 0."""
    limits = np.iinfo(_TYPES[kind])
    return np.clip(np.nan_to_num(np.trunc(np.float64(values))), limits.min, limits.max).astype(_TYPES[kind])


def _class(values: Any, which: Any) -> Any:
    bits = values.view(np.uint32)
    exponent, fraction, negative = bits >> _u(23) & _u(255), bits & _u(0x7FFFFF), bits >> _u(31) == 1
    nan, infinite = (exponent == 255) & (fraction != 0), (exponent == 255) & (fraction == 0)
    zero, small = (exponent == 0) & (fraction == 0), (exponent == 0) & (fraction != 0)
    normal = (exponent > 0) & (exponent < 255)
    quiet = nan & (fraction >> _u(22) == 1)
    kinds = [nan & ~quiet, quiet]
    kinds += [kind & negative for kind in (infinite, normal, small, zero)] + [
        kind & ~negative for kind in (zero, small, normal, infinite)
    ]
    return np.logical_or.reduce([kind & ((which >> _u(bit) & _u(1)) == 1) for bit, kind in enumerate(kinds)])


def _median(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _high(a: Any, b: Any, to: type[Any]) -> Any:
    return (np.multiply(a, b, dtype=to) >> to(32)).astype(np.uint32)


# Name: the types of the operands, and the result.
_OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "mov_b32": ("u32", lambda a: a),
    "mov_b64": ("u64", lambda a: a),
    "accvgpr_read_b32": ("u32", lambda a: a),
    "accvgpr_write_b32": ("u32", lambda a: a),
    "accvgpr_mov_b32": ("u32", lambda a: a),
    "not_b32": ("u32", lambda a: ~a),
    "bfrev_b32": ("u32", lambda a: _reversed(a)),
    "ffbh_u32": ("u32", lambda a: np.where(a == 0, -1, 31 - _top_bit(a)).astype(np.int32)),
    "ffbl_b32": ("u32", lambda a: np.where(a == 0, -1, _top_bit(a & -a)).astype(np.int32)),
    "add_u32": ("u32 u32", lambda a, b: a + b),
    "sub_u32": ("u32 u32", lambda a, b: a - b),
    "subrev_u32": ("u32 u32", lambda a, b: b - a),
    "and_b32": ("u32 u32", lambda a, b: a & b),
    "or_b32": ("u32 u32", lambda a, b: a | b),
    "xor_b32": ("u32 u32", lambda a, b: a ^ b),
    "xnor_b32": ("u32 u32", lambda a, b: ~(a ^ b)),
    "lshlrev_b32": ("u32 u32", lambda a, b: b << (a & _u(31))),
    "lshrrev_b32": ("u32 u32", lambda a, b: b >> (a & _u(31))),
    "ashrrev_i32": ("i32 i32", lambda a, b: b >> (a & np.int32(31))),
    "lshlrev_b64": ("u32 u64", lambda a, b: b << (np.uint64(a) & np.uint64(63))),
    "lshrrev_b64": ("u32 u64", lambda a, b: b >> (np.uint64(a) & np.uint64(63))),
    "ashrrev_i64": ("u32 i64", lambda a, b: b >> (np.int64(a) & np.int64(63))),
    "lshlrev_b16": ("u16 u16", lambda a, b: b << (a & np.uint16(15))),
    "lshrrev_b16": ("u16 u16", lambda a, b: b >> (a & np.uint16(15))),
    "mul_lo_u32": ("u32 u32", lambda a, b: a * b),
    "mul_hi_u32": ("u32 u32", lambda a, b: _high(a, b, np.uint64)),
    "mul_hi_i32": ("i32 i32", lambda a, b: _high(a, b, np.int64)),
    "mul_u32_u24": ("u32 u32", lambda a, b: (a & _u(0xFFFFFF)) * (b & _u(0xFFFFFF))),
    "mul_i32_i24": ("i32 i32", lambda a, b: (a << 8 >> 8) * (b << 8 >> 8)),
    "mul_lo_u16": ("u16 u16", lambda a, b: a * b),
    "add_u16": ("u16 u16", lambda a, b: a + b),
    "sub_u16": ("u16 u16", lambda a, b: a - b),
    "min_u32": ("u32 u32", np.minimum),
    "max_u32": ("u32 u32", np.maximum),
    "min_i32": ("i32 i32", np.minimum),
    "max_i32": ("i32 i32", np.maximum),
    "add_f32": ("f32 f32", lambda a, b: a + b),
    "sub_f32": ("f32 f32", lambda a, b: a - b),
    "subrev_f32": ("f32 f32", lambda a, b: b - a),
    "mul_f32": ("f32 f32", lambda a, b: a * b),
    "min_f32": ("f32 f32", np.fmin),
    "max_f32": ("f32 f32", np.fmax),
    "add_f16": ("f16 f16", lambda a, b: a + b),
    "sub_f16": ("f16 f16", lambda a, b: a - b),
    "mul_f16": ("f16 f16", lambda a, b: a * b),
    "min_f16": ("f16 f16", np.fmin),
    "max_f16": ("f16 f16", np.fmax),
    "ldexp_f32": ("f32 i32", lambda a, b: np.ldexp(np.float64(a), b).astype(np.float32)),
    "pack_b32_f16": ("u16 u16", lambda a, b: np.uint32(a) | np.uint32(b) << _u(16)),
    "mbcnt_lo_u32_b32": ("u32 u32", lambda a, b: _counted(a, np.minimum(_NUMBERS, 32)) + b),
    "mbcnt_hi_u32_b32": ("u32 u32", lambda a, b: _counted(a, np.maximum(_NUMBERS, 32) - 32) + b),
    "bfm_b32": ("u32 u32", lambda a, b: ((_u(1) << (a & _u(31))) - _u(1)) << (b & _u(31))),
    "add3_u32": ("u32 u32 u32", lambda a, b, c: a + b + c),
    "lshl_add_u32": ("u32 u32 u32", lambda a, b, c: (a << (b & _u(31))) + c),
    "add_lshl_u32": ("u32 u32 u32", lambda a, b, c: (a + b) << (c & _u(31))),
    "xad_u32": ("u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "and_or_b32": ("u32 u32 u32", lambda a, b, c: a & b | c),
    "or3_b32": ("u32 u32 u32", lambda a, b, c: a | b | c),
    "lshl_or_b32": ("u32 u32 u32", lambda a, b, c: a << (b & _u(31)) | c),
    "bfe_u32": ("u32 u32 u32", _extracted),
    "bfe_i32": ("i32 u32 u32", _extracted),
    "bfi_b32": ("u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "perm_b32": ("u32 u32 u32", _permuted),
    "alignbit_b32": ("u32 u32 u32", lambda a, b, c: _aligned(a, b, c)),
    "mad_u32_u24": ("u32 u32 u32", lambda a, b, c: (a & _u(0xFFFFFF)) * (b & _u(0xFFFFFF)) + c),
    "mad_i32_i24": ("i32 i32 i32", lambda a, b, c: (a << 8 >> 8) * (b << 8 >> 8) + c),
    "lshl_add_u64": ("u64 u32 u64", lambda a, b, c: (a << (np.uint64(b) & np.uint64(7))) + c),
    "fma_f32": ("f32 f32 f32", _fma),
    "fma_f16": ("f16 f16 f16", lambda a, b, c: (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float16)),
    "max3_f32": ("f32 f32 f32", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3_f32": ("f32 f32 f32", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "med3_f32": ("f32 f32 f32", _median),
    "max3_i32": ("i32 i32 i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_i32": ("i32 i32 i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "max3_u32": ("u32 u32 u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_u32": ("u32 u32 u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3_i32": ("i32 i32 i32", _median),
    "cvt_f32_u32": ("u32", np.float32),
    "cvt_f32_i32": ("i32", np.float32),
    "cvt_u32_f32": ("f32", lambda a: _to_integer(a, "u32")),
    "cvt_i32_f32": ("f32", lambda a: _to_integer(a, "i32")),
    "cvt_f16_f32": ("f32", np.float16),
    "cvt_f32_f16": ("f16", np.float32),
    "cvt_f32_ubyte0": ("u32", lambda a: np.float32(a & _u(255))),
    "cvt_pk_f32_fp8": ("u32", lambda a: _of_8_bits(a) | _of_8_bits(a >> _u(8)) << np.uint64(32)),
    "cvt_pkrtz_f16_f32": ("f32 f32", lambda a, b: _toward_zero(a) | _toward_zero(b) << _u(16)),
    "rcp_f32": ("f32", lambda a: np.float32(1) / a),
    "rcp_iflag_f32": ("f32", lambda a: np.float32(1) / a),
    "rsq_f32": ("f32", lambda a: np.float32(1) / np.sqrt(a)),
    "sqrt_f32": ("f32", np.sqrt),
    "exp_f32": ("f32", lambda a: np.exp2(np.float64(a)).astype(np.float32)),
    "log_f32": ("f32", lambda a: np.log2(np.float64(a)).astype(np.float32)),
    "trunc_f32": ("f32", np.trunc),
    "floor_f32": ("f32", np.floor),
    "ceil_f32": ("f32", np.ceil),
    "rndne_f32": ("f32", np.rint),
    "fract_f32": ("f32", lambda a: a - np.floor(a)),
    # Division: scaling and its correction are left out, and the last step divides.
    "div_fmas_f32": ("f32 f32 f32", _fma),
    "div_fixup_f32": ("f32 f32 f32", lambda _, b, c: c / b),
}


def _top_bit(values: Any) -> Any:
    return np.floor(np.log2(np.maximum(values, 1).astype(np.float64)))


def _aligned(a: Any, b: Any, shift: Any) -> Any:
    both = np.uint64(a) << np.uint64(32) | np.uint64(b)
    return (both >> (np.uint64(shift) & np.uint64(31))).astype(np.uint32)


def _reversed(values: Any) -> Any:
    bits = np.atleast_1d(np.uint32(values))
    return np.array([int(f"{int(word):032b}"[::-1], 2) for word in bits], np.uint32)


def _counted(bits: Any, below: Array) -> Any:
    """Bits below a position of each lane."""
    masked = np.uint64(bits) & ((np.uint64(1) << below.astype(np.uint64)) - np.uint64(1))
    return np.array([int(word).bit_count() for word in masked], np.uint32)


def _toward_zero(values: Any) -> Any:
    rounded = np.float16(values)
    beyond = np.abs(np.float32(rounded)) > np.abs(values)
    return np.where(beyond, rounded.view(np.uint16) - np.uint16(1), rounded.view(np.uint16)).astype(np.uint32)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lg": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b),
    "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)),
}  # fmt: skip


def vector(instruction: Instruction) -> Action:
    """Returns the action of an instruction named v_...."""
    name, operands, modifiers = instruction.name.removeprefix("v_"), instruction.operands, instruction.modifiers
    if unknown := set(modifiers) - _MODIFIERS:
        raise NotImplementedError(f"modifiers {unknown} of {instruction.text}")
    if name.startswith(("cmp_", "cmpx_")):
        return _comparison(name, operands)
    if name.startswith("mfma_"):
        return _matrix(name, operands)
    if name.startswith("pk_"):
        return _packed(name.removeprefix("pk_"), operands, modifiers)
    if name in _SPECIAL:
        return _SPECIAL[name](operands, modifiers)
    if name not in _OPERATIONS:
        raise NotImplementedError(instruction.text)
    types, function = _OPERATIONS[name]
    selects = [modifiers.get(f"src{at}_sel", "") for at in range(3)]
    if "op_sel" in modifiers:  # which half of a register an operand of 16 bits is
        halves = _flags(modifiers["op_sel"], 3)
        assert len(types.split()) == len(operands) - 1, instruction.text
        selects = [f"WORD_{half}" if half else select for half, select in zip(halves, selects, strict=True)]
        assert not any(_flags(modifiers["op_sel"], 4)[len(operands) - 1 :]), instruction.text
    sources = [source(operand, kind, select) for operand, kind, select in zip(operands[1:], types.split(), selects, strict=False)]
    if any(key.startswith(("quad_perm", "row_")) for key in modifiers):
        return _across_lanes(function, operands, sources, modifiers)
    if modifiers.get("dst_sel", "DWORD") != "DWORD":
        return _part_of_word(operands[0], lambda w: function(*(argument(w) for argument in sources)), modifiers)
    if "clamp" in modifiers:
        plain, function = function, lambda *values: np.clip(plain(*values), 0, 1)
    match sources:
        case [a]:
            return put(operands[0], lambda w: function(a(w)))
        case [a, b]:
            return put(operands[0], lambda w: function(a(w), b(w)))
        case [a, b, c]:
            return put(operands[0], lambda w: function(a(w), b(w), c(w)))
    raise NotImplementedError(instruction.text)


_MODIFIERS = {
    "src0_sel", "src1_sel", "dst_sel", "dst_unused", "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp", "quad_perm", "row_shl",
    "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast", "row_mask", "bank_mask", "bound_ctrl",
}  # fmt: skip


def _comparison(name: str, operands: tuple[Operand, ...]) -> Action:
    kind = name.rpartition("_")[2]
    how = name.split("_")[1]
    to, second = writer(operands[0], 2), "u32" if how == "class" else kind
    function = _class if how == "class" else _COMPARE[how]
    a, b = source(operands[1], kind), source(operands[2], second)

    def act(w: Wave) -> None:
        to(w, bits_of(function(a(w), b(w))) & w.exec)

    return act


def _across_lanes(
    function: Callable[..., Any], operands: tuple[Operand, ...], sources: list[Source], modifiers: dict[str, str]
) -> Action:
    """DPP: the first operand comes from other lanes. A lane without one keeps its result, or takes zero with bound_ctrl."""
    row, within = _NUMBERS.astype(np.int64) & ~15, _NUMBERS.astype(np.int64) & 15
    how = next(key for key in modifiers if key.startswith(("quad_perm", "row_")) and key != "row_mask")
    modifier = modifiers[how]
    there = np.ones(LANES, bool)
    if how == "quad_perm":
        lanes = (_NUMBERS & ~np.uint32(3)) + np.array([int(digit) for digit in re.findall(r"\d", modifier)])[_NUMBERS & 3]
    elif how in ("row_shl", "row_shr"):
        moved = within + (int(modifier) if how == "row_shl" else -int(modifier))
        there, lanes = (moved >= 0) & (moved < 16), row + (moved & 15)
    elif how == "row_ror":
        lanes = row + (within - int(modifier)) % 16
    elif how == "row_mirror":
        lanes = row + 15 - within
    elif how == "row_half_mirror":
        lanes = (_NUMBERS.astype(np.int64) & ~7) + 7 - (_NUMBERS & 7)
    elif how == "row_newbcast":
        lanes = row + int(modifier)
    elif how == "row_bcast" and modifier == "15":
        lanes, there = np.maximum(row - 1, 0), _NUMBERS >= 16
    elif how == "row_bcast" and modifier == "31":
        lanes, there = np.full(LANES, 31), _NUMBERS >= 32
    else:
        raise NotImplementedError(how)
    rows, banks = int(modifiers.get("row_mask", "0xf"), 0), int(modifiers.get("bank_mask", "0xf"), 0)
    chosen = (rows >> (_NUMBERS >> 4) & 1).astype(bool) & (banks >> (_NUMBERS >> 2 & 3) & 1).astype(bool)
    bound, index = "bound_ctrl" in modifiers, operands[0].index
    lanes = lanes.astype(np.int64)

    def act(w: Wave) -> None:
        first = np.broadcast_to(sources[0](w), (LANES,))[lanes]
        good = there & w.mask[lanes]
        first = np.where(good, first, np.zeros(1, first.dtype)).astype(first.dtype)
        result = function(first, *(argument(w) for argument in sources[1:]))
        np.copyto(w.v[index], result.view(np.uint32), where=w.mask & chosen & (good | bound))

    return act


def _part_of_word(to: Operand, values_of: Source, modifiers: dict[str, str]) -> Action:
    """SDWA: a byte or half of the result; the rest is zero, or stays."""
    select = modifiers["dst_sel"]
    shift, mask = (8 * int(select[-1]), 0xFF) if select.startswith("BYTE") else (16 * int(select[-1]), 0xFFFF)
    keeps = modifiers.get("dst_unused") == "UNUSED_PRESERVE"
    assert keeps or modifiers.get("dst_unused") == "UNUSED_PAD"
    index = to.index

    def act(w: Wave) -> None:
        values = values_of(w)
        bits = values.view(f"u{values.dtype.itemsize}").astype(np.uint32) & _u(mask)
        rest = w.v[index] & _u(~(mask << shift) & MASK32) if keeps else _u(0)
        w.write(index, bits << _u(shift) | rest)

    return act


def _flags(text: str, count: int) -> list[int]:
    flags = [int(digit) for digit in re.findall(r"\d", text)]
    return (flags + [0] * count)[:count]


def _packed(name: str, operands: tuple[Operand, ...], modifiers: dict[str, str]) -> Action:
    """Two results: of float32 in two registers, of float16 in one."""
    count = len(operands) - 1
    low, high = _flags(modifiers.get("op_sel", ""), count), _flags(modifiers.get("op_sel_hi", "[1,1,1]"), count)
    signs = [_flags(modifiers.get(key, ""), count) for key in ("neg_lo", "neg_hi")]
    wide = name.endswith(("f32", "mov_b32"))
    kind = name.rpartition("_")[2].replace("b", "u")
    function = _OPERATIONS[{"mov_b32": "mov_b32"}.get(name, name)][1]

    def half(operand: Operand, which: int, sign: int) -> Source:
        if operand.kind == "constant":
            numbers = source(operand, kind)
        elif wide:
            numbers = source(Operand(operand.kind, operand.index + which), kind)
        else:
            numbers = source(operand, kind, f"WORD_{which}")
        return (lambda w: -numbers(w)) if sign else numbers

    halves = [
        [half(*arguments) for arguments in zip(operands[1:], which, sign, strict=True)]
        for which, sign in zip((low, high), signs, strict=True)
    ]
    index = operands[0].index

    def act(w: Wave) -> None:
        if name == "mov_b32":
            results = [halves[0][0](w), halves[1][1](w)]
        else:
            results = [function(*(argument(w) for argument in part)) for part in halves]
        if wide:
            for at, values in enumerate(results):
                w.write(index + at, values.view(np.uint32))
        else:
            bits = [values.view(np.uint16).astype(np.uint32) for values in results]
            w.write(index, bits[0] | bits[1] << _u(16))

    return act


def _matrix(name: str, operands: tuple[Operand, ...]) -> Action:
    """One product of matrices of M x K and K x N, spread over the lanes of a wave, added in float32."""
    match = re.match(r"mfma_f32_(\d+)x(\d+)x(\d+)_?(f16|bf16|f32)(_1k)?$", name)
    if not match:
        raise NotImplementedError(name)
    m, n, k, kind = int(match[1]), int(match[2]), int(match[3]), match[4]
    groups = LANES // m
    depth = k // groups
    to, first, second, third = operands
    registers = np.arange(m * n // LANES)[:, None]
    lanes = np.arange(LANES)[None, :]
    rows = registers // 4 * (4 * groups) + lanes // n * 4 + registers % 4
    columns = np.broadcast_to(lanes % n, rows.shape)

    def elements(w: Wave, operand: Operand) -> Array:
        words = w.v[operand.index : operand.index + operand.count].T  # [lanes, words]
        if kind == "f32":
            values = words.view(np.float32) if words.flags.c_contiguous else np.ascontiguousarray(words).view(np.float32)
        else:
            halves = np.stack([words & _u(0xFFFF), words >> _u(16)], 2).reshape(LANES, -1)
            if kind == "bf16":
                values = (halves << _u(16)).view(np.float32)
            else:
                values = halves.astype(np.uint16).view(np.float16).astype(np.float32)
        assert values.shape[1] == depth
        return values.reshape(groups, m, depth).transpose(1, 0, 2).reshape(m, k).astype(np.float64)

    def act(w: Wave) -> None:
        # Matrix instructions ignore which lanes run.
        product = elements(w, first) @ elements(w, second).T
        if third.kind == "v":
            added: Any = w.v[third.index : third.index + len(registers)].view(np.float32).astype(np.float64)
        else:
            added = np.float64(third.value)
        w.v[to.index : to.index + len(registers)] = (product[rows, columns] + added).astype(np.float32).view(np.uint32)

    return act


def _fmac(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
    a, b, c = source(operands[1], "f32"), source(operands[2], "f32"), source(operands[0], "f32")
    return put(operands[0], lambda w: _fma(a(w), b(w), c(w)))


def _fma_in_order(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
    """Both fmamk and fmaak list a, b and what is added as they are used."""
    a, b, c = (source(operand, "f32") for operand in operands[1:])
    return put(operands[0], lambda w: _fma(a(w), b(w), c(w)))


def _chosen(operands: tuple[Operand, ...], modifiers: dict[str, str]) -> Action:
    a, b = (source(operands[1 + at], "u32", modifiers.get(f"src{at}_sel", "")) for at in (0, 1))
    which = reader(operands[3], 2)
    if any(operand.negated or operand.absolute for operand in operands):
        a, b = (_bits(source(operands[1 + at], "f32")) for at in (0, 1))
    return put(operands[0], lambda w: np.where(lanes_of(which(w)), b(w), a(w)))


def _bits(values: Source) -> Source:
    return lambda w: values(w).view(np.uint32)


def _carrying(subtracts: bool, reverses: bool, carries: bool) -> Callable[[tuple[Operand, ...], dict[str, str]], Action]:
    def make(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
        a, b = source(operands[2], "u32"), source(operands[3], "u32")
        if reverses:
            a, b = b, a
        carry_of = reader(operands[4], 2) if carries else None
        index, carry_writer = operands[0].index, writer(operands[1], 2)

        def act(w: Wave) -> None:
            carry = lanes_of(carry_of(w)).astype(np.int64) if carry_of else 0
            x, y = np.int64(a(w)), np.int64(b(w))
            total = x - y - carry if subtracts else x + y + carry
            w.write(index, (total & MASK32).astype(np.uint32))
            carry_writer(w, bits_of(np.asarray(total < 0 if subtracts else total > MASK32)) & w.exec)

        return act

    return make


def _multiply_add(kind: str) -> Callable[[tuple[Operand, ...], dict[str, str]], Action]:
    def make(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
        wide = kind.replace("32", "64")
        a, b, c = source(operands[2], kind), source(operands[3], kind), source(operands[4], wide)
        to = _TYPES[wide]
        return put(operands[0], lambda w: to(a(w)) * to(b(w)) + c(w))  # the carry out is not used by compilers

    return make


def _scaled(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
    values, mask_writer = source(operands[2], "f32"), writer(operands[1], 2)
    act = put(operands[0], lambda w: values(w) + np.float32(0))

    def both(w: Wave) -> None:
        act(w)
        mask_writer(w, 0)

    return both


def _first_lane(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
    to, values = writer(operands[0]), source(operands[1], "u32")

    def act(w: Wave) -> None:
        first = (w.exec & -w.exec).bit_length() - 1 if w.exec else 0
        to(w, int(np.broadcast_to(values(w), (LANES,))[first]))

    return act


def _read_lane(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
    to, index, lane = writer(operands[0]), operands[1].index, reader(operands[2])
    return lambda w: to(w, int(w.v[index, lane(w) & 63]))


def _write_lane(operands: tuple[Operand, ...], _: dict[str, str]) -> Action:
    index, value, lane = operands[0].index, reader(operands[1]), reader(operands[2])

    def act(w: Wave) -> None:
        w.v[index, lane(w) & 63] = value(w)

    return act


_SPECIAL: dict[str, Callable[[tuple[Operand, ...], dict[str, str]], Action]] = {
    "nop": lambda *_: lambda _: None,
    "fmac_f32": _fmac,
    "fmamk_f32": _fma_in_order,
    "fmaak_f32": _fma_in_order,
    "cndmask_b32": _chosen,
    "add_co_u32": _carrying(False, False, False),
    "addc_co_u32": _carrying(False, False, True),
    "sub_co_u32": _carrying(True, False, False),
    "subb_co_u32": _carrying(True, False, True),
    "subrev_co_u32": _carrying(True, True, False),
    "subbrev_co_u32": _carrying(True, True, True),
    "mad_u64_u32": _multiply_add("u32"),
    "mad_i64_i32": _multiply_add("i32"),
    "div_scale_f32": _scaled,
    "readfirstlane_b32": _first_lane,
    "readlane_b32": _read_lane,
    "writelane_b32": _write_lane,
}
