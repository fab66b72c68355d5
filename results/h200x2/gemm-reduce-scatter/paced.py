"""A variant `paced` of GEMM + Reduce-Scatter and All-Reduce: `push_specialized` whose senders keep few bytes in flight.

    PYTHONPATH=. autotax tune gemm-reduce-scatter --m 2048 --n 7168 --k 768 --output replicated \\
        --load results/h200x2/gemm-reduce-scatter/paced.py --variants paced,push_one_shot

On full links whatever a processor loads waits behind what all processors have sent. Here a part travels as chunks of `rows` rows
by 64 columns. Before a chunk is sent, all but the chunk before it are written at the peers. So 4 KB to 16 KB are in flight.
It takes 1 % to 3.5 % less on 2 H200, where 10 % were predicted: README.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from autotax.core.config import Config
from autotax.core.space import VariantSpace
from autotax.hardware import Hardware
from autotax.kernels.all_gather_gemm.roles import X_ROWS, allocate, padded, reinterpret, store_block
from autotax.kernels.context import Context
from autotax.kernels.gemm_reduce_scatter import push_specialized, scatter_roles
from autotax.kernels.gemm_reduce_scatter.scatter_roles import tile_at
from autotax.kernels.primitives import flag_address, settle
from autotax.kernels.tiling import MOST_RANKS
from autotax.operators.gemm_reduce_scatter import GemmReduceScatter, operator
from autotax.spaces import gemm_reduce_scatter_roles as spaces
from results.copies import copy_of

COLS = gl.constexpr(64)
"""Columns of a chunk: a row of 128 bytes, the width of the swizzle."""


@gluon.jit
def allocate_parts(  # type: ignore[no-untyped-def]
    a, out, LOADERS: gl.constexpr,
    GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """In the place of `roles.allocate`: the staging areas hold parts, which are larger than chunks."""
    buffers, _ = allocate(a, out, LOADERS, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return buffers, gl.allocate_shared_memory(a.dtype, [GROUPS, X_ROWS, Y1], layout)


@gluon.jit
def send_chunks(  # type: ignore[no-untyped-def]
    boxes, out, stagings, staged, drained, taken, flags, bases, rank, epoch, share,  # noqa: ARG001
    WORLD: gl.constexpr, EVERYWHERE: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr, EPILOGUE: gl.constexpr,  # noqa: ARG001
    GROUPS: gl.constexpr, PARTS: gl.constexpr, WIDE: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """In the place of `scatter_roles.send_tiles`, for two ranks."""
    items, _, _, _, m_tiles, n_tiles = share
    layout: gl.constexpr = boxes[0].layout
    dtype: gl.constexpr = boxes[0].dtype
    ROWS: gl.constexpr = boxes[0].block_shape[1]
    DOWN: gl.constexpr = X_ROWS // ROWS
    CHUNKS: gl.constexpr = DOWN * WIDE // COLS
    gl.static_assert(WORLD == 2)
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        hop, block, tile = tile_at(item, m_tiles, n_tiles, 1 if EVERYWHERE else WORLD, INTERLEAVED, GROUP_M)
        for step in range(PARTS * GROUPS):
            part = step // GROUPS
            group = step % GROUPS
            mbarrier.wait(staged.index(group), (sent + part) & 1)
            for chunk in gl.static_range(CHUNKS):
                row = (block * GROUPS + group) * X_ROWS + chunk % DOWN * ROWS
                col = (tile * PARTS + part) * WIDE + chunk // DOWN * COLS
                stage = reinterpret(stagings.index(group), dtype, [CHUNKS, 1, ROWS, COLS], layout).index(chunk)
                if EVERYWHERE:
                    gl.inline_asm_elementwise(
                        "cp.async.bulk.wait_group 2;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                    )
                else:
                    gl.inline_asm_elementwise(
                        "cp.async.bulk.wait_group 1;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                    )
                for to in gl.static_range(WORLD):
                    if EVERYWHERE or hop == to:
                        store_block(boxes[to], [(epoch & 1) * WORLD + rank, row, col], stage)
            tma.store_wait(0)  # until the staged part has been read
            mbarrier.arrive(drained.index(group))
        sent += PARTS
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        settle(TARGET)
        gl.inline_asm_elementwise("fence.acq_rel.sys;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        index = (block * n_tiles + tile) * WORLD + rank
        for to in gl.static_range(WORLD):
            if EVERYWHERE or hop == to:
                gl.atomic_xchg(flag_address(flags, index, bases, rank, (rank + to) % WORLD), epoch, sem="relaxed", scope="sys")


ROLES = copy_of(scatter_roles, "paced", send_tiles=send_chunks, allocate=allocate_parts)
SPECIALIZED = copy_of(push_specialized, "paced", scatter_tiles=ROLES.scatter_tiles)


class Paced(SPECIALIZED.PushSpecialized):  # type: ignore[misc, name-defined]
    def __init__(self, problem: GemmReduceScatter, config: Config, context: Context) -> None:
        self.EVERYWHERE = problem.output == "replicated"
        usual = {"adds": "warps", "polls": "ahead", "order": "ring"}
        super().__init__(problem, Config.of(config.variant, {**usual, **config.values}), context)
        world = problem.world_size
        inboxes = [context.heap.peer(self.box, (context.rank + hop) % world) for hop in range(world)]
        views = [self.view(inbox.view(2 * world, self.room, problem.n), [1, config["rows"], COLS.value]) for inbox in inboxes]
        self.boxes = padded(views, MOST_RANKS, None)


def space(problem: GemmReduceScatter, hardware: Hardware) -> VariantSpace | None:
    """Tiles as in `push_one_shot`, and the rows of a chunk; for two ranks and 16 bits."""
    like = GemmReduceScatter(problem.m, problem.n, problem.k, problem.dtype, "replicated", problem.world_size, problem.weight)
    tiles = spaces.push_one_shot(like, hardware) if problem.world_size == 2 and problem.scales == "none" else None
    if tiles is None:
        return None
    parameters = {name: values for name, values in tiles.parameters.items() if name != "polls"} | {"rows": (16, 32, 64)}
    seeds = []
    for seed in tiles.seeds:
        values = {name: value for name, value in seed.values.items() if name != "polls"}
        seeds += [Config.of("paced", values | {"rows": rows}) for rows in (32, 16, 64)]
    return VariantSpace("paced", parameters, tiles.constraints, tuple(seeds))


operator.variant("paced", Paced, space)
