"""Norms behind products of e4m3 with scales: the plain variants behind such a product, and `scaled_fused`, which computes its own.

Tensors of a call: a, b, the scales of a unless the call makes them, the scales of b, then those of `NormKernel` from the weight on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autotax.core.config import Config, Value
from autotax.core.problem import ceil_div, power_of_two
from autotax.kernels.all_gather_gemm.scaled_shards import CODES, Quantiser, spread_quantised
from autotax.kernels.all_reduce_norm.norm import Bsp, NormKernel, given_factor
from autotax.kernels.all_reduce_norm.push import Push
from autotax.kernels.all_reduce_norm.shots import LEAST_ROWS, OneShot, TwoShot, bring, clean_rows, norm_rows
from autotax.kernels.context import Context
from autotax.kernels.flash_decode.exchange import distances
from autotax.kernels.gemm_reduce_scatter.product import last_of_parts, part_of_tile
from autotax.kernels.packets import close_call, open_call, packed_numbers, slot_of
from autotax.kernels.primitives import settle, store_whole
from autotax.kernels.scaled_product import LIBRARY, ScaledProduct, Tile, scaled_sum, with_scales
from autotax.operators.all_reduce_norm import EPS, AllReduceNorm


class ScaledOperands(NormKernel):
    """A kernel behind a product of e4m3. It quantises an a of 16 bits by a kernel in front."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        assert problem.front is not None
        self.quantised = Quantiser(problem.front, problem.m, context)
        super().__init__(problem, config, context)

    def __call__(self, x: Tensor, *others: Tensor, eps: float = EPS) -> None:
        b, *rest = others
        of_a = rest.pop(0) if self.problem.quantize in ("none", "static") else None
        super().__call__(self.quantised(x, of_a), (b, rest.pop(0)), *rest, eps=eps)  # type: ignore[arg-type]


class ScaledNorm(ScaledOperands):
    """A plain kernel behind a product that is stored: of the library, or of the config's tiles."""

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        of_library: dict[str, Value] = {"product": LIBRARY, "splits": 1}
        chosen = Config.of(config.variant, {**of_library, **config.values})
        self.product: Any = ScaledProduct(problem.front, chosen, problem.m, context)
        super().__init__(problem, config, context)

    def addend(self, a: Any, b: Any) -> Any:
        """The x of `run`, from matrices with their scales."""
        codes, scales_a = a
        x = self.products[: len(codes)]
        self.product(codes, scales_a, *b, x)
        return x


class ScaledBsp(ScaledNorm, Bsp):
    """See Bsp."""


def bsp(problem: AllReduceNorm, config: Config, context: Context) -> Bsp:
    """The baseline of the problem's product."""
    return (ScaledBsp if problem.front else Bsp)(problem, config, context)


class ScaledOneShot(ScaledNorm, OneShot):
    """See OneShot."""


class ScaledTwoShot(ScaledNorm, TwoShot):
    """See TwoShot."""


class ScaledPush(ScaledNorm, Push):
    """See Push."""


@triton.jit
def send_to_all(
    acc, inbox, mine, away, epoch, tile, m,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Sends the tile-th BLOCK_N columns of all rows as words to every rank, this one last. `mine` are this rank's words here."""
    ACROSS: tl.constexpr = BLOCK_N // (HIDDEN // WIDTH)
    index = tl.arange(0, BLOCK_M * ACROSS)
    row = index // ACROSS
    word = tile * ACROSS + index % ACROSS
    inside = (row < m) & (word < WIDTH)
    words = packed_numbers(tl.reshape(acc, [BLOCK_M * BLOCK_N]), epoch, WIDE, TYPE, TARGET)
    here = mine + row.to(tl.int64) * WIDTH + word
    for hop in tl.static_range(WORLD):
        remote = (here.to(tl.int64) + away[hop]).to(inbox.dtype)
        store_whole(tl.multiple_of(remote, (16,)), words, inside, TARGET)


@triton.jit(do_not_specialize=["rank", "m", "eps", "stride_g"])
def scaled_fused_kernel(
    wide, static, codes, a, scales_a, stride_m, stride_g, b, scales_b, residual, weight, new_residual, y, scales,
    inbox, partials, finished, bases, control, state, rank, m, k, groups, eps, room,
    WORLD: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
    PART: tl.constexpr, SENT: tl.constexpr, HELD: tl.constexpr, COLS: tl.constexpr,
    SCALES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    WITHIN: tl.constexpr, COLS_A: tl.constexpr,
    OFFSET: tl.constexpr, QUANT: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """`fused_kernel` with a product of e4m3: see `scaled_product`. The program that adds up the parts of a tile sends it.

    WITHIN is how every program quantises all rows of `wide` for itself, or "none". Then `a` and
    `scales_a` have a part for each program; `codes` are the bytes of `a`. COLS_A is a power of two, not below k.
    """
    program, programs, epoch, before, limit = open_call(state, control, EARLY)
    factor = given_factor(scales, QUANT)
    away = distances(bases, rank, WORLD)
    if program == m:
        bring(weight, HIDDEN, COLS, TARGET)
    if ADDED:
        if program < m:
            bring(residual + tl.cast(program, tl.int64) * HIDDEN, HIDDEN, COLS, TARGET)
    if WITHIN != "none":
        at = program * (m * tl.cast(k, tl.int64))
        if WITHIN != "tensor":
            scales_a += program * m * groups
        spread_quantised(
            wide, static, float("inf"), codes + at, scales_a, 0, 1, m, groups, 0, m, k, bases, 0, 1, True, WITHIN, COLS_A, TARGET
        )
        a += at
        settle(TARGET)  # threads of this program read what others of them have stored
    mine = inbox + (slot_of(epoch, WIDE) * WORLD + rank) * room
    blocks = tl.cdiv(k, STRIP)
    for item in tl.range(program, tl.cdiv(HIDDEN, BLOCK_N) * SPLITS, programs):
        tile = item // SPLITS
        col = tile * BLOCK_N
        start, end = 0, k
        if SPLITS > 1:
            start = item % SPLITS * blocks // SPLITS * STRIP
            end = tl.minimum((item % SPLITS + 1) * blocks // SPLITS * STRIP, k)
        acc = scaled_sum(
            a, scales_a, 0, m, stride_m, stride_g, b, scales_b, col, HIDDEN, start, end, k,
            SCALES, BLOCK_M, BLOCK_N, STRIP, TMA, ALIGNED, TARGET,
        )  # fmt: skip
        complete = item >= 0
        if SPLITS > 1:
            complete = last_of_parts(acc, partials, finished, tile, item % SPLITS, SPLITS, BLOCK_M, BLOCK_N, TARGET)
            if complete:
                acc = part_of_tile(partials + tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N, 0, SPLITS, BLOCK_M, BLOCK_M, BLOCK_N)
        if complete:
            acc = with_scales(acc, scales_a, 0, m, stride_m, scales_b, col, HIDDEN, SCALES, BLOCK_M, BLOCK_N)
            send_to_all(acc, inbox, mine, away, epoch, tile, m, WORLD, WIDE, TYPE, WIDTH, HIDDEN, BLOCK_M, BLOCK_N, TARGET)
    # Here rather than at the start: the product need not wait for the number of the call.
    clean_rows(inbox, epoch, before, program, programs, rank, room, 0, WORLD, WIDE, WIDTH, SPLIT, PART, SENT, TARGET)
    norm_rows(
        None, residual, weight, new_residual, y, scales, inbox, epoch, factor, control, limit, program, programs, rank, m, eps, room,
        WORLD, WIDE, TYPE, WIDTH, HIDDEN, SPLIT, PART, HELD, COLS, OFFSET, QUANT, ADDED, TARGET,
    )  # fmt: skip
    close_call(state, program, programs, epoch, m)


class ScaledFused(ScaledOperands, OneShot):
    """`Fused` with a product of e4m3, whose tiles may be computed in parts along K. Partial sums never wait for each other.

    A kernel in front quantises an a of 16 bits, or every program does it for itself (`quantised`), which saves a launch.
    """

    def __init__(self, problem: AllReduceNorm, config: Config, context: Context) -> None:
        rows = max(LEAST_ROWS, power_of_two(problem.m))
        name = f"{rows}x{config['block_n']}x{config['num_stages']}x{config['num_warps']}"
        self.tile = Tile(Config.of(config.variant, product=name, splits=config["splits"]), context)
        self.tile.tma = config["loads"] == "tma"
        super().__init__(problem, config, context)
        self.partials, self.finished = self.tile.parts(problem.m, problem.hidden, context)
        self.groups = max(1, self.quantised.groups)
        self.constants |= self.tile.constants(problem.front) | {"WITHIN": "none", "COLS_A": self.quantised.columns}
        if config["quantised"] == "within":
            self.constants["WITHIN"] = self.quantised.quant
            self.codes = context.empty((self.programs, problem.m, problem.k), torch.uint8)
            self.own_scales = context.empty((self.programs, self.groups * problem.m), torch.float32)
            self.quantised: Any = lambda a, of_a: (a, self.own_scales if of_a is None else of_a)

    def units(self, problem: AllReduceNorm, config: Config) -> int:
        return max(ceil_div(problem.hidden, self.tile.columns) * self.tile.splits, super().units(problem, config))

    def unnormed(self, problem: AllReduceNorm) -> Tensor:  # noqa: ARG002
        """None: the product stays in registers."""
        return self.context.empty((0,), torch.int64)

    def addend(self, a: Any, b: Any) -> Any:
        """The operands with their scales: the kernel multiplies them."""
        return *a, *b

    def run(self, x: Any, residual: Tensor, weight: Tensor, new_residual: Tensor, y: Tensor, scales: Tensor, eps: float) -> None:
        a, scales_a, b, scales_b = x
        context, problem, tile = self.context, self.problem, self.tile
        wide, codes, strides = a, scales_a, scales_a.stride() if scales_a.dim() == 2 else (0, 0)
        if self.constants["WITHIN"] != "none":
            codes, a, strides = self.codes, self.codes.view(CODES), (1, problem.m)
        context.launch(
            scaled_fused_kernel, (self.programs,),
            wide, scales_a, codes, tile.view(a, tile.rows), scales_a, *strides, tile.view(b, tile.columns), scales_b,
            residual, weight, new_residual, y, scales, self.inbox, self.partials, self.finished, context.heap.bases, self.control, self.state,
            context.rank, problem.m, problem.k, self.groups, eps, self.room, **self.constants,
        )  # fmt: skip
