"""Products of e4m3 for warp-specialized kernels: what differs from `all_gather_gemm.roles`. For Hopper, in Gluon.

Two codes are a word of 16 bits. So all warps but the multiplying ones, and all boxes, buffers and flags, are those of the kernels
for 16 bits, with half the columns of K. A multiplying group reads a strip of 64 words as 128 codes.

Tensor cores add products of e4m3 with fewer bits than float32 has. So a group adds up the sum of each strip in float32, while the
other group multiplies. With scales `block` it scales that sum first. Other scales are applied to the whole sum. Where no scale
changes within K, tensor cores may add up two strips before that (docs/fp8.md, "Errors"). With fast accumulation they add up all of
K (`roles.products_of`): callers then have zero STRIPS.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from autotax.kernels import tiling
from autotax.kernels.all_gather_gemm.roles import BLOCK_K, X_ROWS, codes_of, store_part
from autotax.kernels.primitives import arithmetic

CODES = gl.constexpr(2 * BLOCK_K)
"""Codes of a strip, which share a scale with scales `block`."""
MOST_TOGETHER = gl.constexpr(tiling.MOST_TOGETHER)
steps_before = arithmetic(tiling.steps_before)

OVERLAPPING = {"launch_pdl": True}
"""The option of a launch that may begin while the kernel before it ends. Such a kernel begins with `await_launch`."""


@gluon.jit
def await_launch():
    """Waits until the kernel before this one has ended and its stores are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait;\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def product_of(mine, theirs, before, layout: gl.constexpr, ROWS: gl.constexpr, ADDS: gl.constexpr):
    """Issues the product of a strip of X and of a part of Y. It is added to `before` with ADDS, else to zero."""
    if not ADDS:
        before = gl.zeros([X_ROWS, ROWS], gl.float32, layout)
    return warpgroup_mma(mine, codes_of(theirs, ROWS).permute((1, 0)), before, use_acc=ADDS, is_async=True)


@gluon.jit
def release(empty, turn, strip: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, STRIPS: gl.constexpr):
    """Gives back the buffers whose last strip is among the STRIPS strips up to this one."""
    for number in gl.static_range(strip + 1 - STRIPS, strip + 1):
        mbarrier.arrive(empty.index((turn + number // DEPTH) % STAGES), pred=number % DEPTH == DEPTH - 1)


@gluon.jit
def added(total, part, of_a, of_b, SCALES: gl.constexpr, X_IS_B: gl.constexpr):
    """total + part, with scales `block` times the scales of both."""
    if SCALES == "block":
        scale = of_a * of_b
        part = part * (scale[None, :] if X_IS_B else scale[:, None])
    return total + part


@gluon.jit
def multiplied_here(values, factor):
    """values * factor, which the compiler moves over no other instruction of this kind and over no wait."""
    return gl.inline_asm_elementwise("mul.f32 $0, $1, $2;", "=f,f,f", [values, factor], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def multiply_tile(
    GROUP: gl.constexpr, buffers, cols, turn, of_a, stride, of_b,
    SCALES: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr, Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr,
    DEPTH: gl.constexpr, STRIPS: gl.constexpr, EARLY: gl.constexpr = False, TURN: gl.constexpr = 0, TURNS: gl.constexpr = 1,
):  # fmt: skip
    """The float32 sums of a group's 64 rows of X with each part of Y; `cols` are words. See `roles.multiply_tiles`.

    With scales `block`, `of_a` are the addresses of the first scales of the rows of A, `stride` the distance of the next ones,
    and `of_b` the address of the first scale of B, which serves the whole tile. With two STRIPS a group issues the products of both,
    then scales the sum of the first while tensor cores multiply the second. Without such scales tensor cores add up STRIPS strips.

    TURNS groups with the same rows take turns at the buffers. A buffer always has the same group: no group may wait for a load of
    a buffer before the one between that and its last, since a barrier tells only two neighbouring loads apart.

    EARLY: the scales of some strips are loaded before the strips are needed, since with few rows a load takes longer than the
    product of a strip. When the first strip has arrived, all scales have.
    """
    x, y, full, empty = buffers
    layout1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y1, 32])
    layout2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y2 if Y2 else Y1, 32])
    layout3: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Y3 if Y3 else Y1, 32])
    one = gl.zeros([X_ROWS, Y1], gl.float32, layout1)
    two = gl.zeros([X_ROWS, Y2 if Y2 else Y1], gl.float32, layout2)
    three = gl.zeros([X_ROWS, Y3 if Y3 else Y1], gl.float32, layout3)
    STEP: gl.constexpr = max(DEPTH, STRIPS)
    LOADED: gl.constexpr = 2 if X_IS_B and Y1 > 32 else 4  # a thread holds a quarter of the scales of Y, or two of X
    last = cols // BLOCK_K - 1
    scales, scales_b = (), ()  # type: tuple, tuple
    if EARLY and SCALES == "block":
        mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
        for early in gl.static_range(LOADED):
            scales += (gl.load(of_a + gl.minimum(early, last) * stride, cache_modifier=".cg"),)
            scales_b += (gl.load(of_b + gl.minimum(early, last)),)
    start = 0
    if TURNS > 1:
        gl.static_assert(STAGES * DEPTH % (TURNS * STEP) == 0)
        skipped = steps_before(turn * DEPTH // STEP, TURN, TURNS)
        start = skipped * (STEP * BLOCK_K)
        turn += skipped * (STEP // DEPTH)
    for at in range(start, cols, TURNS * (STEP * BLOCK_K)):
        first, second, third = one, two, three
        if Y1 + Y2 + Y3 > MOST_TOGETHER:  # part by part
            gl.static_assert(DEPTH == 1 and Y3 == 0 and SCALES != "block")
            for strip in gl.static_range(STRIPS):
                stage = (turn + strip) % STAGES
                mbarrier.wait(full.index(stage), (turn + strip) // STAGES & 1)
                mine = codes_of(x.index(stage * GROUPS + GROUP), X_ROWS)
                first = product_of(mine, y[0].index(stage), first, layout1, Y1, strip > 0)
            first = warpgroup_mma_wait(num_outstanding=0, deps=(first,))
            one += first
            for strip in gl.static_range(STRIPS):
                stage = (turn + strip) % STAGES
                mine = codes_of(x.index(stage * GROUPS + GROUP), X_ROWS)
                second = product_of(mine, y[1].index(stage), second, layout2, Y2, strip > 0)
            second = warpgroup_mma_wait(num_outstanding=0, deps=(second,))
            release(empty, turn, STRIPS - 1, STAGES, DEPTH, STRIPS)
            two += second
        elif SCALES == "block" and STRIPS > 1:
            gl.static_assert(DEPTH == 1 and STRIPS == 2 and Y2 == 0)
            here, following = turn % STAGES, (turn + 1) % STAGES
            number = at // BLOCK_K
            mbarrier.wait(full.index(here), turn // STAGES & 1)
            of_rows = gl.load(of_a + number * stride, cache_modifier=".cg")
            of_next = gl.load(of_a + (number + 1) * stride, cache_modifier=".cg")
            of_cols, of_other = gl.load(of_b + number), gl.load(of_b + number + 1)
            first = product_of(codes_of(x.index(here * GROUPS + GROUP), X_ROWS), y[0].index(here), first, layout1, Y1, False)
            mbarrier.wait(full.index(following), (turn + 1) // STAGES & 1)
            mine = codes_of(x.index(following * GROUPS + GROUP), X_ROWS)
            second = product_of(mine, y[0].index(following), second, layout1, Y1, False)
            # These two waits end at once. The compiler moves no instruction over them. Else it would multiply the scales before the
            # second product and so wait for their loads there, or wait for both products before it adds the first.
            mbarrier.wait(full.index(following), (turn + 1) // STAGES & 1)
            of_rows, of_next = multiplied_here(of_rows, of_cols), multiplied_here(of_next, of_other)
            mbarrier.wait(full.index(following), (turn + 1) // STAGES & 1)
            first = warpgroup_mma_wait(num_outstanding=1, deps=(first,))
            release(empty, turn, 0, STAGES, DEPTH, 1)
            one = added(one, first, of_rows, 1.0, SCALES, X_IS_B)
            second = warpgroup_mma_wait(num_outstanding=0, deps=(second,))
            release(empty, turn, 1, STAGES, DEPTH, 1)
            one = added(one, second, of_next, 1.0, SCALES, X_IS_B)
        else:
            for strip in gl.static_range(STEP):
                stage = (turn + strip // DEPTH) % STAGES
                if strip % DEPTH == 0:
                    mbarrier.wait(full.index(stage), (turn + strip // DEPTH) // STAGES & 1)
                place = stage * DEPTH + strip % DEPTH
                mine = codes_of(x.index(place * GROUPS + GROUP), X_ROWS)
                first = product_of(mine, y[0].index(place), first, layout1, Y1, strip % STRIPS > 0)
                if SCALES == "block":  # loaded while the product is computed
                    number = at // BLOCK_K + strip
                    if EARLY:
                        number = gl.minimum(number + LOADED, last)
                    scales += (gl.load(of_a + number * stride, cache_modifier=".cg"),)
                    scales_b += (gl.load(of_b + number),)
                    scale, scale_b = scales[0], scales_b[0]
                    scales, scales_b = scales[1:], scales_b[1:]
                else:
                    scale, scale_b = 1.0, 1.0
                if Y2:
                    second = product_of(mine, y[1].index(place), second, layout2, Y2, strip % STRIPS > 0)
                if Y3:
                    third = product_of(mine, y[2].index(place), third, layout3, Y3, strip % STRIPS > 0)
                if strip % STRIPS == STRIPS - 1:
                    if Y3:
                        first, second, third = warpgroup_mma_wait(num_outstanding=0, deps=(first, second, third))
                    elif Y2:
                        first, second = warpgroup_mma_wait(num_outstanding=0, deps=(first, second))
                    else:
                        first = warpgroup_mma_wait(num_outstanding=0, deps=(first,))
                    release(empty, turn, strip, STAGES, DEPTH, STRIPS)
                    one = added(one, first, scale, scale_b, SCALES, X_IS_B)
                    if Y2:
                        two += second
                    if Y3:
                        three += third
        turn += TURNS * (STEP // DEPTH)
    return one, two, three, turn


@gluon.jit
def with_scales(total, of_a, inside, scales_b, col, n, SCALES: gl.constexpr, X_IS_B: gl.constexpr):
    """A whole sum times the scales of a tensor or of rows. `of_a` are the addresses of the rows' scales, of which those `inside`
    exist, in the layout of a side of any part. With scales `block` the sum has them already.
    """
    layout: gl.constexpr = total.type.layout
    side: gl.constexpr = gl.SliceLayout(0 if X_IS_B else 1, layout)
    other: gl.constexpr = gl.SliceLayout(1 if X_IS_B else 0, layout)
    if SCALES != "block":
        scale = gl.load(gl.convert_layout(of_a, side), mask=gl.convert_layout(inside, side), other=0.0, cache_modifier=".cg")
        if SCALES == "tensor":
            scale = scale * gl.load(scales_b)
        total = total * (scale[None, :] if X_IS_B else scale[:, None])
    if SCALES == "row":
        c = col + gl.arange(0, total.shape[0 if X_IS_B else 1], layout=other)
        scale_b = gl.load(scales_b + c, mask=c < n, other=0.0)
        total = total * (scale_b[:, None] if X_IS_B else scale_b[None, :])
    return total


@gluon.jit
def store_boxes(out, part, staging, row, col, rows, X_IS_B: gl.constexpr, TARGET: gl.constexpr):
    """Stores a part of a tile: one box of C, or two where a box has half its columns."""
    WIDE: gl.constexpr = out.block_shape[2]
    if X_IS_B or part.shape[1] == WIDE:
        store_part(out, part, staging, row, col, rows, X_IS_B, TARGET)
    else:
        gl.static_assert(part.shape[1] == 2 * WIDE)
        left, right = part.reshape([X_ROWS, 2, WIDE]).permute((0, 2, 1)).split()
        store_part(out, left, staging, row, col, rows, X_IS_B, TARGET)
        store_part(out, right, staging, row, col + WIDE, rows, X_IS_B, TARGET)
