"""scaled_push_words: `push_words` for e4m3. Scales travel as in `scaled_specialized`, and `push_words` says why waits end."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from autotax.kernels.all_gather_gemm.by_words import receive_words, send_words
from autotax.kernels.all_gather_gemm.push_words import GROUP_M, PushWords, load_a, load_b
from autotax.kernels.all_gather_gemm.roles import X_ROWS, allocate
from autotax.kernels.all_gather_gemm.scaled_specialized import Codes, exchange_scales, multiply_scaled
from autotax.kernels.primitives import EPOCH, leave
from autotax.kernels.scaled_roles import await_launch


@gluon.jit
def exchange(
    words, scales, bases, control, rank, epoch, rows,
    WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, SCALES: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Exchanges words and scales. Programs count received words when they have both."""
    send_words(words, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, True)
    exchange_scales(scales, bases, control, rank, epoch, WORLD, SCALES, TARGET)
    receive_words(words, rank, epoch, rows, COLS, WORLD, COLS, K_GROUPS, TARGET)


@gluon.jit(do_not_specialize=["rank", "shard"])
def scaled_push_words_kernel(
    landed, b1, b2, b3, out1, out2, out3, a, stride, shard, landing, words, landings, room, own_scales, dense, scale_words, size, scale_room,
    scales_b, counts, bases, control, rank, rows, n,
    WORLD: gl.constexpr, COLS: gl.constexpr, K_GROUPS: gl.constexpr, SCALES: gl.constexpr, X_IS_B: gl.constexpr, GROUPS: gl.constexpr, Y1: gl.constexpr,
    Y2: gl.constexpr, Y3: gl.constexpr, STAGES: gl.constexpr, DEPTH: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """See `push_words_kernel`. Matrices are words of two codes, and COLS their number a row."""
    await_launch()
    epoch = gl.load(control + EPOCH)
    BLOCK_M: gl.constexpr = Y1 + Y2 + Y3 if X_IS_B else GROUPS * X_ROWS
    BLOCK_N: gl.constexpr = GROUPS * X_ROWS if X_IS_B else Y1 + Y2 + Y3
    b = (b1, b2, b3)
    out = (out1, out2, out3)
    n_tiles = gl.cdiv(n, BLOCK_N)
    buffers, stagings = allocate(landed, out1, 2, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)
    fence_async_shared()
    exchanged = (a, stride, shard, landing, words, landings, room, counts, control)
    scales = (own_scales, dense, scale_words, size, scale_room)
    of_all = (scales, rank, rows, shard, scales_b)
    # The gathered A is treated as one shard, because all its rows lie in one place.
    share = (gl.cdiv(WORLD * rows, BLOCK_M) * n_tiles, 0, WORLD * rows, COLS, n_tiles)
    goal = epoch * gl.num_programs(0)
    # Written out, because the list of functions must be a literal in the call. The last numbers are registers per thread.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (exchange, (exchanged, scales, bases, control, rank, epoch, rows, WORLD, COLS, K_GROUPS, SCALES, TARGET)),
                (multiply_scaled, (0, of_all, n, out, stagings, buffers, share, 1, False, GROUP_M, True, SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 1, 1],
            [168, 96, 96],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 2)
        gl.warp_specialize(
            [
                (exchange, (exchanged, scales, bases, control, rank, epoch, rows, WORLD, COLS, K_GROUPS, SCALES, TARGET)),
                (multiply_scaled, (0, of_all, n, out, stagings, buffers, share, 1, False, GROUP_M, True, SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (multiply_scaled, (1, of_all, n, out, stagings, buffers, share, 1, False, GROUP_M, True, SCALES, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
                (load_b, (b, buffers, share, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH)),
                (load_a, (landed, counts, goal, control, rank, buffers, share, K_GROUPS, X_IS_B, GROUPS, Y1, Y2, Y3, STAGES, DEPTH, TARGET)),
            ],
            [4, 4, 1, 1],
            [160, 160, 64, 64],
        )  # fmt: skip
    leave(control, epoch, gl.num_programs(0), TARGET)


class ScaledPushWords(Codes, PushWords):  # type: ignore[misc]
    """The shards of PushWords are words of two codes."""

    def run(self, a: Tensor, scales: Tensor, b: Tensor, scales_b: Tensor, out: Tensor) -> None:
        """See Codes.run."""
        context = self.context
        context.launch(
            scaled_push_words_kernel,
            (context.processors,),
            self.view_of_a, *self.views.of_b(b), *self.views.of_out(out[None]),
            a, a.stride(0), len(a), self.landing, self.words, self.landings, self.room,
            *self.places_of(scales, len(a)), scales_b, self.counts, context.heap.bases, self.control, context.rank, self.rows, self.problem.n,
            **self.constants,
        )  # fmt: skip
