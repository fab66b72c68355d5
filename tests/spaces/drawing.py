"""Hypothesis strategies: problems of any shape, and configs that a space admits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.operators.problems import (
    AllGatherGemm,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    GemmReduceScatter,
    HeadGather,
)
from autotax.spaces import Space

H200 = Hardware("cuda", "any", "cuda:90", 8, 139, 132, 232448, 50 << 20, "any")
MI300X = Hardware("rocm", "any", "hip:gfx942", 8, 192, 304, 65536, 4 << 20, "any")
CPU = Hardware("cpu", "any", "interpreter", 2, 8, 4, 2**31 - 1, 0, "any")
HARDWARE = (H200, MI300X, CPU)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Any size, small ones and those around powers of two more often."""
    powers = [2**i + by for i in range(1, most.bit_length()) for by in (-1, 0, 1) if 1 <= 2**i + by <= most]
    return st.integers(1, min(40, most)) | st.sampled_from(powers) | st.integers(1, most)


@st.composite
def gemms(draw: st.DrawFn, most: int = 700) -> AllGatherGemm:
    world, shard = draw(st.integers(1, 8)), draw(st.sampled_from("mk"))
    k = draw(sizes(most)) * (world if shard == "k" else 1)
    return AllGatherGemm(draw(sizes(most)), draw(sizes(most)), k, draw(dtypes), shard, world)


@st.composite
def decodes(draw: st.DrawFn, most: int = 5000) -> FlashDecode:
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    head_dim, world = draw(st.sampled_from([1, 16, 64, 80, 128, 256])), draw(st.integers(1, 8))
    q_heads, batch = kv_heads * group, draw(st.integers(1, 5))
    output = draw(st.sampled_from(("replicated", "head_scatter") if q_heads % world == 0 else ("replicated",)))
    page = draw(st.sampled_from((0, 16, 64)))
    sinks, window = draw(st.sampled_from(("none", "learned"))), draw(st.sampled_from((0, 1, 128)))
    shape = batch, q_heads, kv_heads, head_dim, draw(sizes(most)), draw(dtypes), world, output, page
    return FlashDecode(*shape, "same", sinks, window, queries=draw(st.integers(1, 4)))


@st.composite
def reductions(draw: st.DrawFn, most: int = 700) -> GemmReduceScatter:
    output, weight = draw(st.sampled_from(("scattered", "replicated"))), draw(st.sampled_from(("nk", "kn")))
    return GemmReduceScatter(
        draw(sizes(most)), draw(sizes(most)), draw(sizes(most)), draw(dtypes), output, draw(st.integers(1, 8)), weight
    )


@st.composite
def merges(draw: st.DrawFn, most: int = 1024) -> DecodeMerge:
    world, heads, dim = draw(st.integers(1, 8)), draw(st.integers(1, 128)), draw(st.sampled_from([1, 64, 80, 128, 256, 512]))
    output = draw(st.sampled_from(("head_scatter", "replicated") if heads % world == 0 else ("replicated",)))
    return DecodeMerge(draw(sizes(most)), heads, dim, draw(dtypes), world, output, draw(st.sampled_from("e2")))


@st.composite
def gathers(draw: st.DrawFn, most: int = 1024) -> HeadGather:
    world = draw(st.integers(1, 8))
    return HeadGather(draw(sizes(most)), world * draw(st.integers(1, 32)), draw(sizes(1024)), draw(dtypes), world)


@st.composite
def norms(draw: st.DrawFn, most: int = 1024) -> AllReduceNorm:
    quant = draw(st.sampled_from(("none", "tensor", "row", "block")))
    hidden = draw(st.integers(1, 128)) * 128 if quant == "block" else draw(st.integers(1, 2048)) * 8
    residual, offset = draw(st.sampled_from(("added", "none"))), draw(st.sampled_from((0, 1)))
    dtype, world = draw(dtypes), draw(st.integers(1, 8))
    k, scales = 0, "none"
    if dtype != "fp32" and hidden % 16 == 0:
        k, scales = draw(st.sampled_from(((0, "none"), (72, "none"), (80, "row"), (80, "tensor"), (384, "block"))))
    of_scales = {"none": ("none",), "tensor": ("none", "static"), "row": ("none", "row"), "block": ("none", "block")}
    quantize = draw(st.sampled_from(of_scales[scales]))
    return AllReduceNorm(draw(sizes(most)), hidden, dtype, world, residual, quant, offset, k, scales, quantize)


@st.composite
def attentions(draw: st.DrawFn, most: int = 1024) -> GatherAttention:
    world, kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 12)), draw(st.integers(1, 8))
    mask, layout = draw(st.sampled_from((("causal", "zigzag"), ("causal", "contiguous"), ("none", "contiguous"))))
    dim, tokens = draw(st.sampled_from([8, 16, 64, 80, 128, 256])), draw(sizes(most)) * world * 2
    dtype = draw(st.sampled_from(["bf16", "fp16"]))
    window = draw(st.just(0) | st.integers(1, tokens)) if mask == "causal" else 0
    v_dim = draw(st.just(0) | st.integers(1, dim // 8 - 1).map(lambda eighths: 8 * eighths)) if dim > 8 else 0
    shape = draw(st.integers(1, 3)), kv_heads * group, kv_heads, dim, tokens
    return GatherAttention(*shape, dtype, world, mask, layout, window, v_dim)


dtypes = st.sampled_from(["bf16", "fp16", "fp32"])
problems: st.SearchStrategy[Problem] = st.one_of(gemms(), decodes(), reductions(), merges(), gathers(), norms(), attentions())


def drawn(space: Space, variant: str, seed: str) -> Config:
    """Some config of a variant that the space admits; the same for the same seed. Does not list the space."""
    random = Random(seed)
    while True:
        config = space.variants[variant].point(random)
        if config in space:
            return config


def ways_to_exchange(space: Space) -> list[Config]:
    """The defaults, each with every other admitted protocol, payload and number of parts."""
    ways = []
    for default in (space.default(variant) for variant in space.variants):
        ranges = space.variants[default.variant].parameters
        names = [name for name in ("protocol", "payload", "parts") if name in ranges]
        for values in product(*(ranges[name] for name in names)):
            way = Config.of(default.variant, default.values | dict(zip(names, values, strict=True)))
            ways += [way] if way != default else []
    return ways


class Drawing:
    """The methods of an Optuna trial that a space uses, with values from Hypothesis."""

    def __init__(self, draw: st.DrawFn, variant: str) -> None:
        self.draw, self.variant = draw, variant

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self.variant if name == "variant" else self.draw(st.sampled_from(list(choices)))


@st.composite
def configs(draw: st.DrawFn, space: Space) -> Config:
    """A config that the space admits, each variant as often as any other."""
    config = space.suggest(Drawing(draw, draw(st.sampled_from(list(space.variants)))))
    assume(config in space)
    return config
