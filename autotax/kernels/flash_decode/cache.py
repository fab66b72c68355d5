"""The tokens that a split attends to, and the loads of their pages; all attention cores use this module."""

import triton
import triton.language as tl


@triton.jit
def piece(lengths, starts, sequence, split, QUERIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the first token of a split, the token after its last, and the first token to read. Splits are whole blocks, except
    at the end of the sequence. With several query tokens, the last one sees the end of the sequence and the first one sees the
    earliest token.
    """
    if QUERIES > 1:
        lengths += sequence * QUERIES + QUERIES - 1
    else:
        lengths += sequence
    length = tl.load(lengths)
    if starts is None:
        per = tl.cdiv(tl.cdiv(length, BLOCK_S), SPLITS) * BLOCK_S
        start = split * per
        first = start
    else:
        first = tl.load(starts + sequence * QUERIES)
        begin = first // BLOCK_S * BLOCK_S
        per = tl.cdiv(tl.cdiv(length - begin, BLOCK_S), SPLITS) * BLOCK_S
        start = begin + split * per
    return start, tl.minimum(start + per, length), first


@triton.jit
def of_queries(tokens, sequence, g, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """The entries of `tokens` [batch, QUERIES] for the query tokens of rows g: see `seen`. Rows past GROUP get any entries."""
    return tl.load(tokens + sequence * QUERIES + g % QUERIES, mask=g < GROUP, other=0)


@triton.jit
def inside_of(token, first, end, starts):
    """The mask of the tokens of a split that must be read."""
    inside = token < end
    if starts is not None:
        inside = inside & (token >= first)
    return inside


@triton.jit
def page_of(table, at, s, end, PAGE: tl.constexpr, BLOCK_S: tl.constexpr):
    """The page numbers of tokens at + s, in the shape of s. If a block lies in one page, it is a single number; blocks begin at
    multiples of their size. Entries of tokens from `end` on are not loaded.
    """
    token = at if BLOCK_S <= PAGE else at + s
    return tl.load(table + token // PAGE, mask=token < end, other=0)


# Attention over a KV cache with 8 bits per element: e4m3 (OCP's) or e4m3fnuz.

LIFT = tl.constexpr(15)


@triton.jit
def load_cached(cache, offsets, mask, TYPE: tl.constexpr, TARGET: tl.constexpr):
    """Loads elements of the cache as TYPE, zero where masked. The interpreter gets 8-bit elements as float32."""
    KIND: tl.constexpr = cache.dtype.element_ty
    if KIND == TYPE:
        return tl.load(cache + offsets, mask=mask, other=0.0)
    elif TARGET == "interpreter":  # noqa: RET505 - decided when compiled
        return decoded(tl.load(cache.to(tl.pointer_type(tl.uint8)) + offsets, mask=mask, other=0), KIND)
    else:
        return tl.load(cache + offsets, mask=mask, other=0.0).to(TYPE)


@triton.jit
def load_in_halves(cache, first, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TARGET: tl.constexpr):
    """Loads the even and the odd columns of tokens as fp16, each [..., BLOCK_D / 2, tokens], zero where not `inside`. Not for
    AMD.

    `first` [..., tokens] are the even offsets at which tokens begin. The addresses transpose the tile: Triton would not prefetch
    a tile that is transposed after its load. An operand register holds two neighbours along the tokens, and transposed reads of
    shared memory fetch 16 bits at a time. So columns are read in pairs: two words, each of a pair of columns, become one word per
    column in registers. Reading single bytes would cost one load each.
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
    """Decodes the low eight bits of integers to float32. The interpreter's own conversion knows only one of the types and decodes
    its NaN as a number.
    """
    FNUZ: tl.constexpr = tl.float8e4b8 == KIND
    bits = bits.to(tl.int32)
    rest = bits & 0x7F
    # Moves exponent and mantissa to their places in a float32. An exact multiplication corrects the exponent bias.
    value = (rest << 20).to(tl.float32, bitcast=True) * (2.0**119 if FNUZ else 2.0**120)
    value = tl.where(bits > 0x7F, -value, value)
    return tl.where(bits == 0x80 if FNUZ else rest == 0x7F, float("nan"), value)


@triton.jit
def in_fp16(query, AXIS: tl.constexpr):
    """Rows of q along AXIS in fp16, divided by powers of two; returns them and those powers in float32."""
    rows = query.to(tl.float32)
    most = tl.max(tl.abs(rows), AXIS)
    power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power > 0.0, power, 1.0)
    return (rows / tl.expand_dims(power, AXIS)).to(tl.float16), power


# Attention sinks: a learned logit per query head that adds one term to the denominator of the softmax.

@triton.jit
def sink_of(sinks, head, split, g, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Base-2 sinks of the rows g of a KV head, float32 in the shape of g; -inf for all splits but the first. Only rank 0 gets the
    sinks, the others get -inf (`shapes.DecodeBase`), so each sink is counted once.
    """
    HEADS: tl.constexpr = GROUP // QUERIES
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.load(sinks + head * HEADS + g // QUERIES, mask=(g < GROUP) & (split == 0), other=float("-inf")) * LOG2_E
