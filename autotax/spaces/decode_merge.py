"""Search spaces of decode merge, one function per variant; before them what they share: rows per program, and warps."""

from __future__ import annotations

from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.problem import power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware, lanes
from autotax.operators.decode_merge import DecodeMerge

MOST_TOGETHER = 16
MOST_WORDS = 1 << 21
"""Most words that a rank sends to another: 16 MiB. With more, polling costs more than a flag."""
MOST_COLUMNS = 64
"""Most columns of a block per thread. Variants with words allow fewer, because they keep several sums."""


def together(problem: DecodeMerge) -> tuple[Value, ...]:
    """Choices for the rows that a program handles together: heads of one token that go to the same ranks."""
    return tuple(n for n in range(1, MOST_TOGETHER + 1) if problem.out_heads % n == 0)


def width(problem: DecodeMerge) -> int:
    """Columns of a block."""
    return max(16, power_of_two(problem.head_dim))


def rows_for(problem: DecodeMerge, hardware: Hardware, rows: int, most: int = MOST_TOGETHER) -> int:
    """The fewest rows per program that leave at most one program per processor; otherwise the largest choice."""
    choices = [int(n) for n in together(problem) if int(n) <= most]
    return next((n for n in choices if rows // n <= hardware.processors), choices[-1])


def space_of(
    name: str,
    problem: DecodeMerge,
    hardware: Hardware,
    extra: dict[str, tuple[Value, ...]],
    firsts: list[dict[str, Value]],
    constraints: tuple[Constraint, ...] = (),
) -> VariantSpace:
    """The space of a variant with parameters `extra` in addition to rows and warps; `firsts` are the values to try first."""
    warps: tuple[Value, ...] = (1, 2, 4, 8) if hardware.on_gpu else (4,)
    parameters: dict[str, tuple[Value, ...]] = {"rows": together(problem), "num_warps": warps} | extra
    most = MOST_COLUMNS * lanes(hardware)
    fits = Constraint(
        ("rows", "num_warps"),
        lambda rows, warps: rows == 1 or not hardware.on_gpu or power_of_two(rows) * width(problem) <= most * warps,
        "the rows do not fit in registers",
    )
    defaults: dict[str, Value] = {"num_warps": 4}
    seeds = tuple(dict.fromkeys(Config.of(name, defaults | first) for first in firsts))
    space = VariantSpace(name, parameters, (fits, *constraints), seeds)
    return replace(space, seeds=tuple(seed for seed in space.seeds if space.why_not(seed) is None))


def at_once(name: str, problem: DecodeMerge, hardware: Hardware, columns: int, most: int) -> VariantSpace | None:
    """The space of `words` or `compact`: `columns` per word, at most `most` columns per thread. None for too many words."""
    if problem.batch * problem.out_heads * problem.head_dim > columns * MOST_WORDS:
        return None
    cut = power_of_two(problem.head_dim) == problem.head_dim
    parts = tuple(n for n in (1, 2, 4) if n == 1 or (cut and problem.head_dim // n >= 32))
    extra: dict[str, tuple[Value, ...]] = {"parts": parts, "per_processor": (1, 2, 4) if hardware.on_gpu else (1,)}
    lane = most * lanes(hardware)
    constraints = (
        Constraint(
            ("num_warps", "per_processor"),
            lambda warps, programs: warps * programs <= 8,
            "the programs of a processor do not fit in its registers",
        ),
        Constraint(
            ("rows", "num_warps", "parts"),
            lambda rows, warps, parts: (
                rows == 1 or not hardware.on_gpu or power_of_two(rows) * width(problem) <= lane * warps * parts
            ),
            "the words do not fit in registers",
        ),
    )
    some, most_parts = parts[len(parts) // 2], parts[-1]
    # Parts, programs per processor, warps, and rounds. In a second round a program sends while its first block is in flight.
    ways = [(most_parts, 4, 2, 1), (some, 4, 2, 2), (1, 1, 4, 1), (1, 4, 1, 2), (most_parts, 1, 4, 1), (1, 2, 4, 1)]
    firsts: list[dict[str, Value]] = []
    for number, programs, warps, rounds in ways if hardware.on_gpu else [(1, 1, 4, 1)]:
        rows = problem.batch * problem.heads * number // (programs * rounds)
        few = rows_for(problem, hardware, rows, max(1, lane * warps * number // width(problem)))
        firsts.append({"rows": few, "parts": number, "per_processor": programs, "num_warps": warps})
    return space_of(name, problem, hardware, extra, firsts, constraints)


def bsp(problem: DecodeMerge, hardware: Hardware) -> VariantSpace:
    """Seeds start with an all-to-all where each row has one owner."""
    scattered = problem.output == "head_scatter"
    ways: tuple[Value, ...] = ("all_to_all", "all_gather") if scattered else ("all_gather",)
    some = rows_for(problem, hardware, problem.batch * problem.out_heads)
    firsts: list[dict[str, Value]] = [{"rows": n, "collective": way} for way in ways for n in dict.fromkeys((1, some))]
    return space_of("bsp", problem, hardware, {"collective": ways}, firsts)


def compact(problem: DecodeMerge, hardware: Hardware) -> VariantSpace | None:
    """None for float32, which 15-bit columns cannot represent, and for very many rows."""
    return None if problem.item_size == 4 else at_once("compact", problem, hardware, 4, 32)


def fine_grained(problem: DecodeMerge, hardware: Hardware) -> VariantSpace:
    """Seeds start with one block per processor, because each block costs a system-wide fence."""
    some = rows_for(problem, hardware, problem.batch * problem.heads)
    firsts: list[dict[str, Value]] = [{"rows": rows} for rows in dict.fromkeys((some, together(problem)[-1], 1))]
    firsts += [first | {"num_warps": 8} for first in firsts[:1]]
    return space_of("fine_grained", problem, hardware, {}, firsts)


MOST_SENDERS = 64
"""Most programs that send to one rank."""


def gather(problem: DecodeMerge, hardware: Hardware) -> VariantSpace:
    """Seeds start with as many senders as the processors have room for."""
    arriving = problem.batch * problem.out_heads
    room = max(2, hardware.processors // problem.world_size)
    senders = powers_of_two(1, max(1, min(MOST_SENDERS, room, arriving)))
    some = rows_for(problem, hardware, arriving)
    many = dict.fromkeys((senders[-1], senders[len(senders) // 2]))
    firsts: list[dict[str, Value]] = [{"rows": rows, "senders": n} for n in many for rows in dict.fromkeys((1, some))]
    return space_of("gather", problem, hardware, {"senders": senders}, firsts)


def words(problem: DecodeMerge, hardware: Hardware) -> VariantSpace | None:
    """None for many rows."""
    return at_once("words", problem, hardware, 1, 16)
