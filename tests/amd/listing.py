"""Parses the assembly listing of a kernel: instructions with operands, labels, resources, arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = re.compile(r"^[a-z]\w+$")
_LABEL = re.compile(r'^("[^"]+"|[.\w$]+):')
_REGISTERS = re.compile(r"^([sva])(?:(\d+)|\[(\d+):(\d+)\])$")
_SPECIAL = {"vcc": ("s", 106, 2), "vcc_lo": ("s", 106, 1), "vcc_hi": ("s", 107, 1), "m0": ("s", 124, 1)}
_SPECIAL |= {"exec": ("exec", 0, 2), "exec_lo": ("exec", 0, 1), "exec_hi": ("exec", 1, 1), "scc": ("scc", 0, 1)}
ACCUMULATORS = 256
"""Index of the first accumulation register among the vector registers of a wave."""


@dataclass(frozen=True)
class Operand:
    """A register, a constant, or a word such as `off`. Kinds are s, v, exec, scc, constant and word."""

    kind: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    negated: bool = False
    absolute: bool = False
    text: str = ""


@dataclass(frozen=True)
class Instruction:
    """`name` lacks the suffix of an encoding. Modifiers are the words after the operands, with the text after their colon."""

    name: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    text: str


@dataclass(frozen=True)
class Listing:
    """A kernel as it runs."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]
    settings: dict[str, int]
    """The directives `.amdhsa_*` of the kernel, without that prefix."""
    arguments: tuple[tuple[int, int, str], ...]
    """(offset, size, kind) of each argument."""
    waves: int = field(default=1)


def operand(text: str) -> Operand:
    """Parses one operand."""
    plain = text.strip()
    negated = plain.startswith("-") and not re.match(r"^-[\d.]", plain)
    plain = plain.removeprefix("-") if negated else plain
    absolute = plain.startswith("|")
    plain = plain.strip("|")
    match = _REGISTERS.match(plain)
    if match:
        first = int(match[2] or match[3])
        count = 1 if match[2] else int(match[4]) - first + 1
        kind, base = ("v", ACCUMULATORS) if match[1] == "a" else (match[1], 0)
        return Operand(kind, base + first, count, 0, negated, absolute, plain)
    if plain in _SPECIAL:
        kind, first, count = _SPECIAL[plain]
        return Operand(kind, first, count, 0, negated, absolute, plain)
    if re.match(r"^-?(0x[0-9a-f]+|\d+)$", plain):
        return Operand("constant", value=int(plain, 0), negated=negated, absolute=absolute, text=plain)
    if re.match(r"^-?\d*\.\d+(e[-+]?\d+)?$", plain):
        return Operand("constant", value=float(plain), negated=negated, absolute=absolute, text=plain)
    return Operand("word", text=plain)


def _split(text: str) -> list[str]:
    """Splits a text at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[(]*[\])])", text) if part.strip()]


def instruction(line: str) -> Instruction:
    """Parses one line without comment."""
    name, _, rest = line.strip().partition(" ")
    parts = _split(rest.strip())
    modifiers: dict[str, str] = {}
    if name == "s_waitcnt":
        modifiers = dict(re.findall(r"(\w+)\((\d+)\)", rest))
        parts = []
    elif parts:
        # Modifiers follow the last operand, separated by blanks. Some lines hold modifiers only.
        words = re.split(r"\s+(?![^\[(]*[\])])", parts[-1])
        keep = 0 if re.match(r"^[a-z_0-9]+:", words[0]) or words[0] in ("sc0", "sc1", "nt") else 1
        for word in words[keep:]:
            key, _, value = word.partition(":")
            modifiers[key] = value
        parts = [*parts[:-1], *words[:keep]]
    name = re.sub(r"_(e32|e64|dpp|sdwa|e64_dpp)$", "", name)
    return Instruction(name, tuple(operand(part) for part in parts), modifiers, line.strip())


def read(listing: str) -> Listing:
    """Parses the listing of one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    settings: dict[str, int] = {}
    ended = False
    for whole in listing.splitlines():
        line = whole.partition(";")[0].partition("//")[0].strip()
        ended = ended or (line.startswith(".section") and "rodata" in line)
        label = _LABEL.match(line)
        if label and not ended:
            labels[label[1]] = len(code)
            line = line[label.end() :].strip()
        if line.startswith(".amdhsa_") and len(line.split()) == 2 and line.split()[1].isdigit():
            settings[line.split()[0].removeprefix(".amdhsa_")] = int(line.split()[1])
        if not ended and line and _NAME.match(line.split()[0]):
            code.append(instruction(" ".join(line.split())))
    match = re.search(r"\.max_flat_workgroup_size:\s+(\d+)", listing)
    assert match
    return Listing(tuple(code), labels, settings, _arguments(listing), int(match[1]) // 64)


def _arguments(listing: str) -> tuple[tuple[int, int, str], ...]:
    block = listing[listing.index("amdhsa.kernels:") :]
    block = block[block.index(".args:") :]
    arguments: list[dict[str, str]] = []
    for line in block.splitlines()[1:]:
        entry = re.match(r"^\s{6,}(- )?\s*\.(\w+):\s+(\S+)", line)
        if not entry:
            break
        if entry[1]:
            arguments.append({})
        arguments[-1][entry[2]] = entry[3]
    return tuple((int(argument["offset"]), int(argument["size"]), argument["value_kind"]) for argument in arguments)
