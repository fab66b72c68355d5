"""Which tokens a split attends to, and the pages of a cache they lie in: shared by both attention cores."""

import triton
import triton.language as tl


@triton.jit
def piece(lengths, starts, sequence, split, QUERIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The first token of a split, the one behind its last, and the first one to be read: whole blocks, but for the end of the
    sequence. Of several query tokens the last one sees the end of the sequence, the first one its first token.
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
    """What `tokens` [batch, QUERIES] say of the query tokens of rows g: see `seen`. Rows past GROUP are any."""
    return tl.load(tokens + sequence * QUERIES + g % QUERIES, mask=g < GROUP, other=0)


@triton.jit
def inside_of(token, first, end, starts):
    """Which tokens of a split are to be read."""
    inside = token < end
    if starts is not None:
        inside = inside & (token >= first)
    return inside


@triton.jit
def page_of(table, at, s, end, PAGE: tl.constexpr, BLOCK_S: tl.constexpr):
    """The page numbers of tokens at + s, of the shape of s, or one if a block, which begins at a multiple of its size, lies in a page.

    Those at `end` and beyond are not loaded.
    """
    token = at if BLOCK_S <= PAGE else at + s
    return tl.load(table + token // PAGE, mask=token < end, other=0)


# Attention over a KV cache of 8 bits an element: e4m3 (OCP's) or e4m3fnuz.

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


# Attention sinks: a learned logit for each query head, one more term of the softmax's denominator.

@triton.jit
def sink_of(sinks, head, split, g, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Base-2 sinks of the rows g of a KV head, float32 of the shape of g: those of the first split, else -inf.

    Of all ranks one is given the sinks, the others -inf (`shapes.DecodeBase`), so each is counted once.
    """
    HEADS: tl.constexpr = GROUP // QUERIES
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.load(sinks + head * HEADS + g // QUERIES, mask=(g < GROUP) & (split == 0), other=float("-inf")) * LOG2_E
