"""Attention over a piece of the KV cache, in three cores: warps share each block of tokens, or take tokens or KV heads.

In `attend_by_warp` and `attend_by_head` warps wait for each other only at the copies of a block. Query heads are the columns of
the matrix products; the rows are tokens, then head_dim. So few heads are padded to eight columns instead of sixteen rows. Triton
assigns one product to each warp if the products form a batch of as many as there are warps.

By warp, a warp computes the maximum, the weights and the product with V for its own 16 or more tokens of every block. The results
of the warps are merged once, at the end.

By head, no merge over warps follows. A page holds all KV heads of a token, then those of the next token. So the heads of a
program are contiguous for each token. A block lies in one page, so its addresses need one page number. A program of a single head
would read a separate piece of memory for each token.
"""

import triton
import triton.language as tl

from autotax.kernels.primitives import dot


@triton.jit
def piece(lengths, starts, sequence, split, QUERIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The first token of a split, the token after its last, and the first token to read. Splits are whole blocks, but at the end.

    With several query tokens, the last one sees the end of the sequence and the first one sees the earliest token.
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
    """The page numbers of tokens at + s; a single one if BLOCK_S <= PAGE, because then a block lies within one page."""
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
    """Loads the even and the odd columns of tokens as fp16, each [..., BLOCK_D / 2, tokens], zero if not `inside`. Not on AMD.

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
    """Decodes the low eight bits of integers to float32; the interpreter's own conversion knows one type, without its NaN."""
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
    """Base-2 sinks of rows g of a KV head, float32 in the shape of g; -inf but for the first split of rank 0."""
    HEADS: tl.constexpr = GROUP // QUERIES
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.load(sinks + head * HEADS + g // QUERIES, mask=(g < GROUP) & (split == 0), other=float("-inf")) * LOG2_E


@triton.jit
def attend_by_block(
    q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PAGE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The core of `attention.attend`; see there for the arguments."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    start, end, first = piece(lengths, starts, item // kv_heads, split, QUERIES, SPLITS, BLOCK_S)

    rows = item * GROUP + g
    query = tl.load(q + rows[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8 and query.dtype != tl.float32
    if HALF:
        query, power = in_fp16(query, 1)
    if PAGE == 0:
        cache = item.to(tl.int64) * shard_len * HEAD_DIM
    else:
        cache = (item % kv_heads).to(tl.int64) * HEAD_DIM
        table += (item // kv_heads) * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # One total per column of a block: summing over the columns in every step would cost two more barriers per step.
    totals = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
    if sinks is not None:  # a sink acts as a first token whose value is zero
        top = sink_of(sinks, item % kv_heads, split, g, GROUP, QUERIES)
        totals = tl.where((s == 0)[None, :] & (top > float("-inf"))[:, None], 2.0**LIFT if HALF else 1.0, 0.0)
    if scales is not None:
        scale *= tl.load(scales + item % kv_heads)
    if HALF:
        scale = (scale * power)[:, None]
    if QUERIES > 1:
        ends = of_queries(lengths, item // kv_heads, g, GROUP, QUERIES)
        if starts is not None:
            firsts = of_queries(starts, item // kv_heads, g, GROUP, QUERIES)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        if PAGE == 0:
            offsets = cache + token.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        else:
            slot = page.to(tl.int64) * PAGE + token % PAGE
            offsets = cache + slot[:, None] * kv_heads * HEAD_DIM + d[None, :]
            # Loads the page number of the next step: if keys waited for a load of the same step, the pipeline would be half as
            # deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        valid = inside_of(token, first, end, starts)
        inside = valid[:, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, :]
        keys = load_cached(k, offsets, inside, query.dtype, TARGET)
        scores = dot(query, keys.T, tl.zeros([BLOCK_G, BLOCK_S], tl.float32), TARGET) * scale
        seen = valid[None, :]
        if QUERIES > 1:
            seen = seen & (token[None, :] < ends[:, None])
            if starts is not None:
                seen = seen & (token[None, :] >= firsts[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HALF:
            base -= LIFT
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base - LIFT) if HALF else tl.exp2(top - base)
        values = load_cached(v, offsets, inside, query.dtype, TARGET)
        acc = dot(weights, values, acc * shrink[:, None], TARGET)
        totals = totals * shrink[:, None] + weights
        top = new_top
    total = tl.sum(totals, 1)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None]
    if scales is not None:
        o *= tl.load(scales + kv_heads + item % kv_heads)
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if HALF:
        lse -= LIFT
    return o, lse


@triton.jit
def attend_by_head(
    q, k, v, lengths, table, starts, scales, sinks, item, split, blocks, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The core of `attention.attend`. An item is HEADS KV heads, a sequence has `blocks` items, GROUP counts the rows of an item.

    The number of rows of a KV head must be a power of two, and a block of tokens at most a page.
    """
    OWN: tl.constexpr = GROUP // HEADS
    COLUMNS: tl.constexpr = max(OWN, 16 if TARGET == "hip" else 8)
    sequence, head = item // blocks, item % blocks * HEADS
    kv_heads = blocks * HEADS
    h = tl.arange(0, HEADS)
    g = tl.arange(0, COLUMNS)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    start, end, first_seen = piece(lengths, starts, sequence, split, QUERIES, SPLITS, BLOCK_S)

    rows = item * GROUP + h[:, None] * OWN + g[None, :]
    real = (g < OWN)[None, None, :] & (d < HEAD_DIM)[None, :, None]
    query = tl.load(q + rows[:, None, :] * HEAD_DIM + d[None, :, None], mask=real, other=0.0)
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8 and query.dtype != tl.float32
    PAIRS: tl.constexpr = HALF and TARGET != "hip" and HEAD_DIM % 2 == 0
    if HALF:
        query, power = in_fp16(query, 1)
    top = tl.full([HEADS, COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([HEADS, BLOCK_S, COLUMNS], tl.float32)
    if sinks is not None:  # a sink acts as a first token whose value is zero
        top = sink_of(sinks, head + h[:, None], split, g[None, :], OWN, QUERIES)
        totals = tl.where((s == 0)[None, :, None] & (top > float("-inf"))[:, None, :], 2.0**LIFT if HALF else 1.0, 0.0)
    factor = tl.full([HEADS, 1], 1.0, tl.float32) * scale
    if scales is not None:
        factor *= tl.load(scales + head + h)[:, None]
    if HALF:
        factor = factor * power
    if QUERIES > 1:
        ends = of_queries(lengths, sequence, g, OWN, QUERIES)
        if starts is not None:
            firsts = of_queries(starts, sequence, g, OWN, QUERIES)
    if PAGE == 0:
        cache = item.to(tl.int64) * HEADS * shard_len * HEAD_DIM
        first = s[None, :] * HEAD_DIM + h[:, None].to(tl.int64) * shard_len * HEAD_DIM
    else:
        stride = kv_heads * HEAD_DIM
        first = s[None, :] * stride + h[:, None] * HEAD_DIM
        table += sequence * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    if PAIRS:
        even = tl.zeros([HEADS, BLOCK_D // 2, COLUMNS], tl.float32)
        odd = tl.zeros([HEADS, BLOCK_D // 2, COLUMNS], tl.float32)
    else:
        acc = tl.zeros([HEADS, BLOCK_D, COLUMNS], tl.float32)
    for at in range(start, end, BLOCK_S):
        if PAGE == 0:
            block = cache + tl.cast(at, tl.int64) * HEAD_DIM
        else:
            block = (page.to(tl.int64) * PAGE + at % PAGE) * stride + head * HEAD_DIM
            # Loads the page number of the next step: if keys waited for a load of the same step, the pipeline would be half as
            # deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        token = at + s
        valid = inside_of(token, first_seen, end, starts)[None, :] & (h >= 0)[:, None]
        inside = valid[:, :, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, None, :]
        keys = load_cached(k + block, first[:, :, None] + d[None, None, :], inside, query.dtype, TARGET)
        scores = dot(keys, query, tl.zeros([HEADS, BLOCK_S, COLUMNS], tl.float32), TARGET) * factor[:, None, :]
        seen = valid[:, :, None]
        if QUERIES > 1:
            seen = seen & (token[None, :, None] < ends[None, None, :])
            if starts is not None:
                seen = seen & (token[None, :, None] >= firsts[None, None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HALF:
            base -= LIFT
        weights = tl.exp2(scores - base[:, None, :])
        shrink = (tl.exp2(top - base - LIFT) if HALF else tl.exp2(top - base))[:, None, :]
        if PAIRS:
            evens, odds = load_in_halves(v + block, first, valid, HEAD_DIM, BLOCK_D, TARGET)
            rounded = weights if TARGET == "interpreter" else weights.to(tl.float16)
            even = dot(evens, rounded, even * shrink, TARGET)
            odd = dot(odds, rounded, odd * shrink, TARGET)
        else:
            # The addresses transpose the tile: Triton would not prefetch a tile that is transposed after its load.
            inside_across = valid[:, None, :]
            if HEAD_DIM != BLOCK_D:
                inside_across = inside_across & (d < HEAD_DIM)[None, :, None]
            values = load_cached(v + block, first[:, None, :] + d[None, :, None], inside_across, query.dtype, TARGET)
            # The interpreter multiplies float32, and its conversion would truncate instead of round.
            rounded = weights if TARGET == "interpreter" else weights.to(values.dtype)
            acc = dot(values, rounded, acc * shrink, TARGET)
        totals = totals * shrink + weights
        top = new_top
    if PAIRS:
        acc = tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 3, 2)), [HEADS, BLOCK_D, COLUMNS])
    total = tl.sum(totals, 1)
    some = total > 0.0
    o = acc / tl.where(some, total, 1.0)[:, None, :]
    if scales is not None:
        o *= tl.load(scales + kv_heads + head + h)[:, None, None]
    lse = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if HALF:
        lse -= LIFT
    if COLUMNS > OWN:  # keeps the first OWN columns; the others are padding
        o = tl.sum(tl.reshape(tl.where((g < OWN)[None, None, :], o, 0.0), [HEADS, BLOCK_D, COLUMNS // OWN, OWN]), 2)
        lse = tl.sum(tl.reshape(tl.where((g < OWN)[None, :], lse, 0.0), [HEADS, COLUMNS // OWN, OWN]), 1)
    return tl.reshape(tl.permute(o, (0, 2, 1)), [BLOCK_G, BLOCK_D]), tl.reshape(lse, [BLOCK_G])


@triton.jit
def attend_by_warp(
    q, k, v, lengths, table, starts, scales, sinks, item, split, kv_heads, shard_len, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, WARPS: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The core of `attention.attend`; see there for the arguments."""
    PART: tl.constexpr = BLOCK_S // WARPS
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    start, end, first_seen = piece(lengths, starts, item // kv_heads, split, QUERIES, SPLITS, BLOCK_S)

    rows = item * GROUP + g
    query = tl.load(q + rows[None, :] * HEAD_DIM + d[:, None], mask=(g < GROUP)[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    HALF: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8 and query.dtype != tl.float32
    if HALF:
        query, power = in_fp16(query, 0)
    query = tl.broadcast_to(query[None, :, :], [WARPS, BLOCK_D, BLOCK_G])
    if PAGE == 0:
        cache = item.to(tl.int64) * shard_len * HEAD_DIM
    else:
        cache = (item % kv_heads).to(tl.int64) * HEAD_DIM
        table += (item // kv_heads) * tl.cdiv(shard_len, PAGE)
        page = page_of(table, start, s, end, PAGE, BLOCK_S)
    top = tl.full([WARPS, BLOCK_G], float("-inf"), tl.float32)
    totals = tl.zeros([WARPS, PART, BLOCK_G], tl.float32)
    if sinks is not None:  # a sink acts as a first token of the first warp, whose value is zero
        sink = sink_of(sinks, item % kv_heads, split, g, GROUP, QUERIES)
        top = tl.where((tl.arange(0, WARPS) == 0)[:, None], sink[None, :], float("-inf"))
        totals = tl.where((tl.arange(0, PART) == 0)[None, :, None] & (top > float("-inf"))[:, None, :], 2.0**LIFT if HALF else 1.0, 0.0)
    if scales is not None:
        scale *= tl.load(scales + item % kv_heads)
    if HALF:
        scale = (scale * power)[None, None, :]
    if QUERIES > 1:
        ends = of_queries(lengths, item // kv_heads, g, GROUP, QUERIES)
        if starts is not None:
            firsts = of_queries(starts, item // kv_heads, g, GROUP, QUERIES)
    PAIRS: tl.constexpr = HALF and TARGET != "hip" and HEAD_DIM % 2 == 0
    if PAIRS:
        even = tl.zeros([WARPS, BLOCK_D // 2, BLOCK_G], tl.float32)
        odd = tl.zeros([WARPS, BLOCK_D // 2, BLOCK_G], tl.float32)
    else:
        acc = tl.zeros([WARPS, BLOCK_D, BLOCK_G], tl.float32)
    for at in range(start, end, BLOCK_S):
        token = at + s
        if PAGE == 0:
            first = cache + token.to(tl.int64) * HEAD_DIM
        else:
            slot = page.to(tl.int64) * PAGE + token % PAGE
            first = cache + slot * kv_heads * HEAD_DIM
            # Loads the page number of the next step: if keys waited for a load of the same step, the pipeline would be half as
            # deep.
            page = page_of(table, at + BLOCK_S, s, end, PAGE, BLOCK_S)
        valid = inside_of(token, first_seen, end, starts)
        inside, inside_across = valid[:, :, None], valid[:, None, :]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (d < HEAD_DIM)[None, None, :]
            inside_across = inside_across & (d < HEAD_DIM)[None, :, None]
        keys = load_cached(k, first[:, :, None] + d[None, None, :], inside, query.dtype, TARGET)
        scores = dot(keys, query, tl.zeros([WARPS, PART, BLOCK_G], tl.float32), TARGET) * scale
        seen = valid[:, :, None]
        if QUERIES > 1:
            seen = seen & (token[:, :, None] < ends[None, None, :])
            if starts is not None:
                seen = seen & (token[:, :, None] >= firsts[None, None, :])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        if HALF:
            base -= LIFT
        weights = tl.exp2(scores - base[:, None, :])
        shrink = tl.exp2(top - base - LIFT) if HALF else tl.exp2(top - base)
        if PAIRS:
            evens, odds = load_in_halves(v, first, valid, HEAD_DIM, BLOCK_D, TARGET)
            rounded = weights if TARGET == "interpreter" else weights.to(tl.float16)
            even = dot(evens, rounded, even * shrink[:, None, :], TARGET)
            odd = dot(odds, rounded, odd * shrink[:, None, :], TARGET)
        else:
            # The addresses transpose the tile: Triton would not prefetch a tile that is transposed after its load.
            values = load_cached(v, first[:, None, :] + d[None, :, None], inside_across, query.dtype, TARGET)
            # The interpreter multiplies float32, and its conversion would truncate instead of round.
            rounded = weights if TARGET == "interpreter" else weights.to(values.dtype)
            acc = dot(values, rounded, acc * shrink[:, None, :], TARGET)
        totals = totals * shrink[:, None, :] + weights
        top = new_top
    most, total = tl.reduce((top, tl.sum(totals, 1)), 0, _merge_totals)
    some = total > 0.0
    base = tl.where(most == float("-inf"), 0.0, most)
    share = tl.exp2(top - base[None, :]) / tl.where(some, total, 1.0)[None, :]
    if PAIRS:
        even = sum_over_warps(even * share[:, None, :], WARPS, BLOCK_D // 2, BLOCK_G)
        odd = sum_over_warps(odd * share[:, None, :], WARPS, BLOCK_D // 2, BLOCK_G)
        o = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [BLOCK_D, BLOCK_G])
    else:
        o = sum_over_warps(acc * share[:, None, :], WARPS, BLOCK_D, BLOCK_G)
    if scales is not None:
        o *= tl.load(scales + kv_heads + item % kv_heads)
    lse = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    if HALF:
        lse -= LIFT
    return tl.trans(o), lse


@triton.jit
def _merge_totals(top, total, other_top, other_total):
    """Combines two maxima and the sums relative to them."""
    most = tl.maximum(top, other_top)
    base = tl.where(most == float("-inf"), 0.0, most)
    return most, total * tl.exp2(top - base) + other_total * tl.exp2(other_top - base)


@triton.jit
def sum_over_warps(x, WARPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum of x [WARPS, ROWS, COLS] over its first axis, with one round trip through shared memory.

    `tl.split` needs both halves in one thread, so Triton moves whole tiles; a reduction would exchange single elements.
    """
    x = tl.permute(x, (1, 2, 0))
    if WARPS == 8:
        one, two = tl.split(tl.reshape(x, [ROWS, COLS, 4, 2]))
        x = one + two
    if WARPS >= 4:
        one, two = tl.split(tl.reshape(x, [ROWS, COLS, 2, 2]))
        x = one + two
    if WARPS >= 2:
        one, two = tl.split(x)
        x = one + two
    return tl.reshape(x, [ROWS, COLS])
