"""Attention over a KV cache of 8 bits an element: e4m3 (OCP's) or e4m3fnuz.

Every number of these types is one of fp16 too, and a conversion to fp16 takes the fewest instructions: so problems of 16 bits
multiply in fp16, those of bf16 too, and problems of fp32 in float32. What bf16 has and fp16 has not is range:

- Each row of q is divided by a power of two near its largest magnitude, which its scores are multiplied by.
- Weights are at most 2^LIFT in place of 1, so those down to 2^-39 of the greatest still count.

Scales are applied to float32: that of K to the scores, that of V to the result.
"""

import triton
import triton.language as tl

LIFT = tl.constexpr(15)


@triton.jit
def load_cached(cache, offsets, mask, TYPE: tl.constexpr, TARGET: tl.constexpr):
    """Elements of the cache in TYPE, zero where masked. The interpreter gets those of 8 bits as float32."""
    KIND: tl.constexpr = cache.dtype.element_ty
    if KIND == TYPE:
        return tl.load(cache + offsets, mask=mask, other=0.0)
    elif TARGET == "interpreter":  # noqa: RET505 - decided when compiled
        return decoded(tl.load(cache.to(tl.pointer_type(tl.uint8)) + offsets, mask=mask, other=0), KIND)
    else:
        return tl.load(cache + offsets, mask=mask, other=0.0).to(TYPE)


@triton.jit
def load_in_halves(cache, first, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr):
    """fp16 of the even and of the odd columns of tokens, each [..., BLOCK_D / 2, tokens], zero where not `inside`. Not for AMD.

    `first` [..., tokens] is where tokens begin, an even number. Transposed by their addresses: a tile that is turned over after its
    load would not be copied ahead. A register of a product takes two neighbours along the tokens, and shared memory is read
    transposed 16 bits at a time. So columns are read in pairs, and in registers two words of a pair each become one of each column;
    single bytes would be a load each.
    """
    pair = tl.arange(0, BLOCK_D // 2)
    inside = inside[:, None, :]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (2 * pair < HEAD_DIM)[None, :, None]
    pairs = tl.load(cache.to(tl.pointer_type(tl.int16)) + (first // 2)[:, None, :] + pair[None, :, None], mask=inside, other=0)
    if TARGET == "interpreter":
        KIND: tl.constexpr = cache.dtype.element_ty
        even, odd = decoded(pairs & 0xFF, KIND), decoded((pairs >> 8) & 0xFF, KIND)
    else:
        even, odd = tl.inline_asm_elementwise(
            "{.reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;"
            " prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632;}",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def decoded(bits, KIND: tl.constexpr):
    """float32 of the low eight bits of integers. The interpreter knows one of the types, and takes its NaN for a number."""
    FNUZ: tl.constexpr = tl.float8e4b8 == KIND
    bits = bits.to(tl.int32)
    rest = bits & 0x7F
    # Exponent and mantissa are where those of a float32 are; it is off by the difference of the biases, an exact product.
    value = (rest << 20).to(tl.float32, bitcast=True) * (2.0**119 if FNUZ else 2.0**120)
    value = tl.where(bits > 0x7F, -value, value)
    return tl.where(bits == 0x80 if FNUZ else rest == 0x7F, float("nan"), value)


@triton.jit
def in_fp16(query, AXIS: tl.constexpr):
    """Rows of q, which lie along AXIS, in fp16, and the float32 powers of two that they were divided by."""
    rows = query.to(tl.float32)
    most = tl.max(tl.abs(rows), AXIS)
    power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > 0.0, power, 1.0)
    return (rows / tl.expand_dims(power, AXIS)).to(tl.float16), power
