"""Products of e4m3 matrices with scales: layouts of scales, fields of problems, inputs, references.

A is [m, k], B [n, k]. Scales are float32, and an element stands for its value times its scale:

- `tensor`: one scale for A and one for B, [1] each;
- `row`: A [m, 1] and B [1, n];
- `block`: A has one scale for 1 x 128 elements, [m, ceil(k / 128)] with strides (1, m), as torch's operators and DeepGEMM take
  it; B has one for 128 x 128, [ceil(n / 128), ceil(k / 128)], contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autotax.core.errors import UsageError
from autotax.core.problem import WHOLE_TYPES, ceil_div, choice, dtype
from autotax.hardware import Hardware

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw

GROUP = 128
"""Elements along K, and rows of B, that share a scale with scales `block`."""
LARGEST = 448.0
"""The largest finite e4m3."""
LEAST_ROW_SCALE = 1 / (LARGEST * 512)
"""The smallest scale of quantised rows, as in vLLM."""
LEAST_BLOCK = 1e-10
"""The smallest largest magnitude of a block that the quantiser assumes, as in vLLM."""
FEW_ROWS = 64
"""With at most so many rows Triton's products are faster than the library's: they cut K, and so read B faster. Measured on two
H200: the library takes 1.3 times as long at 16 rows, and 0.8 times at 128.
"""
MULTIPLE = 16
"""n and k are multiples of this many elements: vendors' products require it."""
SCALES_OF = {"row": "row", "block": "block", "static": "tensor"}
"""The scales of A that each way of quantising makes or takes."""


def accumulate_of(quantize: str) -> str:
    """How vLLM and SGLang accumulate in layers that quantise so: their products of CUTLASS without blocks do it fast."""
    return "fast" if quantize in ("row", "static") else "exact"


_FIELDS = {
    "scales": ("none, or with dtype e4m3: tensor, row or block (1 x 128 of A, 128 x 128 of B)", "none", "tensor", "row", "block"),
    "result": ("bf16 or fp16: the type of C with dtype e4m3", "bf16", "fp16"),
    "quantize": (
        "none, row, block or static: how ranks quantise an A of the type of C, with dtype e4m3", "none", "row", "block", "static"
    ),
    "operand": ("e4m3, or e5m2 for gradients: the type of A with dtype e4m3", "e4m3", "e5m2"),
    "accumulate": (
        "exact, or fast with dtype e4m3: tensor cores may add up all of K, with fewer bits than float32 has", "exact", "fast"
    ),
}
"""The meaning of each field, and the allowed values. The first is the value for problems with other types than e4m3."""
USUAL = {name: default for name, (_, default, *_) in _FIELDS.items()}
ACCUMULATE = _FIELDS["accumulate"][1:]


def scaled_dtype() -> Any:
    """The element type of A and B, e4m3 among them."""
    return dtype(allowed=(*WHOLE_TYPES, "e4m3"))


def scaled_field(name: str) -> Any:
    """A field of problems whose matrices may be e4m3."""
    meaning, *allowed = _FIELDS[name]
    return choice(meaning, tuple(allowed), default=allowed[0], unnamed=True)


def check(problem: Any) -> None:
    """Raises UsageError for fields of e4m3 that contradict each other, and for sizes that products of e4m3 do not support."""
    if problem.dtype != "e4m3":
        for name, default in USUAL.items():
            if getattr(problem, name, default) != default:
                value = getattr(problem, name)
                raise UsageError(
                    f"{name} is {value!r} with dtype {problem.dtype}; only e4m3 takes it: give --dtype e4m3 or leave --{name} out"
                )
        return
    if problem.scales == "none":
        raise UsageError("scales is 'none' with dtype e4m3; allowed are tensor, row, block: give one of these as --scales")
    for name in ("n", "k"):
        least = GROUP if (name, problem.scales) == ("k", "block") else MULTIPLE
        if getattr(problem, name) % least:
            raise UsageError(
                f"{name} is {getattr(problem, name)} with dtype e4m3, scales {problem.scales}; it must be a multiple of {least}: "
                f"pad {name} to {ceil_div(getattr(problem, name), least) * least}"
            )
    if problem.accumulate == "fast" and problem.scales == "block":
        raise UsageError(
            "accumulate is 'fast' with scales block; allowed is exact, since sums end with every block: leave --accumulate out"
        )
    if problem.operand != "e4m3" and (problem.quantize != "none" or problem.scales == "block"):
        raise UsageError(
            f"operand is {problem.operand!r} with scales {problem.scales}, quantize {problem.quantize}; it takes scales "
            "tensor or row, and no quantize: leave --operand out"
        )
    if problem.quantize != "none" and problem.scales != SCALES_OF[problem.quantize]:
        fitting = SCALES_OF[problem.quantize]
        raise UsageError(
            f"scales is {problem.scales!r} with quantize {problem.quantize}; allowed is {fitting}: give --scales {fitting}"
        )
    if problem.weight != "nk":
        raise UsageError(f"weight is {problem.weight!r} with dtype e4m3; allowed is nk: store B as [n, k]")


def as_words(problem: Any) -> Any:
    """The problem of 16 bits whose matrices have the bytes of this one: two codes are a word of the type of C."""
    return replace(plain(problem), k=problem.k // 2)


EXACT_SHARE = 0.9
"""The time of fast products over that of exact ones, at least: 0.90 to 0.98 from 256 rows on, in 62 problems of two H200. Up to
FEW_ROWS Triton's exact products are the fastest.
"""


def exact(problem: Any) -> tuple[Any, float] | None:
    """For a problem that permits fast sums, that with exact ones, and what is left of a speed-up: see Operator.stricter."""
    share = 1.0 if problem.m <= FEW_ROWS else EXACT_SHARE
    return (replace(problem, accumulate="exact"), share) if problem.accumulate == "fast" else None


def plain(problem: Any) -> Any:
    """The same problem with matrices of the type of C."""
    return replace(problem, dtype=problem.result, **USUAL)


def scales_bytes(problem: Any, rows: int) -> int:
    """Bytes of the scales of `rows` rows of A that one rank sends with them. A scale of a whole tensor is not sent."""
    return 4 * rows * {"none": 0, "tensor": 0, "row": 1, "block": ceil_div(problem.k, GROUP)}[problem.scales]


# Inputs: even seeds have plain numbers; odd ones have scales over six decades, saturated values, zeros, and NaN codes.

DECADES = {"bf16": 3.0, "fp16": 0.5}
"""Scales reach from 10 to the minus this many to 10 to this many, times BASE."""
BASE = 2.0**-6
ODD_SHARE = 1 / 64
"""Share of elements that are saturated, and share of zeros, in odd input sets."""
FEWEST_ROWS = 8
"""Fewest rows of a matrix in which one row is zero and one has a NaN."""


def draw_operand(
    problem: Any, draw: Draw, rows: int, tensor: int, *, weight: bool, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [rows, k] and their scales, of A or a `weight`. With `shared` the scale of a tensor is the same everywhere."""
    import torch

    if not weight and problem.operand == "e5m2":
        draw = replace(draw, dtype=torch.float8_e5m2)
    values = draw.normal(rows, problem.k, tensor=tensor)
    shape = scales_shape(problem.scales, rows, problem.k, weight=weight)
    if draw.device.type == "meta":
        return values, laid_out(torch.empty(shape, dtype=torch.float32, device=draw.device), problem.scales, weight=weight)
    source = replace(draw, rank=-1) if shared and problem.scales == "tensor" else draw
    generator = source.generator(tensor + 50)
    exponents = torch.rand(shape, generator=generator) - 0.5
    if draw.extreme:
        exponents = 2 * DECADES[problem.result] * exponents
        values = _odd_values(values, draw, tensor)
    scales = (BASE * 10**exponents).to(draw.device)
    return values, laid_out(scales, problem.scales, weight=weight)


STATIC = 1 / 64
"""The scale of quantize `static` in drawn inputs: the largest number without saturation is 7."""


def draw_wide(problem: Any, draw: Draw, rows: int, tensor: int) -> tuple[Tensor, ...]:
    """An A [rows, k] of the type of C that is to be quantised, and with quantize `static` its scale."""
    import torch

    from autotax.operators.inputs import DTYPES, SPREADS, powers, scale

    a = replace(draw, dtype=DTYPES[problem.result]).normal(rows, problem.k, tensor=tensor)
    if draw.extreme:
        scale(a, powers((rows, 1), SPREADS["fp16"].row, draw.seed, 1, draw.rank))
        a[draw.seed % rows] = 0.0
        if rows >= FEWEST_ROWS:
            a[(draw.seed + 1) % rows, 3] = float("nan")
    if problem.quantize != "static":
        return (a,)
    return a, torch.full((1,), STATIC, dtype=torch.float32, device=draw.device)


def draw_call(problem: Any, draw: Draw, rows: int, out_rows: int, tensor: int, *, shared: bool) -> Call:
    """A with so many rows, B, the scales of A and the scales of B. An A that is to be quantised has scales only if `static`."""
    from autotax.operators.inputs import DTYPES, Call

    b, scales_b = draw_operand(problem, draw, problem.n, tensor + 1, weight=True)
    if problem.quantize == "none":
        a, *of_a = draw_operand(problem, draw, rows, tensor, weight=False, shared=shared)
    else:
        a, *of_a = draw_wide(problem, draw, rows, tensor)
    return Call((a, b, *of_a, scales_b), replace(draw, dtype=DTYPES[problem.result]).empty(out_rows, problem.n))


def numbers_of_a(problem: Any, tensors: Sequence[Tensor]) -> Tensor:
    """The float32 numbers that the A of a call stands for, quantised if the problem says so. `tensors` are those of the call."""
    if problem.dtype != "e4m3":
        return tensors[0].float()
    a, scales = tensors[0], tensors[2]
    if problem.quantize != "none":
        scales = scales if problem.quantize == "static" else scales_of(a, problem.quantize)
        a = quantised(a, scales, problem.quantize)
    return dequantised(a, scales, problem.scales, weight=False)


def numbers(problem: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The float32 numbers that A and B of a call stand for; the scales of B are the last of `tensors`."""
    return numbers_of_a(problem, tensors), dequantised(tensors[1], tensors[-1], problem.scales, weight=True)


def _odd_values(values: Tensor, draw: Draw, tensor: int) -> Tensor:
    """Saturates some elements, zeros others and a row, and makes one element of another row NaN."""
    import torch

    generator = torch.Generator(draw.device).manual_seed(draw.seed * 131 + draw.rank + 7919 * tensor)
    chance = torch.rand(values.shape, generator=generator, device=draw.device)
    held = values.float()
    held = torch.where(chance < ODD_SHARE, held.sign() * LARGEST, held)
    held = torch.where(chance > 1 - ODD_SHARE, torch.zeros_like(held), held)
    rows = len(held)
    if rows >= FEWEST_ROWS:
        held[draw.seed % rows] = 0.0
        held[(draw.seed + rows // 2) % rows, 5 * draw.seed % held.shape[1]] = float("nan")
    return held.to(values.dtype)


def scales_shape(scales: str, rows: int, k: int, *, weight: bool) -> tuple[int, ...]:
    """The shape of the scales of a matrix [rows, k]."""
    if scales == "tensor":
        return (1,)
    if scales == "row":
        return (1, rows) if weight else (rows, 1)
    return (ceil_div(rows, GROUP) if weight else rows, ceil_div(k, GROUP))


def laid_out(scales: Tensor, layout: str, *, weight: bool) -> Tensor:
    """The same scales with the strides that kernels take: those of A with scales `block` lie column by column."""
    return scales.t().contiguous().t() if layout == "block" and not weight else scales.contiguous()


def dequantised(values: Tensor, scales: Tensor, layout: str, *, weight: bool) -> Tensor:
    """The float32 numbers that values [rows, k] with their scales stand for."""
    rows, k = values.shape
    numbers = values.float()
    if layout == "tensor":
        return numbers * scales
    if layout == "row":
        return numbers * scales.reshape(rows, 1)
    spread = scales.repeat_interleave(GROUP, 1)[:, :k]
    return numbers * (spread.repeat_interleave(GROUP, 0)[:rows] if weight else spread)


def library_product(
    a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, layout: str, out: Tensor, *, fast: bool = False
) -> None:
    """out = A @ B.T by the library, in float32 on CPU ranks and for blocks it refuses. `fast` sums have fewer bits."""
    import torch

    aligned = a.shape[1] % (4 * GROUP) == 0 and len(a) % 4 == 0
    if not a.is_cuda or (layout == "block" and not aligned):
        left = dequantised(a, scales_a, layout, weight=False)
        out.copy_(left @ dequantised(b, scales_b, layout, weight=True).t())
        return
    if layout == "block":
        scales_b = scales_b.t()
    elif layout == "tensor":
        scales_a, scales_b = scales_a.view(()), scales_b.view(())
    torch._scaled_mm(a, b.t(), scales_a, scales_b, out_dtype=out.dtype, use_fast_accum=fast, out=out)


def greatest_magnitude(scale_ub: float | None, quantize: str | None) -> float:
    """The greatest magnitude that a row's scale follows, for a caller's `scale_ub`; None is infinity. Raises UsageError."""
    if scale_ub is None:
        return math.inf
    if quantize != "row":
        raise UsageError(f"scale_ub is given with quantize {quantize!r}; only 'row' makes scales of rows: leave it out")
    if isinstance(scale_ub, bool) or not isinstance(scale_ub, int | float) or not scale_ub > 0:
        raise UsageError(f"scale_ub is {scale_ub!r}; it must be a number above 0: give the greatest magnitude of a row")
    return float(scale_ub)


def limit_scales(kernel: Any, most: float) -> None:
    """Makes a kernel that quantises rows follow no magnitude above `most` in its next calls. Raises UsageError."""
    if quantiser := getattr(kernel, "quantised", None):
        quantiser.most = most
    elif most < math.inf:
        raise UsageError(f"scale_ub is {most}; variant {kernel.config.variant} takes none: leave it out, or give another config")


def scales_of(values: Tensor, quantize: str, most: float = math.inf) -> Tensor:
    """The scales of A [rows, k] with quantize `row` or `block`, in the layout of kernels; see `kernels.scaled_product`. No scale
    of a row follows a magnitude above `most`.
    """
    import torch

    held = values.float()
    if quantize == "row":
        largest = held.abs().amax(-1, keepdim=True).clamp_max(most)
    else:
        largest = held.abs().view(len(held), -1, GROUP).amax(-1).clamp_min(LEAST_BLOCK)
    # On GPUs torch divides by a number as if it multiplied by the inverse, which is off by a bit. Some rows have many values
    # halfway between two codes, which then get the other code.
    scales = largest / torch.full_like(largest, LARGEST)
    return scales.clamp_min(LEAST_ROW_SCALE) if quantize == "row" else laid_out(scales, "block", weight=False)


def quantised(values: Tensor, scales: Tensor, quantize: str) -> Tensor:
    """Quantises A [rows, k] to e4m3 by its scales. Like vLLM it divides by scales of blocks and multiplies by other inverses."""
    import torch

    held = values.float()
    blocks = quantize == "block"
    parts = (held.view(len(held), -1, GROUP) / scales[..., None]).view(held.shape) if blocks else held * (1 / scales)
    return parts.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def quants_of_norms(quantize: str) -> tuple[str, ...]:
    """How engines' norms quantise in models whose layers quantise so: not at all, and by row or a static scale with the norm."""
    return ("none", SCALES_OF[quantize]) if quantize in ("row", "static") else ("none",)


def has_library_product(problem: Any, hardware: Hardware) -> bool:
    """Whether the library multiplies e4m3 by the problem's scales: blocks on Hopper only, in strips of 512."""
    # On gfx942 the library multiplies another format (e4m3fnuz).
    plain = hardware.backend == "cuda" and problem.scales != "block"
    return not hardware.on_gpu or plain or (hardware.target == "cuda:90" and problem.k % (4 * GROUP) == 0)


def has_fast_product(problem: Any, hardware: Hardware) -> bool:
    """Whether torch's products of e4m3 apply, which take no scales of blocks."""
    return hardware.backend == "cuda" and problem.scales in ("tensor", "row")


def has_another_fast_product(problem: Any, hardware: Hardware) -> bool:
    """Whether the library's fast product is another than that of the baseline."""
    return has_fast_product(problem, hardware) and problem.accumulate == "exact"


def has_deep_gemm(problem: Any, hardware: Hardware) -> bool:
    """Whether DeepGEMM is installed and multiplies this problem's matrices."""
    fits = (problem.scales, problem.result, hardware.target) == ("block", "bf16", "cuda:90")
    return fits and find_spec("deep_gemm") is not None
