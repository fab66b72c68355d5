"""Analytical features of a config of Flash Decode: the waves of its programs, the work of one program, and an analytical time."""

from __future__ import annotations

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.hardware import Hardware
from autotax.operators.flash_decode import FlashDecode
from autotax.spaces.flash_decode.attention import heads_together

MEMORY_GBPS, START_US = 4000.0, 10.0
"""Approximate bandwidth of an H200, and the time of launches with their waits. The latency model learns the remaining error."""


def base_us(problem: FlashDecode) -> float:
    """The time to read the cache once, plus START_US."""
    tokens = 2 * problem.batch * problem.kv_heads * problem.seen_len
    return START_US + tokens * problem.head_dim * problem.kv_item_size / (MEMORY_GBPS * 1e3)


def traits(problem: FlashDecode, hardware: Hardware, config: Config) -> dict[str, float]:
    """Feature values by name."""
    values = config.values
    block, splits, heads = int(values["block_s"]), int(values["splits"]), int(values["heads"])
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
