"""Search space of `decomposed`: GEMMs of the vendor's library, and how shards are sent."""

from __future__ import annotations

from autotax.core.config import Config, Value
from autotax.core.space import Constraint, VariantSpace
from autotax.hardware import Hardware
from autotax.kernels.tiling import PIECES
from autotax.operators.all_gather_gemm import AllGatherGemm
from autotax.spaces.all_gather_gemm.tiles import LEAST_HALF, comm_programs


def space(problem: AllGatherGemm, hardware: Hardware) -> VariantSpace:
    """GEMMs of the vendor's library. With shard k every row needs every shard, so there is a single GEMM. Comm 0 (the copy
    engines) is left out there, because it would need strided copies. With two ranks `two` equals `each`.
    """
    comms = comm_programs(hardware)
    each: Value = "each" if problem.world_size > 2 else "two"
    pieces: tuple[Value, ...] = tuple(PIECES) if problem.world_size > 1 else ()
    products: tuple[Value, ...] = tuple(dict.fromkeys(("two", each, *pieces, "one")))
    warm: tuple[Value, ...] = (0, 8, 16, 32) if hardware.backend == "cuda" and problem.weight == "nk" else (0,)
    most = int(warm[-1])
    seeds = [("one", 32, most), ("two", 0, 0), (each, 0, 0), ("one", 32, 0), (each, 8, 0), ("one", 64, most)]
    if problem.shard_rows >= 2 * LEAST_HALF:
        seeds[2:2] = [(way, 0, 0) for way in pieces]
    if problem.shard == "k":
        products, seeds = ("one",), [("one", 32, most), ("one", 64, 0)]
    choices = comms if problem.shard == "k" else (0, *comms)
    configs = [Config.of("decomposed", products=how, comm=min(comm, choices[-1]), warm=size) for how, comm, size in seeds]
    idle = Constraint(
        ("products", "comm", "warm"),
        lambda how, comm, size: size == 0 or (how == "one" and comm > 0),
        "only a kernel that gathers for one product brings B into the L2",
    )
    engines = Constraint(
        ("products", "comm"), lambda how, comm: how not in PIECES or comm == 0, "only copy engines send in pieces"
    )
    parameters: dict[str, tuple[Value, ...]] = {"products": products, "comm": choices, "warm": warm}
    return VariantSpace("decomposed", parameters, (idle, engines), tuple(dict.fromkeys(configs)))
