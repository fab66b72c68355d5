"""Search spaces of distributed Flash Decode, one function per variant; before them what they share.

`order` and `chiplets` together give the four known mappings of attention to dies, where a block is a split. item_first is
head-first, split_first is block-first. 1 chiplet is the naive mapping; the true number of dies gives the swizzled one. All are
bijections for any numbers of heads, splits and dies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autotax.core.config import Config, Value
from autotax.core.errors import UsageError
from autotax.core.problem import busy_share, ceil_div, power_of_two
from autotax.core.space import Constraint, VariantSpace, powers_of_two
from autotax.hardware import Hardware, blocks_held, lanes
from autotax.operators.flash_decode import FlashDecode

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
    return int(values["num_warps"]) if values.get("attend") == "by_head" else 1  # old records lack it


def attention_constraints(problem: FlashDecode, hardware: Hardware) -> tuple[Constraint, ...]:
    """Resource limits of the attention core, as estimates: the smallest block with fewest stages and most warps always passes."""
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
    """Whether a block lies in a page and its results fit in a warp's registers, those of the smallest block twice."""
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
        return busy_share(items * splits, processors)

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
    """Choices for the exchange: stores followed by a flag, or words that carry the epoch (kernels.flash_decode.exchange)."""
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


def exchange(problem: FlashDecode, hardware: Hardware) -> tuple[dict[str, tuple[Value, ...]], list[dict[str, Value]]]:
    """Parameters of the exchange in kernels that push results themselves, and the values to try first."""
    ways, kinds = protocols(problem), payloads(problem)
    sent: list[dict[str, Value]] = [{"protocol": ways[-1], "payload": kinds[0]}, {"protocol": ways[0], "payload": kinds[-1]}]
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


def bsp(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """Seeds start with one row per program."""
    return with_attention("bsp", problem, hardware, {}, {"heads": 1})


def compact(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where LL packets, or fewer bits than the problem's type, are not allowed on the links."""
    fits = "ll" in protocols(problem) and "packed" in payloads(problem)
    return all_at_once("compact", problem, hardware) if fits else None


def fine_grained(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """The same space as `gather`."""
    return sending_space("fine_grained", problem, hardware)


def fused(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """Seeds start with one row per program."""
    parameters, sent = exchange(problem, hardware)
    one: dict[str, Value] = {"heads": 1}
    return with_attention("fused", problem, hardware, parameters, *(one | way for way in sent))


def sending_space(name: str, problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """The space of `gather` or `fine_grained`."""
    senders = powers_of_two(1, min(16, problem.out_rows))
    first: dict[str, Value] = {"heads": 1, "senders": senders[-1]}
    return with_attention(name, problem, hardware, {"senders": senders}, first)


def gather(problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """Seeds start with the most senders that help."""
    return sending_space("gather", problem, hardware)


def all_at_once(name: str, problem: FlashDecode, hardware: Hardware) -> VariantSpace:
    """The space of `resident` or `compact`. It adds the number of merging programs that share a row, and the programs per
    processor. All programs run at once, so the programs of a processor must fit together; a kernel takes at most 255 registers
    per thread.
    """
    heads: dict[str, tuple[Value, ...]] = {"heads": tuple(head_choices(problem))}
    shared = shared_among(problem, hardware.processors)
    cut = power_of_two(problem.head_dim) == problem.head_dim >= 32
    own: dict[str, tuple[Value, ...]] = {"parts": (1, 2) if cut else (1,), "per_processor": (1, 2) if hardware.on_gpu else (1,)}
    of_heads = Constraint(
        ("attend", "block_s", "num_warps", "num_stages", "per_processor"),
        lambda *shape: heads_fit(problem, hardware, *shape),
        "the pipelines of all heads of a processor's programs do not fit in its shared memory",
    )
    constraints = (
        *attention_constraints(problem, hardware),
        Constraint(
            ("block_s", "num_stages", "per_processor"),
            lambda s, stages, programs: programs == 1 or pipeline_fits(problem, hardware, s, stages, programs),
            "the pipelines of a processor's programs do not fit in its shared memory",
        ),
        *((of_heads,) if by_head(problem, hardware) else ()),
        Constraint(
            ("num_warps", "per_processor"),
            lambda warps, programs: programs * warps <= 8,
            "the programs of a processor do not fit in its registers",
        ),
    )
    alone: dict[str, Value] = shared | {"parts": 1, "per_processor": 1}
    seeds = attention_seeds(problem, hardware)
    values = [seed | alone for seed in seeds[:3]]
    if hardware.on_gpu:  # second seeds: two programs per processor, so that one loads while the other computes
        several = problem.batch * problem.kv_heads // heads_together(seeds[0]) * int(seeds[0]["splits"]) > hardware.processors
        # With more pieces than processors the splits stay, and a program handles several pieces one after the other. Else the
        # splits are doubled: one piece per program, half as long.
        halves = [seed for seed in seeds if int(seed["block_s"]) <= 64 and seed["num_warps"] == (4 if several else 2)][:1]
        parts = own["parts"] if several else own["parts"][-1:]
        more: list[dict[str, Value]] = [{"parts": n, "num_stages": 3, "per_processor": 2} for n in parts]
        pair = [alone | seed | extra for seed in halves for extra in more]
        blocks = [int(seed["block_s"]) * heads_together(seed) for seed in pair]
        values[1:1] = [seed for seed, block in zip(pair, blocks, strict=True) if pipeline_fits(problem, hardware, block, 3, 2)]
    configs = tuple(dict.fromkeys(Config.of(name, value) for value in values))
    return VariantSpace(name, attention_parameters(problem, hardware) | heads | own, constraints, configs)


def resident(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where LL packets are not allowed."""
    return all_at_once("resident", problem, hardware) if "ll" in protocols(problem) else None


def single(problem: FlashDecode, hardware: Hardware) -> VariantSpace | None:
    """None where the heads of one KV head belong to several ranks: one program could not push them all."""
    if rows_together(problem) < problem.group:
        return None
    few = max(1, min(64, hardware.processors // 2))  # they wait without taking the room of those they wait for
    receivers = powers_of_two(1, min(few, problem.out_rows))
    parameters, sent = exchange(problem, hardware)
    first: dict[str, Value] = shared_among(problem, few) | {"receivers": receivers[-1]}
    space = with_attention("single", problem, hardware, {"receivers": receivers} | parameters, *(first | way for way in sent))
    together = Constraint(
        ("attend", "num_warps"),
        lambda attend, warps: attend != "by_head" or (problem.out_heads * problem.queries) % (problem.group * warps) == 0,
        "KV heads that are one piece of work must have one owner",
    )
    return replace(space, constraints=(*space.constraints, together)) if by_head(problem, hardware) else space


MEMORY_GBPS, START_US = 4000.0, 10.0
"""Approximate bandwidth of an H200, and the time of launches with their waits. The latency model learns the remaining error."""


def base_us(problem: FlashDecode) -> float:
    """The time to read the cache once, plus START_US."""
    tokens = 2 * problem.batch * problem.kv_heads * problem.seen_len
    return START_US + tokens * problem.head_dim * problem.kv_item_size / (MEMORY_GBPS * 1e3)


def traits(problem: FlashDecode, hardware: Hardware, config: Config) -> dict[str, float]:
    """Feature values by name."""
    values = config.values
    block, splits, heads = int(values["block_s"]), int(values["splits"]), int(values.get("heads", 1))
    together = heads_together(values)
    items, rows = problem.batch * problem.kv_heads // together, problem.out_rows
    places = hardware.processors * int(values.get("per_processor", 1))
    programs = items * splits
    waves = ceil_div(programs, places)
    stages = int(values["num_stages"]) * 2 * block * together * problem.head_dim * problem.kv_item_size
    return {
        "programs": programs,
        "waves": programs / places,
        "tail": waves - programs / places,
        "filled": programs / (waves * places),
        "blocks": ceil_div(ceil_div(problem.seen_len, splits), block),
        "wave_tokens": waves * ceil_div(problem.seen_len, splits),
        "spread": waves * ceil_div(ceil_div(problem.seen_len, splits), block) * block * places / (items * problem.seen_len),
        "merging": rows / heads,
        "merge_waves": rows / heads / hardware.processors,
        "shared_bytes": stages / hardware.shared_memory,
        "tokens_a_warp": block * together / int(values["num_warps"]),
        "start_share": START_US / base_us(problem),
    }
