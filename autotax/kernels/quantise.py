"""Quantisation to e4m3 in kernels: rounding, and the scales of rows, of groups of 128 columns, and of whole tensors.

The rules are those of vLLM. A row's scale is its largest magnitude / 448, at least 1 / (448 * 512); values are multiplied by its
inverse. A group's scale is its largest magnitude, at least 1e-10, / 448; values are divided by it. With one scale for the tensor,
values are multiplied by its inverse. A row or group with an infinity or a NaN becomes NaN.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)
LEAST_ROW_SCALE = tl.constexpr(1 / (448 * 512))
LEAST_BLOCK = tl.constexpr(1e-10)


@triton.jit
def e4m3(value, TARGET: tl.constexpr):
    """Rounds to the bits of the nearest e4m3, ties to even, saturating at 448; NaN stays NaN."""
    if TARGET == "cuda":
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the instruction saturates
    else:  # noqa: RET505 - decided when compiled
        size = tl.minimum(tl.abs(value), LARGEST)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 neighbouring e4m3 numbers are 2^-9 apart, like neighbouring float32 numbers above 2^14.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(value == value, code, 0x7F)
        return (code | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantise(values, scale, most, QUANT: tl.constexpr, TARGET: tl.constexpr):
    """Quantises whole rows. Returns the bits of e4m3, uint8 in the shape of `values`, and the scales.

    `values` are float32 [rows, columns], zero where there is none. With QUANT "block" columns are a multiple of 128. `scale` is
    that of QUANT "tensor". `most` is the largest magnitude that scales of QUANT "row" follow; infinity is no limit. The scales
    are `scale` itself, [rows], or [rows, columns / 128].
    """
    ROWS: tl.constexpr = values.shape[0]
    if QUANT == "tensor":
        codes = e4m3(values * tl.div_rn(1.0, scale), TARGET)
        scales = scale
    elif QUANT == "row":
        largest = tl.minimum(tl.max(tl.abs(values), 1), most)
        scales = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), LEAST_ROW_SCALE)
        codes = e4m3(values * tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)[:, None], TARGET)
    else:
        parts = tl.reshape(values, [ROWS, values.shape[1] // GROUP, GROUP])
        largest = tl.maximum(tl.max(tl.abs(parts), 2), LEAST_BLOCK)
        scales = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
        divided = tl.div_rn(parts, tl.broadcast_to(scales[:, :, None], parts.shape))
        codes = e4m3(tl.reshape(divided, values.shape), TARGET)
    return codes, scales
