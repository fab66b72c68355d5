"""Every tile of the warp-specialized kernel with either way to add up, beside all alternatives, in one interleaved run a problem:

    PYTHONPATH=results:. python results/h200x2/gemm-reduce-scatter/adds.py SHAPES.toml -o adds.json
"""

from __future__ import annotations

from itertools import product

import fp8

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators import registry
from autotax.spaces import space_for

TILES = ((128, 256), (128, 128), (64, 256), (64, 128))
OTHERS = ("product", "torch", "torch_fast")


def configs(problem: Problem, here: Hardware, _: int) -> list[Config]:
    """The deepest pipeline and the widest strip of each tile, two seeds of `two_kernel`, and alternatives."""
    space, scaled = space_for(problem, here), problem.to_dict()["dtype"] == "e4m3"
    name = "scaled_specialized" if scaled else "push_specialized"
    usual = {"group_m": 8, "order": space.variants[name].parameters["order"][0]}
    chosen = []
    for (m, n), adds in product(TILES, ("epilogue", "warps")):
        tile = usual | {"block_m": m, "block_n": n, "adds": adds}
        depths = product(range(8, 2, -1), (256, 128))
        pipelines = ({"num_stages": stages} | ({"strip": strip} if scaled else {}) for stages, strip in depths)
        tried = (Config.of(name, tile | pipeline) for pipeline in pipelines)
        chosen += [config for config in tried if config in space][:1]
    chosen += space.variants["scaled_two_kernel" if scaled else "two_kernel"].seeds[:2]
    peers = [peer.name for peer in registry.of(problem).peers.values() if peer.where(problem, here)]
    return chosen + [Config(peer) for peer in peers if peer in OTHERS or "reduce_scatter" in peer]


if __name__ == "__main__":
    fp8.configs = configs
    fp8.main()
