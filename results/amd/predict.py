"""Predicts calls on eight MI300X from data sheets alone: what a first run there should be compared with. Nothing was measured.

    PYTHONPATH=. python results/amd/predict.py > results/amd/predicted.txt

`least` has every unit at its rate on the data sheet, `likely` at the share of it that SHARES assumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotax.core.problem import Problem, ceil_div
from autotax.kernels.offline import known_hardware
from autotax.operators import of
from autotax.operators.problems import AllGatherGemm, DecodeMerge, FlashDecode, GemmReduceScatter
from autotax.spaces import space_for

MI300X = replace(known_hardware("hip:gfx942"), device="AMD Instinct MI300X", memory_gib=192)
TFLOPS = 1307.4
"""Of bf16 and fp16 without sparsity, by the data sheet; so is the rate of the memory. Links are in autotax/hardware.py."""
MEMORY_GBPS = 5300.0
SHARES = {"products": 0.5, "links": 0.8, "memory": 0.75}
"""Assumed, for `likely`."""
LAUNCH_US = 4.0
"""Assumed, for `likely`: a kernel of a graph after another, its caches written back between them."""

PROBLEMS: tuple[Problem, ...] = (
    *(AllGatherGemm(m, 7168, 8192, "bf16", "m", 8) for m in (64, 512, 2048, 8192)),
    AllGatherGemm(8192, 3584, 8192, "bf16", "m", 8),
    *(GemmReduceScatter(m, 8192, 3584, "bf16", "scattered", 8) for m in (512, 2048, 8192)),
    *(FlashDecode(batch, 64, 8, 128, 131072, "bf16", 8) for batch in (1, 8)),
    DecodeMerge(64, 128, 512, "bf16", 8, "head_scatter"),
)
KERNELS = {
    "bsp": 3, "gather": 4, "fine_grained": 4, "fused": 3, "single": 1, "decomposed": 2, "copy_engine": 2, "pull": 2, "push": 1,
    "push_two_kernel": 2, "pull_reduce": 1,
}  # fmt: skip
"""Launches that follow each other in a call, the library's among them; of a variant that is not listed, one."""


@dataclass(frozen=True)
class Work:
    """Microseconds of a call's parts on their own."""

    products: float
    links: float
    memory: float

    def at(self, shares: dict[str, float]) -> Work:
        return Work(self.products / shares["products"], self.links / shares["links"], self.memory / shares["memory"])


def work(problem: Problem) -> Work:
    """At full rates. An operator with products has its links in its declaration. Of its memory B counts: few rows wait for it."""
    bounds = of(problem).bounds_us(problem, MI300X, {"copy_gbps": [MEMORY_GBPS]})
    products, memory = 0.0, bounds.get("memory", 0.0)
    if isinstance(problem, AllGatherGemm | GemmReduceScatter):
        products = 2 * problem.m * problem.n * problem.k / TFLOPS / 1e6
        memory = problem.n * problem.k * problem.item_size / MEMORY_GBPS / 1e3
    return Work(products, bounds.get("links", 0.0), memory)


def together(problem: Problem, variant: str, parts: Work) -> float:
    """BSP does one after the other, and so does `push_packets`, which sends twice the bytes. The others overlap; `pull` loads
    remote rows again for each column of tiles.
    """
    compute = max(parts.products, parts.memory)
    if variant == "bsp":
        return compute + parts.links
    if variant == "push_packets":
        return compute + 2 * parts.links
    links = parts.links
    if variant == "pull" and isinstance(problem, AllGatherGemm):
        links *= ceil_div(problem.n, int(space_for(problem, MI300X).default(variant)["block_n"]))
    return max(compute, links)


def rows() -> Iterator[str]:
    """The table."""
    yield f"{'problem':98s} {'variant':16s} {'least us':>9s} {'likely us':>10s}"
    for problem in PROBLEMS:
        full = work(problem)
        for variant in space_for(problem, MI300X).variants:
            least = together(problem, variant, full)
            likely = together(problem, variant, full.at(SHARES)) + LAUNCH_US * KERNELS.get(variant, 1)
            yield f"{problem!s:98s} {variant:16s} {least:9.1f} {likely:10.1f}"


if __name__ == "__main__":
    shares = ", ".join(f"{name} {share:.0%}" for name, share in SHARES.items())
    print("Predicted for 8 x MI300X, from data sheets; nothing was measured.")
    print(f"Likely: {shares} of the data sheet, {LAUNCH_US:g} us a launch.")
    print("\n".join(rows()))
