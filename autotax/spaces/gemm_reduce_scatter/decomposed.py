"""Search space of `decomposed`: GEMMs of the vendor's library, and how partial sums are sent."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
from autotax.spaces.all_gather_gemm.tiles import LEAST_HALF, comm_programs


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace:
    """A single GEMM for all ranks stores to one place only, so its result is sent afterwards."""
    comms = comm_programs(hardware)
    many = min(16, comms[-1])
    parameters: dict[str, tuple[Value, ...]] = {
        "products": ("each", "halves", "one"),
        "sender": ("engine", "product", "kernel"),
        "comm": comms,
    }
    seeds: list[tuple[str, str, int]] = [
        ("each", "engine", comms[0]),
        ("each", "product", comms[0]),
        ("each", "kernel", many),
        ("one", "kernel", many),
    ]
    if problem.shard_rows >= 2 * LEAST_HALF:
        seeds[1:1] = [("halves", "engine", comms[0])]
    constraints = (
        Constraint(
            ("sender", "comm"), lambda how, comm: how == "kernel" or comm == comms[0], "only a kernel has programs that send"
        ),
        Constraint(
            ("products", "sender"),
            lambda products, how: (products, how) != ("one", "product"),
            "one product is stored in one place",
        ),
    )
    configs = tuple(Config.of("decomposed", products=how, sender=sender, comm=comm) for how, sender, comm in seeds)
    return VariantSpace("decomposed", parameters, constraints, configs)
