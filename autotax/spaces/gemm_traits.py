"""Analytical features of configs of GEMMs, from which the latency model learns, and the time of a problem by rough rates."""

from __future__ import annotations

from autotax.core.config import Config
from autotax.core.problem import ceil_div
from autotax.hardware import Hardware
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces import scaled
from autotax.spaces.gemm_tiles import count_tiles

TERAFLOPS, LINK_GBPS, MEMORY_GBPS, START_US = 650.0, 375.0, 4000.0, 8.0
"""Approximate rates of an H200, and the time of a launch with its first wait. The latency model learns the remaining error."""


def base_us(problem: AllGatherGemm) -> float:
    """The maximum of the times of GEMM, links and memory, plus START_US."""
    read = (problem.m + problem.n) * problem.k * problem.item_size
    return START_US + max(*_product_and_links_us(problem), read / (MEMORY_GBPS * 1e3))


def _product_and_links_us(problem: AllGatherGemm) -> tuple[float, float]:
    received = (problem.world_size - 1) * problem.shard_rows * problem.shard_cols * problem.item_size
    return 2e-6 * problem.m * problem.n * problem.k / TERAFLOPS, links_us(received)


def links_us(size: int) -> float:
    """Microseconds of so many bytes on the links."""
    return size / (LINK_GBPS * 1e3)


def traits(problem: AllGatherGemm, hardware: Hardware, config: Config) -> dict[str, float]:
    """Feature values by name; only a few for a config without tiles."""
    values = scaled.with_tiles(config.values)
    product, links = _product_and_links_us(problem)
    features = {"product_share": product / base_us(problem), "links_share": links / base_us(problem)}
    if "block_m" not in values:
        return features
    m, n, k = int(values["block_m"]), int(values["block_n"]), int(values.get("block_k", 64))
    splits, comm = int(values.get("splits", 1)), int(values.get("comm", 0))
    tiles = count_tiles(problem, m, n, int(values.get("across", 0)))
    workers = max(1, hardware.processors - comm)
    waves = ceil_div(tiles, workers)
    held = (m + n) * k * problem.item_size * int(values.get("num_stages", 1))
    return features | {
        "tiles": tiles,
        "waves": tiles / workers,
        "tail": waves - tiles / workers,
        "filled": tiles / (waves * workers),
        "split_tail": (tiles % workers) * splits / workers,
        "wave_us": 2e-6 * waves * workers * m * n * problem.k / TERAFLOPS / base_us(problem),
        "shared_bytes": held / hardware.shared_memory,
        "accumulators": m * n / (32 * int(values.get("num_warps", 8))),
        "steps": problem.k / k,
        "reads": (problem.k / m + problem.k / n) / problem.k,
        "chunks": problem.shard_rows / int(values["chunk_rows"]) if "chunk_rows" in values else -1.0,
        "comm_share": comm / hardware.processors,
    }
