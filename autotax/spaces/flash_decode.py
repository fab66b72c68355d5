"""The search space of distributed Flash Decode."""

from __future__ import annotations

import math

from autotax.config import Config, Value
from autotax.hardware import Hardware
from autotax.problem import FlashDecode, ceil_div, power_of_two
from autotax.spaces.pipeline import blocks_held, lanes
from autotax.spaces.space import Constraint, Space, VariantSpace, powers_of_two

MOST_SPLITS = 128
CHIPLETS = {"rocm": (1, 8)}
"""Dies among which a GPU hands out programs in turn; one where nothing is known of any."""
MOST_WORDS = 1 << 21
"""Words of a rank's result that LL may send: 16 MiB to each peer, beyond which their double size costs more than a flag."""
FEW_WORDS = 1 << 16
"""Up to here the seeds of `fused` and `single` begin with LL and float32, which takes less than 2 us on NVLink; beyond it with
16 bits and flags."""

BY_WARP = ((64, 4, 3, 1), (32, 2, 3, 2), (64, 4, 4, 1))
BY_BLOCK = ((128, 4, 3, 1), (64, 4, 3, 1), (32, 2, 5, 2), (64, 4, 3, 2), (128, 8, 2, 2), (64, 2, 4, 4))
"""Seeds of each core, the best guess first: tokens a block, warps, stages, splits relative to the balanced number."""


def _attention(problem: FlashDecode, hardware: Hardware) -> dict[str, tuple[Value, ...]]:
    length = power_of_two(problem.shard_len)
    warps: tuple[Value, ...] = (2, 4, 8) if hardware.on_gpu else (4,)
    stages: tuple[Value, ...] = (2, 3, 4, 5) if hardware.on_gpu else (2,)
    return {
        "attend": ("by_block",) if problem.item_size == 4 else ("by_block", "by_warp"),
        "block_s": powers_of_two(16, max(16, min(256, length))),
        "splits": powers_of_two(1, max(1, min(MOST_SPLITS, length // 16))),
        "num_warps": warps,
        "num_stages": stages,
        "order": ("item_first", "split_first"),
        "chiplets": CHIPLETS.get(hardware.backend, (1,)),
    }


def _constraints(problem: FlashDecode, hardware: Hardware) -> tuple[Constraint, ...]:
    """What fits is an estimate, so the least block with the fewest stages and the most warps is always worth a trial."""
    ranges = _attention(problem, hardware)
    least, fewest, most = ranges["block_s"][0], ranges["num_stages"][0], ranges["num_warps"][-1]
    width = max(16, power_of_two(problem.head_dim))
    group = max(16, power_of_two(problem.group))
    tokens = power_of_two(problem.shard_len)
    registers = 64 * lanes(hardware)
    return (
        Constraint(
            ("block_s", "num_stages"),
            lambda s, stages: (s, stages) == (least, fewest) or _pipeline_fits(problem, hardware, s, stages),
            "the pipeline does not fit in shared memory",
        ),
        Constraint(
            ("block_s", "num_warps"),
            lambda s, warps: (s, warps) == (least, most) or not hardware.on_gpu or group * max(s, width) <= registers * warps,
            "the scores do not fit in registers",
        ),
        Constraint(
            ("attend", "block_s", "num_warps"),
            lambda attend, s, warps: attend == "by_block" or _warps_fit(problem, hardware, s, warps),
            "a warp has too few tokens of a block, or more than fit in its registers",
        ),
        Constraint(
            ("block_s", "splits"),
            lambda s, splits: s * splits <= max(tokens, s),
            "some splits could never get a block of tokens",
        ),
    )


def _warps_fit(problem: FlashDecode, hardware: Hardware, block_s: int, warps: int) -> bool:
    """Whether each warp can have tokens of its own: at least the rows of a product, and its results in its registers."""
    results = max(8, power_of_two(problem.group)) * max(16, power_of_two(problem.head_dim))
    return 16 <= block_s // warps <= 64 and (results <= 64 * lanes(hardware) or not hardware.on_gpu)


def _pipeline_fits(problem: FlashDecode, hardware: Hardware, block_s: int, stages: int, programs: int = 1) -> bool:
    """Whether so many programs on one processor can have such a pipeline each."""
    block = 2 * block_s * max(16, power_of_two(problem.head_dim)) * problem.item_size  # keys and values
    spare = block // 8 * (problem.dtype == "fp32") if hardware.backend == "rocm" else 16 * 1024
    return programs * (block * blocks_held(hardware, stages) + spare) <= hardware.shared_memory


def balanced_splits(problem: FlashDecode, hardware: Hardware, block_s: int) -> int:
    """The heuristic of the seeds: the fewest splits that leave the processors idle less than a tenth of the time, or else the
    best number there is. All programs take about as long, one to a processor, wave after wave."""
    items, processors = problem.batch * problem.kv_heads, hardware.processors
    most = min(MOST_SPLITS, max(1, power_of_two(problem.shard_len) // block_s))

    def busy(splits: int) -> float:
        programs = items * splits
        return programs / (ceil_div(programs, processors) * processors)

    choices = powers_of_two(1, most)
    return next((splits for splits in choices if busy(splits) > 0.9), max(choices, key=busy))


def _attention_seeds(problem: FlashDecode, hardware: Hardware) -> list[dict[str, Value]]:
    ranges = _attention(problem, hardware)
    seeds: list[dict[str, Value]] = []
    # Of what was not measured by warp, those by block come first.
    first = BY_WARP if "by_warp" in ranges["attend"] and hardware.backend != "rocm" else ()
    shapes = [*(("by_warp", *rest) for rest in first), *(("by_block", *rest) for rest in BY_BLOCK)]
    for attend, tokens, warps, stages, factor in shapes:
        tokens, stages = min(tokens, int(max(ranges["block_s"]))), min(stages, int(max(ranges["num_stages"])))
        warps = min(warps, int(max(ranges["num_warps"])))
        while stages > 2 and not _pipeline_fits(problem, hardware, tokens, stages):
            stages -= 1
        while tokens > 16 and not _pipeline_fits(problem, hardware, tokens, stages):
            tokens //= 2
        if attend == "by_warp" and not _warps_fit(problem, hardware, tokens, warps):
            attend = "by_block"
        splits = min(balanced_splits(problem, hardware, tokens) * factor, int(max(ranges["splits"])))
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


def _protocols(problem: FlashDecode, hardware: Hardware) -> tuple[Value, ...]:
    """How results travel: stores and then a flag, or words that carry the epoch (see kernels.flash_decode.words)."""
    few = problem.batch * problem.out_heads * problem.head_dim <= MOST_WORDS
    return ("flags", "ll") if few and hardware.backend != "rocm" else ("flags",)


def _payloads(problem: FlashDecode) -> tuple[Value, ...]:
    """What results are on their way: float32, or rounded to the problem's own type."""
    return ("fp32",) if problem.item_size == 4 else ("fp32", "packed")


def _all_at_once(
    name: str, problem: FlashDecode, hardware: Hardware, heads: tuple[Value, ...], shared: dict[str, Value]
) -> VariantSpace:
    """`resident` or `compact`. Of their own: the parts into which merging programs cut a row, and the programs of each processor.

    All programs run at once, so what a processor is to hold must fit: a kernel takes at most 255 registers a thread.
    """
    cut = power_of_two(problem.head_dim) == problem.head_dim >= 32
    own: dict[str, tuple[Value, ...]] = {"parts": (1, 2) if cut else (1,), "per_processor": (1, 2) if hardware.on_gpu else (1,)}
    constraints = (
        *_constraints(problem, hardware),
        Constraint(
            ("block_s", "num_stages", "per_processor"),
            lambda s, stages, programs: programs == 1 or _pipeline_fits(problem, hardware, s, stages, programs),
            "the pipelines of a processor's programs do not fit in its shared memory",
        ),
        Constraint(
            ("num_warps", "per_processor"),
            lambda warps, programs: programs * warps <= 8,
            "the programs of a processor do not fit in its registers",
        ),
    )
    alone: dict[str, Value] = shared | {"parts": 1, "per_processor": 1}
    seeds = _attention_seeds(problem, hardware)
    values = [seed | alone for seed in seeds[:3]]
    if hardware.on_gpu:  # tried after the first: two programs a processor, one of which loads while the other does something else
        several = problem.batch * problem.kv_heads * int(seeds[0]["splits"]) > hardware.processors
        # One piece after the other with the splits as they are, or one piece each, half as long.
        halves = [seed for seed in seeds if int(seed["block_s"]) <= 64 and seed["num_warps"] == (4 if several else 2)][:1]
        parts = own["parts"] if several else own["parts"][-1:]
        more: list[dict[str, Value]] = [{"parts": n, "num_stages": 3, "per_processor": 2} for n in parts]
        pair = [alone | seed | each for seed in halves for each in more]
        values[1:1] = [seed for seed in pair if _pipeline_fits(problem, hardware, int(seed["block_s"]), 3, 2)]
    configs = tuple(dict.fromkeys(Config.of(name, found) for found in values))
    return VariantSpace(name, _attention(problem, hardware) | {"heads": heads} | own, constraints, configs)


def flash_decode_space(problem: FlashDecode, hardware: Hardware) -> Space:
    """Every variant of distributed Flash Decode that the problem and the machine admit.

    `order` and `chiplets` make the four mappings of attention to dies (a block is a split here): item_first is head-first and
    split_first block-first; 1 chiplet is the naive mapping, their true number the swizzled one. All are bijections for any
    numbers of heads, splits and dies. With output `head_scatter`, `single` needs KV heads that do not serve two ranks' heads.
    """
    attention, constraints = _attention(problem, hardware), _constraints(problem, hardware)
    # A program merges rows of one KV head that go to the same ranks.
    together = math.gcd(problem.group, problem.out_heads)
    divisors = [h for h in range(1, together + 1) if together % h == 0]
    heads: tuple[Value, ...] = tuple(divisors)
    rows = problem.batch * problem.out_heads
    few = max(1, min(64, hardware.processors // 2))  # programs that may wait while others need room
    receivers, senders = powers_of_two(1, min(few, rows)), powers_of_two(1, min(16, rows))
    protocols, payloads = _protocols(problem, hardware), _payloads(problem)
    exchange = {"protocol": protocols, "payload": payloads}
    seeds = _attention_seeds(problem, hardware)

    def variant(name: str, extra: dict[str, tuple[Value, ...]], *firsts: dict[str, Value]) -> VariantSpace:
        chosen = seeds[: 6 // len(firsts)]
        configs = tuple(dict.fromkeys(Config.of(name, values | first) for first in firsts for values in chosen))
        return VariantSpace(name, attention | extra, constraints, configs)

    def shared_among(programs: int) -> dict[str, Value]:
        """Rows of which each of these programs gets no more than it must, in one go."""
        return {"heads": next((h for h in divisors if rows // h <= programs), together)}

    one: dict[str, Value] = {"heads": heads[0]}
    sent: list[dict[str, Value]] = [
        {"protocol": protocols[-1], "payload": payloads[0]},
        {"protocol": protocols[0], "payload": payloads[-1]},
    ]
    if rows * problem.head_dim > FEW_WORDS:
        sent.reverse()
    variants = [
        variant("bsp", {"heads": heads}, one),
        variant("gather", {"heads": heads, "senders": senders}, one | {"senders": senders[-1]}),
        variant("fine_grained", {"heads": heads, "senders": senders}, one | {"senders": senders[-1]}),
        variant("fused", {"heads": heads} | exchange, *(one | way for way in sent)),
        variant(
            "single", {"heads": heads, "receivers": receivers} | exchange,
            *(shared_among(few) | {"receivers": receivers[-1]} | way for way in sent),
        ),
    ]  # fmt: skip
    if together < problem.group:  # whoever finishes a KV head would have to send to several owners
        variants = [variant for variant in variants if variant.variant != "single"]
    if "ll" in protocols:
        shared = shared_among(hardware.processors)
        variants.append(_all_at_once("resident", problem, hardware, heads, shared))
        if "packed" in payloads:
            variants.append(_all_at_once("compact", problem, hardware, heads, shared))
    return Space(problem, hardware, {v.variant: v for v in variants})


def tokens_per_split(length: int, block_s: int, splits: int) -> int:
    """Tokens that one split attends to; whole blocks, so that only the last block of a sequence is masked."""
    return ceil_div(ceil_div(length, block_s), splits) * block_s
