"""All-Reduce + residual + RMSNorm, with optional quantisation of the output: it follows each row-parallel GEMM of a model."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from autotax.core.errors import UsageError
from autotax.core.problem import Problem, choice, dtype, ranks, size
from autotax.hardware import Hardware, has_iris, links_us
from autotax.operators import scaled
from autotax.operators.declaration import Operator, Rates
from autotax.operators.scaled import GROUP, LARGEST, LEAST_BLOCK, LEAST_ROW_SCALE

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.gemm_reduce_scatter import GemmReduceScatter
    from autotax.operators.inputs import Call, Draw

EPS = 1e-6
"""The default epsilon, which is added to the mean square."""
MOST = 8192
"""Most rows."""


@dataclass(frozen=True)
class AllReduceNorm(Problem):
    """S = the sum over the ranks of x [m, hidden] + the residual; y = S / sqrt(mean(S^2) + eps) * (weight + offset).

    S is added up in float32, rank after rank and the residual last, and rounded to the dtype. The rounded S is the new residual;
    y is computed from it in float32. Every rank gets both, [m, hidden], with equal bits.

    - `residual="added"` adds the residual. With `"none"` the new residual is the sum over the ranks.
    - `quant="none"`: y has the dtype. Else y is rounded to the dtype and then quantised to e4m3, saturating at 448, with float32
      scales. `tensor`: one scale, an input. `row`: scales [m] of largest magnitude of the row / 448, at least 1 / (448 * 512).
      `block`: scales [m, hidden / 128] of largest magnitude of 128 columns, at least 1e-10, / 448. A NaN has no magnitude.
    - `offset=1`: the weight is stored as its difference from 1, as in Gemma.
    - `k`: x is the product of this rank's a [m, k] and b [hidden, k], which are given instead. 0: x is given.
    - `scales`: a and b are e4m3 and have scales: see `operators/scaled.py`. With `quantize` the given a has the dtype, and each
      rank quantises it.
    """

    m: int = size("rows", most=MOST, varying=True)
    hidden: int = size("columns, a multiple of 8", most=16384)
    dtype: str = dtype()
    world_size: int = ranks()
    residual: str = choice("added or none", ("added", "none"), default="added")
    quant: str = choice(
        "none, or e4m3 by a scale: tensor (given), row or block (1 x 128)", ("none", "tensor", "row", "block"), default="none"
    )
    offset: int = choice("0 or 1: what is added to the weight", (0, 1), default=0)
    k: int = size("the inner dimension on each rank of a product in front, or 0", least=0, default=0, unnamed=True)
    scales: str = choice(
        "none, or tensor, row or block: the scales of a product of e4m3 in front", ("none", "tensor", "row", "block"),
        default="none", unnamed=True,
    )  # fmt: skip
    quantize: str = choice(
        "none, row, block or static: how ranks quantise the first matrix of that product", ("none", *scaled.SCALES_OF),
        default="none", unnamed=True,
    )  # fmt: skip

    op: ClassVar[str] = "all-reduce-norm"

    def check(self) -> None:
        multiple = GROUP if self.quant == "block" else 8
        if self.hidden % multiple:
            option = " with --quant block" if self.quant == "block" else ""
            raise UsageError(f"hidden is {self.hidden}; it must be a multiple of {multiple}{option}: give another --hidden")
        if self.scales == "none":
            if self.quantize != "none":
                raise UsageError(f"quantize is {self.quantize!r} without scales; only a product of e4m3 takes it: give --scales")
            return
        if not self.k or self.dtype == "fp32":
            raise UsageError(
                f"scales is {self.scales!r} with k {self.k}, dtype {self.dtype}; "
                "only a product with results of 16 bits has scales: give --k, and --dtype bf16 or fp16"
            )
        if self.hidden % scaled.MULTIPLE:
            least = f"it must be a multiple of {scaled.MULTIPLE}: give another --hidden"
            raise UsageError(f"hidden is {self.hidden} with scales {self.scales}; {least}")
        assert self.front  # checks the rest

    @cached_property
    def front(self) -> GemmReduceScatter | None:
        """The product of e4m3 in front and its sum, as a problem of their own. None without scales."""
        if self.scales == "none":
            return None
        from autotax.operators.gemm_reduce_scatter import GemmReduceScatter

        shape = self.m, self.hidden, self.k, "e4m3", "replicated", self.world_size
        return GemmReduceScatter(*shape, scales=self.scales, result=self.dtype, quantize=self.quantize)

    @cached_property
    def operands(self) -> int:
        """Tensors of a call before the weight of the norm: x, or the matrices of the product and their scales."""
        return 1 + (self.k > 0) + (self.front is not None) * (1 + (self.quantize in ("none", "static")))

    @property
    def nbytes(self) -> int:
        if self.front:
            return super().nbytes
        tensors = 3 if self.residual == "added" else 2
        elements = self.m * self.hidden
        if self.k:
            tensors -= 1
        operands = (self.m + self.hidden) * self.k * self.item_size
        rows = elements * (tensors * self.item_size + self.out_size)
        return operands + rows + self.hidden * self.item_size + 4 * self.scale_count

    @property
    def out_dtype(self) -> str:
        return self.dtype if self.quant == "none" else "e4m3"

    @property
    def addends(self) -> int:
        return self.world_size

    @property
    def out_size(self) -> int:
        """Bytes of an element of y."""
        return self.item_size if self.quant == "none" else 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.hidden * self.k

    @cached_property
    def scale_count(self) -> int:
        """Number of scales of y."""
        return {"none": 0, "tensor": 1, "row": self.m, "block": self.m * self.hidden // GROUP}[self.quant]

    def brief(self) -> str:
        """`m 16 x 8192`"""
        return self.with_unusual(f"m {self.m} x {self.hidden}", "k", "scales", "quantize", "residual", "quant", "offset", "dtype")


operator = Operator(AllReduceNorm)
operator.example(on_gpu=AllReduceNorm(16, 8192), on_cpu=AllReduceNorm(5, 96, "fp32"))

ROWS = {"bf16": (-40, 40), "fp32": (-40, 40), "fp16": (-4, 2)}
"""Exponents of the powers of two that scale rows; the squares of the sums stay in range."""
STATIC = 1 / 32
"""The scale of quant `tensor`: the largest representable y is 14."""


@operator.inputs
def draw(problem: AllReduceNorm, draw: Draw) -> Call:
    """x or a and b, the weight, the buffer of the new residual, the residual and the scales or their buffer if any -> y."""
    import torch

    from autotax.operators.inputs import EIGHT_BITS, Call

    if problem.front:
        operands = _scaled_operands(problem.front, draw)
    else:
        operands = [draw.normal(problem.m, problem.k or problem.hidden, tensor=20)]
        if problem.k:
            operands.append(draw.normal(problem.hidden, problem.k, tensor=23).mul_(2.0 ** -(problem.k.bit_length() // 2)))
    weight = draw.normal(problem.hidden, tensor=21, shared=True)
    residual = draw.normal(problem.m, problem.hidden, tensor=22, shared=True)
    if draw.extreme and not problem.front:
        _spread(problem, draw, operands, residual)
    tensors = [*operands, weight, draw.empty(problem.m, problem.hidden)]
    if problem.residual == "added":
        tensors.append(residual)
    if problem.quant != "none":
        shape = {"tensor": (1,), "row": (problem.m,), "block": (problem.m, problem.hidden // GROUP)}[problem.quant]
        tensors.append(torch.full(shape, STATIC, dtype=torch.float32, device=draw.device))
    y = draw.empty(problem.m, problem.hidden)
    written = (len(operands) + 1, *(len(tensors) - 1,) * (problem.quant in ("row", "block")))
    return Call(tuple(tensors), y if problem.quant == "none" else y.to(EIGHT_BITS["e4m3"]), written)


def _scaled_operands(front: GemmReduceScatter, draw: Draw) -> list[Tensor]:
    """a and b of a product of e4m3 and their scales. In even seeds elements of the product are about 1, as in the residual."""
    from autotax.operators.inputs import EIGHT_BITS

    operands = scaled.draw_call(front, replace(draw, dtype=EIGHT_BITS["e4m3"]), front.m, front.m, 20, shared=False).tensors
    if draw.device.type != "meta" and not draw.extreme:
        matrices = 2 if front.quantize == "none" else 1  # that have scales about `scaled.BASE`
        operands[-1].mul_(scaled.BASE**-matrices * 2.0 ** -(front.k.bit_length() // 2))
    return list(operands)


def _spread(problem: AllReduceNorm, draw: Draw, operands: Sequence[Tensor], residual: Tensor) -> None:
    """Scales rows and channels equally on all ranks. Puts an infinity into a row of one rank and a NaN into a row of another."""
    from autotax.operators.inputs import SPREADS, powers, scale

    seed = draw.seed
    rows = powers((problem.m, 1), ROWS[problem.dtype], seed, 20)
    channels = powers((problem.hidden,), SPREADS["fp16"].channel, seed, 21)
    x = operands[0]
    scale(residual, rows * channels)
    if problem.k:
        scale(x, rows)
        scale(operands[1], channels[:, None])
    else:
        scale(x, rows * channels)
    if problem.m >= 4 and problem.quant == "none":
        place = 7 * seed % x.shape[1]
        if draw.rank == seed % problem.world_size:
            x[seed % problem.m, place] = math.inf
        if draw.rank == 0:
            x[(seed + 2) % problem.m, place] = math.nan


def addends(problem: AllReduceNorm, calls: Sequence[Call]) -> list[Tensor]:
    """The addends in their order, float32 [m, hidden] each."""
    return [addend for addend, _ in _addends(problem, calls)]


def _addends(problem: AllReduceNorm, calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
    """The addends in their order, float32 [m, hidden] each, and their spreads."""
    from autotax.operators.verification import product_and_spread

    parts = []
    for call in calls:
        if problem.front:
            parts.append(product_and_spread(*scaled.numbers(problem.front, call.tensors[: problem.operands])))
            continue
        part = call.tensors[0].float()
        if problem.k:
            part = part @ call.tensors[1].float().t()
        parts.append((part, part.abs()))
    if problem.residual == "added":
        residual = calls[0].tensors[problem.operands + 2].float()
        parts.append((residual, residual.abs()))
    return parts


@operator.reference
def reference(problem: AllReduceNorm, calls: Sequence[Call], rank: int) -> list[tuple[Tensor, Tensor]]:  # noqa: ARG001
    """The right y in float32, quantised if the problem asks for it, the new residual, and the scales; and their spreads."""
    from autotax.operators.verification import together

    parts, spreads = zip(*_addends(problem, calls), strict=True)
    weight = calls[0].tensors[problem.operands]
    total = sum(parts[1:], parts[0]).to(weight.dtype).float()
    factor = (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight.float() + problem.offset)
    spread = together(spreads)
    new_residual = total, spread
    y, spread = total * factor, spread * factor.abs()
    if problem.quant == "none":
        return [(y, spread), new_residual]
    y = y.to(weight.dtype)
    scales = calls[0].tensors[-1] if problem.quant == "tensor" else scales_of(problem, y)
    inverse = 1 / scales.double().view(problem.m if problem.quant != "tensor" else 1, -1)
    inverse = inverse.repeat_interleave(problem.hidden // inverse.shape[1], 1)
    right = quantised(problem, y, scales).float(), (spread * inverse.float()).clamp_max_(LARGEST)
    return [right, new_residual, *[(scales, scales)] * (problem.quant != "tensor")]


def scales_of(problem: AllReduceNorm, y: Tensor) -> Tensor:
    """The scales of y [m, hidden] with quant `row` or `block`, float32. A NaN has no magnitude."""
    size = y.float().abs().nan_to_num(0.0, math.inf, math.inf)
    if problem.quant == "row":
        return (size.amax(-1) / LARGEST).clamp_min(LEAST_ROW_SCALE)
    return size.view(problem.m, -1, GROUP).amax(-1).clamp_min(LEAST_BLOCK) / LARGEST


def quantised(problem: AllReduceNorm, y: Tensor, scales: Tensor) -> Tensor:
    """Quantises y [m, hidden] to e4m3. Like vLLM it divides by the scale with quant `block`, else multiplies by the inverse."""
    from autotax.operators.inputs import EIGHT_BITS

    if problem.quant == "block":
        parts = (y.float().view(problem.m, -1, GROUP) / scales[..., None]).view(problem.m, problem.hidden)
    else:
        parts = y.float() * (1 / scales).view(-1, 1)
    return parts.clamp(-LARGEST, LARGEST).to(EIGHT_BITS["e4m3"])


@operator.bound(links="the links at full rate")
def bound(problem: AllReduceNorm, hardware: Hardware, _: Rates) -> dict[str, float]:
    """The time for a rank to receive its addends from the peers, and then the sums that the peers add up."""
    peers = problem.world_size - 1
    part = math.ceil(problem.m * problem.hidden / problem.world_size) * problem.item_size
    return links_us(2 * peers * part, peers, hardware)


_KERNELS, _SPACES = "autotax.kernels.all_reduce_norm", "autotax.spaces.all_reduce_norm"

operator.variant("bsp", f"{_KERNELS}.scaled_norms:bsp", f"{_SPACES}:bsp", role="baseline")
operator.variant("one_shot", f"{_KERNELS}.shots:OneShot", f"{_SPACES}:one_shot")
operator.variant("two_shot", f"{_KERNELS}.shots:TwoShot", f"{_SPACES}:two_shot")
operator.variant("push", f"{_KERNELS}.push:Push", f"{_SPACES}:push")
operator.variant("fused", f"{_KERNELS}.shots:Fused", f"{_SPACES}:fused")
operator.variant("scaled_one_shot", f"{_KERNELS}.scaled_norms:ScaledOneShot", f"{_SPACES}:scaled_one_shot")
operator.variant("scaled_two_shot", f"{_KERNELS}.scaled_norms:ScaledTwoShot", f"{_SPACES}:scaled_two_shot")
operator.variant("scaled_push", f"{_KERNELS}.scaled_norms:ScaledPush", f"{_SPACES}:scaled_push")
operator.variant("scaled_fused", f"{_KERNELS}.scaled_norms:ScaledFused", f"{_SPACES}:scaled_fused")


def _with_torch(front: bool, divided: bool) -> Callable[[AllReduceNorm, Hardware], bool]:
    """Whether the sums of torch's symmetric memory apply, which support bf16 and float32. `front`: behind a product of e4m3.
    `divided`: the ranks must divide the rows.
    """

    def serves(problem: AllReduceNorm, hardware: Hardware) -> bool:
        even = not divided or problem.m % problem.world_size == 0
        multiplied = problem.front is None or scaled.has_library_product(problem.front, hardware)
        return hardware.backend == "cuda" and problem.dtype != "fp16" and bool(problem.front) == front and multiplied and even

    return serves


def _installed(package: str, fuses: Callable[[AllReduceNorm], bool]) -> Callable[[AllReduceNorm, Hardware], bool]:
    """Whether a package is installed and its kernel serves a problem. With products in front they are not measured."""

    def serves(problem: AllReduceNorm, hardware: Hardware) -> bool:
        fits = hardware.backend == "cuda" and not problem.k and fuses(problem)
        return fits and importlib.util.find_spec(package) is not None

    return serves


def _whole(problem: AllReduceNorm) -> bool:
    """Whether a residual is added, and y is not quantised."""
    return (problem.residual, problem.quant) == ("added", "none")


_OTHERS = {
    "flashinfer": _installed("flashinfer", lambda problem: _whole(problem) and problem.offset == 0 and problem.dtype != "fp32"),
    "vllm": _installed("vllm", lambda problem: problem.world_size in (2, 4, 6, 8)),
    "sglang": _installed("sglang", lambda problem: _whole(problem) and problem.dtype == "bf16" and problem.hidden % 256 == 0),
}
operator.peer("flashinfer", f"{_KERNELS}.peers:FlashInfer", where=_OTHERS["flashinfer"])
operator.peer("vllm", f"{_KERNELS}.peers:VllmSum", where=_OTHERS["vllm"])
operator.peer("sglang", f"{_KERNELS}.peers:SglangPush", where=_OTHERS["sglang"])
for _name, _kernel, _divided in (
    ("torch_one_shot", "TorchOneShot", False),
    ("torch_two_shot", "TorchTwoShot", False),
    ("torch_reduce_scatter", "TorchReduceScatter", True),
):
    operator.peer(_name, f"{_KERNELS}.peers:{_kernel}", where=_with_torch(False, _divided), served=True)
    operator.peer(f"{_name}_scaled", f"{_KERNELS}.peers:{_kernel}Scaled", where=_with_torch(True, _divided), served=True)


def _with_iris(problem: AllReduceNorm, hardware: Hardware) -> bool:
    """Whether the all-reduce of Iris is installed. It gets a copy of x, so products in front are not measured."""
    return hardware.on_gpu and not problem.k and has_iris()


operator.peer_and_tuned("iris_all_reduce", f"{_KERNELS}.peers:IrisAllReduce", where=_with_iris, modes=("graph",))
