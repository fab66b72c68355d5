"""Scalar instructions of CDNA, as functions on whole numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable

from tests.amd.listing import Instruction, Operand
from tests.amd.wave import MASK32, MASK64, Action, Wave

Read = Callable[[Wave], int]


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def reader(operand: Operand, words: int = 1) -> Read:
    """The value of a scalar operand of so many words, unsigned."""
    index, kind = operand.index, operand.kind
    if kind == "constant":
        bits = operand.value if isinstance(operand.value, int) else int.from_bytes(struct.pack("<f", operand.value), "little")
        value = bits & (MASK64 if words == 2 else MASK32)
        return lambda _: value
    if kind == "exec":
        if words == 2:
            return lambda w: w.exec
        return lambda w: (w.exec >> 32 * index) & MASK32
    if kind == "scc":
        return lambda w: w.scc
    if kind != "s":
        raise NotImplementedError(f"scalar operand {operand.text}")
    if words == 2:
        return lambda w: w.s[index] | w.s[index + 1] << 32
    return lambda w: w.s[index]


def writer(operand: Operand, words: int = 1) -> Callable[[Wave, int], None]:
    """Sets a scalar register, or a pair of them."""
    index = operand.index
    if operand.kind == "exec" and words == 2:
        return lambda w, value: w.set_exec(value & MASK64)
    if operand.kind == "exec":
        shift = 32 * index
        return lambda w, value: w.set_exec(w.exec & ~(MASK32 << shift) | (value & MASK32) << shift)
    if operand.kind != "s":
        raise NotImplementedError(f"scalar result {operand.text}")

    def pair(w: Wave, value: int) -> None:
        w.s[index], w.s[index + 1] = value & MASK32, value >> 32 & MASK32

    def one(w: Wave, value: int) -> None:
        w.s[index] = value & MASK32

    return pair if words == 2 else one


def _field(bits: int, signs: bool, size: int) -> Callable[[int, int], int]:
    def take(value: int, which: int) -> int:
        first, width = which & (bits - 1), which >> 16 & 0x7F
        field = value >> first & ((1 << width) - 1)
        return (signed(field, width) if signs and width else field) & ((1 << size) - 1)

    return take


def _overflows(value: int) -> int:
    return int(not -(1 << 31) <= value < 1 << 31)


# Result and carry, or what else SCC becomes; None leaves it.
_TWO: dict[str, Callable[[int, int, int], tuple[int, int | None]]] = {
    "add_u32": lambda a, b, _: (a + b, a + b >> 32),
    "addc_u32": lambda a, b, c: (a + b + c, a + b + c >> 32),
    "sub_u32": lambda a, b, _: (a - b, int(a < b)),
    "subb_u32": lambda a, b, c: (a - b - c, int(a < b + c)),
    "add_i32": lambda a, b, _: (a + b, _overflows(signed(a) + signed(b))),
    "sub_i32": lambda a, b, _: (a - b, _overflows(signed(a) - signed(b))),
    "min_i32": lambda a, b, _: (min(signed(a), signed(b)), int(signed(a) < signed(b))),
    "max_i32": lambda a, b, _: (max(signed(a), signed(b)), int(signed(a) > signed(b))),
    "min_u32": lambda a, b, _: (min(a, b), int(a < b)),
    "max_u32": lambda a, b, _: (max(a, b), int(a > b)),
    "mul_i32": lambda a, b, _: (a * b, None),
    "mul_hi_u32": lambda a, b, _: (a * b >> 32, None),
    "mul_hi_i32": lambda a, b, _: (signed(a) * signed(b) >> 32, None),
    "pack_ll_b32_b16": lambda a, b, _: (a & 0xFFFF | b << 16, None),
    "pack_lh_b32_b16": lambda a, b, _: (a & 0xFFFF | b & 0xFFFF0000, None),
    "pack_hh_b32_b16": lambda a, b, _: (a >> 16 | b & 0xFFFF0000, None),
    **{f"lshl{n}_add_u32": lambda a, b, _, n=n: ((a << n) + b, int((a << n) + b > MASK32)) for n in (1, 2, 3, 4)},  # type: ignore[misc]
}
_LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_SHIFTS: dict[str, Callable[[int, int, int], int]] = {
    "lshl_b": lambda a, b, bits: a << (b & (bits - 1)),
    "lshr_b": lambda a, b, bits: a >> (b & (bits - 1)),
    "ashr_i": lambda a, b, bits: signed(a, bits) >> (b & (bits - 1)),
    "bfm_b": lambda a, b, bits: ((1 << (a & (bits - 1))) - 1) << (b & (bits - 1)),
    "bfe_u": lambda a, b, bits: _field(bits, False, bits)(a, b),
    "bfe_i": lambda a, b, bits: _field(bits, True, bits)(a, b),
}
_ONE: dict[str, Callable[[int, int], tuple[int, bool]]] = {
    # (value, bits) -> the result, and whether SCC is set when the result is not zero.
    "mov": lambda a, _: (a, False),
    "not": lambda a, _: (~a, True),
    "brev": lambda a, bits: (int(f"{a:0{bits}b}"[::-1], 2), False),
    "abs_i": lambda a, _: (abs(signed(a)), True),
    "bcnt1_i32": lambda a, _: (a.bit_count(), True),
    "bcnt0_i32": lambda a, bits: (bits - a.bit_count(), True),
    "ff1_i32": lambda a, _: ((a & -a).bit_length() - 1, False),
    "flbit_i32": lambda a, bits: (bits - a.bit_length() if a else -1, False),
    "sext_i32_i8": lambda a, _: (signed(a, 8), False),
    "sext_i32_i16": lambda a, _: (signed(a, 16), False),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_BRANCHES: dict[str, Callable[[Wave], bool]] = {
    "branch": lambda _: True,
    "cbranch_scc0": lambda w: not w.scc,
    "cbranch_scc1": lambda w: bool(w.scc),
    "cbranch_vccz": lambda w: not w.s[106] | w.s[107],
    "cbranch_vccnz": lambda w: bool(w.s[106] | w.s[107]),
    "cbranch_execz": lambda w: not w.exec,
    "cbranch_execnz": lambda w: bool(w.exec),
}
_NOTHING = ("nop", "sleep", "setprio", "icache_inv", "dcache_inv", "dcache_wb", "inst_prefetch", "setreg_imm32_b32")


def scalar(instruction: Instruction, labels: dict[str, int]) -> Action:
    """Returns the action of an instruction named s_..., except loads."""
    name, operands = instruction.name.removeprefix("s_"), instruction.operands
    if name in _NOTHING:
        return lambda _: None
    if name in _BRANCHES:
        return _branch(_BRANCHES[name], labels[operands[0].text])
    if name == "endpgm":
        return _end
    if name == "barrier":
        return _barrier
    if name == "waitcnt":
        return _wait(int(instruction.modifiers.get("vmcnt", 63)))
    if name.startswith(("cmp_", "cmpk_", "bitcmp")):
        return _comparison(name, operands)
    if name.endswith("_saveexec_b64"):
        return _save_exec(_LOGIC[name.removesuffix("_saveexec_b64")], operands)
    if name.startswith("bitset"):
        return _set_bit(name, operands)
    if name == "getreg_b32":
        return _die_of_wave(operands)
    if name in ("movk_i32", "addk_i32", "mulk_i32"):
        return _with_constant(name, operands)
    return _arithmetic(name, operands)


def _branch(taken: Callable[[Wave], bool], target: int) -> Action:
    def act(w: Wave) -> None:
        if taken(w):
            w.pc = target

    return act


def _end(w: Wave) -> None:
    w.ended = True


def _barrier(w: Wave) -> None:
    w.at_barrier = True


def _wait(left: int) -> Action:
    return (lambda w: w.complete(left)) if left < 63 else (lambda _: None)


def _comparison(name: str, operands: tuple[Operand, ...]) -> Action:
    if name.startswith("bitcmp"):
        words = 2 if name.endswith("64") else 1
        a, b, wanted = reader(operands[0], words), reader(operands[1]), int(name[6])
        return lambda w: setattr(w, "scc", int((a(w) >> (b(w) & (32 * words - 1)) & 1) == wanted))
    _, how, kind = name.split("_")
    words = 2 if kind.endswith("64") else 1
    a, b, compare = reader(operands[0], words), reader(operands[1], words), _COMPARE[how]
    if kind == "i32":
        return lambda w: setattr(w, "scc", int(compare(signed(a(w)), signed(b(w)))))
    return lambda w: setattr(w, "scc", int(compare(a(w), b(w))))


def _set_bit(name: str, operands: tuple[Operand, ...]) -> Action:
    words, wanted = 2 if name.endswith("64") else 1, int(name[6])
    put, old, which = writer(operands[0], words), reader(operands[0], words), reader(operands[1])

    def act(w: Wave) -> None:
        bit = 1 << (which(w) & (32 * words - 1))
        put(w, old(w) | bit if wanted else old(w) & ~bit)

    return act


def _die_of_wave(operands: tuple[Operand, ...]) -> Action:
    """Reads the number of the die, the only supported hardware register. Dies are numbered through all ranks."""
    if "HW_REG_XCC_ID" not in operands[1].text:
        raise NotImplementedError(f"s_getreg_b32 {operands[1].text}")
    put = writer(operands[0])
    return lambda w: put(w, next(number for number, die in enumerate(w.group.memory.dies) if die is w.group.die))


def _save_exec(logic: Callable[[int, int], int], operands: tuple[Operand, ...]) -> Action:
    put, source = writer(operands[0], 2), reader(operands[1], 2)

    def act(w: Wave) -> None:
        value, before = source(w), w.exec
        w.set_exec(logic(value, before) & MASK64)
        put(w, before)
        w.scc = int(w.exec != 0)

    return act


def _with_constant(name: str, operands: tuple[Operand, ...]) -> Action:
    put, old, constant = writer(operands[0]), reader(operands[0]), signed(int(operands[1].value), 16)
    if name == "movk_i32":
        return lambda w: put(w, constant)
    if name == "mulk_i32":
        return lambda w: put(w, old(w) * constant)

    def add(w: Wave) -> None:
        before = signed(old(w))
        w.scc = _overflows(before + constant)
        put(w, before + constant)

    return add


def _arithmetic(name: str, operands: tuple[Operand, ...]) -> Action:
    words = 2 if name.endswith("64") else 1
    if name.startswith("cselect"):
        put, a, b = writer(operands[0], words), reader(operands[1], words), reader(operands[2], words)
        return lambda w: put(w, a(w) if w.scc else b(w))
    if name.startswith("bitset"):
        put, old, bit, raised = writer(operands[0], words), reader(operands[0], words), reader(operands[1]), int(name[6])
        return lambda w: put(w, old(w) & ~(1 << (bit(w) & (32 * words - 1))) | raised << (bit(w) & (32 * words - 1)))
    if name in _TWO:
        return _two(_TWO[name], operands)
    stem = name[: name.rindex("_") + 2] if "_" in name else name  # lshl_b of lshl_b32
    if stem in _SHIFTS:
        shift, bits = _SHIFTS[stem], 32 * words
        tells = stem != "bfm_b"
        return _telling(writer(operands[0], words), _applied(operands, words, 1, lambda a, b: shift(a, b, bits)), bits, tells)
    logic = name.removesuffix("_b32").removesuffix("_b64")
    if logic in _LOGIC and len(operands) == 3:
        return _telling(writer(operands[0], words), _applied(operands, words, words, _LOGIC[logic]), 32 * words, True)
    one = next((key for key in (name, stem, logic) if key in _ONE), None) or name.rpartition("_")[0]
    if one not in _ONE:
        raise NotImplementedError(f"s_{name}")
    source, function = reader(operands[1], words), _ONE[one]
    scc = function(1, 32)[1]
    wide = words if not one.endswith("_i32") else 1  # counts have one word
    return _telling(writer(operands[0], wide), lambda w: function(source(w), 32 * words)[0], 32 * wide, scc)


def _applied(operands: tuple[Operand, ...], first: int, second: int, function: Callable[[int, int], int]) -> Read:
    a, b = reader(operands[1], first), reader(operands[2], second)
    return lambda w: function(a(w), b(w))


def _telling(put: Callable[[Wave, int], None], value: Read, bits: int, tells: bool) -> Action:
    """Sets a register, and SCC to whether that is not zero."""
    most = (1 << bits) - 1

    def act(w: Wave) -> None:
        result = value(w) & most
        put(w, result)
        if tells:
            w.scc = int(result != 0)

    return act


def _two(function: Callable[[int, int, int], tuple[int, int | None]], operands: tuple[Operand, ...]) -> Action:
    put, a, b = writer(operands[0]), reader(operands[1]), reader(operands[2])

    def act(w: Wave) -> None:
        result, carry = function(a(w), b(w), w.scc)
        put(w, result)
        if carry is not None:
            w.scc = carry

    return act
