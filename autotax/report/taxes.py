"""Where the time of bulk-synchronous calls goes, told from one comparison: parts that add up to what BSP takes.

The frame is that of "Eliminating Multi-GPU Performance Taxes" (arXiv 2511.02168): a tax for launching kernels, one for waiting in
bulk, one for results that go through memory between kernels. What a comparison cannot tell apart stays together here.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotax.problem import AllGatherGemm
from autotax.report.compared import Document
from autotax.tuner.compare import PRODUCT, TUNED

WORK, LAUNCH = "work", "launch"
STEPS = {
    "gather": ("library", "the collective of the library in place of a kernel that pushes"),
    "fine_grained": ("bulk-synchronous", "a merge that waits for all ranks at once, not for each"),
    "fused": ("locality", "results of the local merge that go through memory to a kernel that sends them"),
    "single": ("kernels", "three kernels in place of one"),
}
"""What each step of Flash Decode's ladder takes away."""
AT_ONCE = ("resident", "compact")
"""The variants beyond the ladder that the taxes were first told by."""


@dataclass(frozen=True)
class Tax:
    """Microseconds of a call; negative where a step loses. `told`: what it is."""

    name: str
    us: float
    told: str


def taxes(document: Document) -> list[Tax]:
    """The parts of a comparison's BSP from the work itself upwards, as far as they were measured, then what eager calls take
    beyond it. Nothing without a verified BSP.
    """
    rows, whole = _verified(document), bsp_us(document)
    if whole is None:
        return []
    inner = _of_gemm if document["problem"]["op"] == AllGatherGemm.op else _of_decode
    parts = inner(whole, rows, document)
    if whole == rows.get("bsp-graph") and "bsp-eager" in rows:  # else launches are among the rest
        parts.append(Tax(LAUNCH, rows["bsp-eager"] - rows["bsp-graph"], "calls launched one by one, not replayed from a graph"))
    return parts


def bsp_us(document: Document) -> float | None:
    """What BSP takes as the tuned config is called: in a graph, or eager."""
    conditions = document.get("conditions") or {}
    return _verified(document).get(f"bsp-{conditions.get('mode', 'graph')}")


def won_back(document: Document) -> float | None:
    """The share of what BSP takes beyond the work that the tuned config does not take; None where that is not known or none."""
    parts, whole, tuned = taxes(document), bsp_us(document), _verified(document).get(TUNED)
    if whole is None or tuned is None or parts[0].name != WORK or whole <= parts[0].us:
        return None
    return (whole - tuned) / (whole - parts[0].us)


def _verified(document: Document) -> dict[str, float]:
    """The latency of each row that is."""
    return {row["name"]: row["latency_us"] for row in document["rows"] if row["verified"] and row["latency_us"] is not None}


def _of_gemm(whole: float, rows: dict[str, float], document: Document) -> list[Tax]:
    product, links = rows.get(PRODUCT), document.get("links_us")
    if product is None:
        return [Tax("all", whole, "gather and product")]
    if links is None:
        waited = Tax("gather", whole - product, "the gather, for which the product waits")
        return [Tax(WORK, product, "the product alone"), waited]
    return [
        Tax(WORK, max(product, links), "the greater of the product alone and the links at full rate"),
        Tax("bulk-synchronous", min(product, links), "the smaller of the two, which is not beside the other"),
        Tax("library", whole - product - links, "the gather beyond the links' rate, launches between kernels, A through memory"),
    ]


def _of_decode(whole: float, rows: dict[str, float], document: Document) -> list[Tax]:
    steps, before = [], whole
    for variant, (name, told) in STEPS.items():
        if variant in rows:
            steps.append(Tax(name, before - rows[variant], told))
            before = rows[variant]
    best = min([before, *(rows[variant] for variant in AT_ONCE if variant in rows)])
    steps.append(Tax("rounds", before - best, "programs that do not all run at once, as those of resident and compact do"))
    memory = document.get("memory_us")
    if memory is None:
        return [Tax("left", best, "the fastest variant"), *reversed(steps)]
    work = Tax(WORK, memory, "the cache read once, as fast as a copy moves bytes here")
    return [work, Tax("left", best - memory, "what the fastest variant takes beyond that"), *reversed(steps)]
