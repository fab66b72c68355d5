"""Parts that the search spaces of Flash Decode share: the attention core, resource limits, the exchange, seeds.

`order` and `chiplets` together give the four known mappings of attention to dies, where a block is a split. item_first is
head-first, split_first is block-first. 1 chiplet is the naive mapping; the true number of dies gives the swizzled one. All are
bijections for any numbers of heads, splits and dies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.core.problem import ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.pipeline import blocks_held, lanes

MOST_SPLITS = 128
MOST_WORDS = 1 << 21
"""Most words of a rank's result for LL: 16 MiB to each peer. Beyond it the doubled bytes cost more than a flag."""
FEW_WORDS = 1 << 16
"""Up to this many words the seeds of `fused` and `single` begin with LL and float32, which takes less than 2 us on NVLink. Beyond
it they begin with 16 bits and flags.
"""
EIGHT_BITS_OF = {"gfx942": ("e4m3fnuz",), "gfx950": ("e4m3",)}
FIRST_WITH_E4M3 = 89
"""Compute capability of the first NVIDIA GPUs that convert e4m3."""

BY_HEAD = ((16, 4, 4, 1), (16, 2, 4, 1))
BY_WARP = ((64, 4, 3, 1), (32, 2, 3, 2), (64, 4, 4, 1))
BY_BLOCK = ((128, 4, 3, 1), (64, 4, 3, 1), (32, 2, 5, 2), (64, 4, 3, 2), (128, 8, 2, 2), (64, 2, 4, 4))
"""Seeds of each core, the best guess first: tokens per block, warps, stages, splits relative to `balanced_splits`."""


def require_kv_dtype(problem: FlashDecode, hardware: Hardware) -> None:
    """Raises UsageError for a cache type that the target does not convert in hardware."""
    backend, _, chip = hardware.target.partition(":")
    if problem.kv_dtype == "same" or backend == "interpreter":
        return
    has: tuple[str, ...] = EIGHT_BITS_OF.get(chip, ())
    if backend == "cuda" and int(chip) >= FIRST_WITH_E4M3:
        has = ("e4m3",)
    if problem.kv_dtype not in has:
        raise UsageError(
            f"kv_dtype is {problem.kv_dtype}; {hardware.target} converts {' and '.join(has) or 'no type of 8 bits'}: "
            f"give --kv-dtype {' or '.join((*has, 'same'))}"
        )


def attention_parameters(problem: FlashDecode, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    require_kv_dtype(problem, hardware)
    length = power_of_two(problem.shard_len)
    warps: tuple[Value, ...] = (2, 4, 8) if hardware.on_gpu else (4,)
    cores: tuple[Value, ...] = ("by_block",) if problem.item_size == 4 else ("by_block", "by_warp")
    if by_head(problem, hardware):
        cores, warps = (*cores, "by_head"), (1, *warps)
    stages: tuple[Value, ...] = (2, 3, 4, 5) if hardware.on_gpu else (2,)
    return {
        "attend": cores,
        "block_s": powers_of_two(16, max(16, min(256, length))),
        "splits": powers_of_two(1, max(1, min(MOST_SPLITS, length // 16))),
        "num_warps": warps,
        "num_stages": stages,
        "order": ("item_first", "split_first"),
        "chiplets": tuple(dict.fromkeys((1, hardware.dies))),
    }


def by_head(problem: FlashDecode, hardware: Hardware) -> bool:
    """Whether the core `by_head` is searched: where it may be faster, and not on AMD, where it was not measured."""
    whole = problem.group == power_of_two(problem.group)
    return (problem.page > 0 or problem.queries > 1) and whole and problem.item_size < 4 and hardware.backend != "rocm"


def heads_together(values: Mapping[str, Value]) -> int:
    """KV heads per work item."""
    return int(values["num_warps"]) if values["attend"] == "by_head" else 1


def attention_constraints(problem: FlashDecode, hardware: Hardware) -> tuple[Constraint, ...]:
    """Resource limits of the attention core. They are estimates, so the smallest block with the fewest stages and the most warps
    is always allowed.
    """
    ranges = attention_parameters(problem, hardware)
    least, fewest, most = ranges["block_s"][0], ranges["num_stages"][0], ranges["num_warps"][-1]
    width = max(16, power_of_two(problem.head_dim))
    group = max(16, power_of_two(problem.group))
    tokens = power_of_two(problem.shard_len)
    registers = 64 * lanes(hardware)
    return (
        Constraint(
            ("block_s", "num_stages"),
            lambda s, stages: (s, stages) == (least, fewest) or pipeline_fits(problem, hardware, s, stages),
            "the pipeline does not fit in shared memory",
        ),
        Constraint(
            ("block_s", "num_warps"),
            lambda s, warps: (s, warps) == (least, most) or not hardware.on_gpu or group * max(s, width) <= registers * warps,
            "the scores do not fit in registers",
        ),
        Constraint(
            ("attend", "block_s", "num_warps"),
            lambda attend, s, warps: attend != "by_warp" or _warps_fit(problem, hardware, s, warps),
            "a warp has too few tokens of a block, or more than fit in its registers",
        ),
        Constraint(
            ("block_s", "splits"),
            lambda s, splits: s * splits <= max(tokens, s),
            "some splits could never get a block of tokens",
        ),
        *(_of_heads(problem, hardware) if "by_head" in ranges["attend"] else ()),
    )


def _of_heads(problem: FlashDecode, hardware: Hardware) -> tuple[Constraint, ...]:
    """Further limits where `by_head` is searched. Only that core may run with a single warp."""
    return (
        Constraint(
            ("attend", "num_warps"),
            lambda attend, warps: problem.kv_heads % warps == 0 if attend == "by_head" else warps > 1 or not hardware.on_gpu,
            "a sequence's KV heads are not a multiple of the warps, or a single warp shares its tokens with none",
        ),
        Constraint(
            ("attend", "block_s"),
            lambda attend, s: attend != "by_head" or _head_fits(problem, hardware, s),
            "a block is more than a page, or its results are more than fit in a warp's registers",
        ),
        Constraint(
            ("attend", "block_s", "num_warps", "num_stages"),
            lambda *shape: heads_fit(problem, hardware, *shape),
            "the pipeline of all heads does not fit in shared memory",
        ),
    )


def heads_fit(
    problem: FlashDecode, hardware: Hardware, attend: str, block_s: int, warps: int, stages: int, programs: int = 1
) -> bool:
    """For the core `by_head`: whether the pipelines of all heads of `programs` programs fit on one processor."""
    return attend != "by_head" or pipeline_fits(problem, hardware, block_s * warps, stages, programs)


def _head_fits(problem: FlashDecode, hardware: Hardware, block_s: int) -> bool:
    """Whether a block lies in a page and its results fit in the registers of a warp. The smallest block leaves room for twice the
    results.
    """
    if block_s > min(problem.page or 64, 64):
        return False
    results = max(8, problem.group) * max(16, power_of_two(problem.head_dim))
    return not hardware.on_gpu or results <= (128 if block_s == 16 else 64) * lanes(hardware)


def _warps_fit(problem: FlashDecode, hardware: Hardware, block_s: int, warps: int) -> bool:
    """Whether the core `by_warp` applies: each warp gets at least 16 tokens of a block, and its results fit in its registers."""
    results = max(8, power_of_two(problem.group)) * max(16, power_of_two(problem.head_dim))
    return 16 <= block_s // warps <= 64 and (results <= 64 * lanes(hardware) or not hardware.on_gpu)


def pipeline_fits(problem: FlashDecode, hardware: Hardware, block_s: int, stages: int, programs: int = 1) -> bool:
    """Whether the pipelines of `programs` programs fit in the shared memory of one processor."""
    elements = 2 * block_s * max(16, power_of_two(problem.head_dim))  # keys and values
    block = elements * problem.kv_item_size
    spare = block // 8 * (problem.dtype == "fp32") if hardware.backend == "rocm" else 16 * 1024
    if problem.kv_dtype != "same":  # a conversion may change the layout through shared memory
        spare += elements // 2 * problem.item_size
    return programs * (block * blocks_held(hardware, stages) + spare) <= hardware.shared_memory


def balanced_splits(problem: FlashDecode, hardware: Hardware, block_s: int, together: int = 0) -> int:
    """The number of splits in seeds: the fewest that keep the processors idle less than a tenth of the time, or else the best
    choice. It assumes programs of equal length, one per processor, in waves. With `together` KV heads per program, one per warp,
    it assumes eight warps per processor.
    """
    items = problem.batch * problem.kv_heads // max(1, together)
    processors = hardware.processors * (max(1, 8 // together) if together else 1)
    most = min(MOST_SPLITS, max(1, power_of_two(problem.shard_len) // block_s))

    def busy(splits: int) -> float:
        programs = items * splits
        return programs / (ceil_div(programs, processors) * processors)

    choices = powers_of_two(1, most)
    return next((splits for splits in choices if busy(splits) > 0.9), max(choices, key=busy))


def attention_seeds(problem: FlashDecode, hardware: Hardware) -> list[dict[str, Value]]:
    ranges = attention_parameters(problem, hardware)
    seeds: list[dict[str, Value]] = []
    # `by_block` comes first where `by_warp` was not measured. `by_head` comes first with an 8-bit cache and a KV head per
    # processor.
    first = BY_WARP if "by_warp" in ranges["attend"] and hardware.backend != "rocm" else ()
    heads = BY_HEAD if "by_head" in ranges["attend"] else ()
    many = problem.kv_dtype != "same" and problem.batch * problem.kv_heads >= hardware.processors
    own = [("by_head", s, math.gcd(warps, problem.kv_heads), stages, factor) for s, warps, stages, factor in heads]
    shapes = [*(("by_warp", *rest) for rest in first), *(("by_block", *rest) for rest in BY_BLOCK)]
    shapes = [*own, *shapes] if many else [*shapes[:2], *own, *shapes[2:]]
    for attend, tokens, warps, stages, factor in shapes:
        tokens, stages = min(tokens, int(max(ranges["block_s"]))), min(stages, int(max(ranges["num_stages"])))
        warps = min(warps, int(max(ranges["num_warps"])))
        if attend == "by_head" and not _head_fits(problem, hardware, tokens):
            continue
        together = warps if attend == "by_head" else 0
        while stages > 2 and not pipeline_fits(problem, hardware, tokens * max(1, together), stages):
            stages -= 1
        while tokens > 16 and not pipeline_fits(problem, hardware, tokens, stages):
            tokens //= 2
        if attend == "by_warp" and not _warps_fit(problem, hardware, tokens, warps):
            attend = "by_block"
        splits = min(balanced_splits(problem, hardware, tokens, together) * factor, int(max(ranges["splits"])))
        values: dict[str, Value] = {
            "attend": attend,
            "block_s": tokens,
            "splits": splits,
            "num_warps": warps,
            "num_stages": stages,
            "order": "item_first",
            "chiplets": 1,
        }
        if values not in seeds:
            seeds.append(values)
    return seeds


def protocols(problem: FlashDecode) -> tuple[Value, ...]:
    """Choices for the exchange: stores followed by a flag, or words that carry the epoch (kernels.flash_decode.ll_packets)."""
    few = problem.out_rows * problem.head_dim <= MOST_WORDS
    return ("flags", "ll") if few else ("flags",)


def payloads(problem: FlashDecode) -> tuple[Value, ...]:
    """Choices for the type of results on the links: float32, or the problem's own type."""
    return ("fp32",) if problem.item_size == 4 else ("fp32", "packed")


def head_choices(problem: FlashDecode) -> list[int]:
    """Choices for the rows that a merging program handles together: rows of one KV head that go to the same ranks."""
    together = rows_together(problem)
    return [h for h in range(1, together + 1) if together % h == 0]


def rows_together(problem: FlashDecode) -> int:
    """The largest of `head_choices`."""
    return math.gcd(problem.q_per_kv, problem.out_heads) * problem.queries


def shared_among(problem: FlashDecode, programs: int) -> dict[str, Value]:
    """The fewest rows per program with which `programs` programs merge all rows in one round."""
    rows = problem.out_rows
    return {"heads": next((h for h in head_choices(problem) if rows // h <= programs), rows_together(problem))}


def waiting_programs(hardware: Hardware) -> int:
    """Most programs that may wait without taking the room of those they wait for."""
    return max(1, min(64, hardware.processors // 2))


def exchange(problem: FlashDecode, hardware: Hardware) -> tuple[dict[str, tuple[Value, ...]], list[dict[str, Value]]]:
    """Parameters of the exchange in kernels that push results themselves, and the values to try first."""
    ways, kinds = protocols(problem), payloads(problem)
    sent: list[dict[str, Value]] = [
        {"protocol": ways[-1], "payload": kinds[0]},
        {"protocol": ways[0], "payload": kinds[-1]},
    ]
    # Neither has run on AMD; flags are the older, better-tested protocol.
    if hardware.backend == "rocm" or problem.out_rows * problem.head_dim > FEW_WORDS:
        sent.reverse()
    return {"protocol": ways, "payload": kinds}, sent


def with_attention(
    name: str, problem: FlashDecode, hardware: Hardware, extra: dict[str, tuple[Value, ...]], *firsts: dict[str, Value]
) -> VariantSpace:
    """The space of a variant with parameters `extra` in addition to the attention core; `firsts` are the values to try first."""
    chosen = attention_seeds(problem, hardware)[: 6 // len(firsts)]
    configs = tuple(dict.fromkeys(Config.of(name, values | first) for first in firsts for values in chosen))
    heads: dict[str, tuple[Value, ...]] = {"heads": tuple(head_choices(problem))}
    parameters = attention_parameters(problem, hardware) | heads | extra
    return VariantSpace(name, parameters, attention_constraints(problem, hardware), configs)

