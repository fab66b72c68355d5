"""Lists the problems of a Hugging Face model at a degree of tensor parallelism.

A config.json names the sizes of a model. Its column-parallel layers are All-Gather + GEMM where activations are sharded along the
sequence; its row-parallel layers are GEMM + Reduce-Scatter there, and GEMM + All-Reduce where they are not. A family lists its
layers. Routed experts are grouped products, which no operator computes: they are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.operators.problems import AllGatherGemm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.operators.scaled import SCALES_OF

LARGEST_FILE = 2**24
"""The most bytes of a config.json."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MOST_DECODED = 256
"""The most query tokens of a decode step; more tokens are a prefill."""
LARGEST_HEAD = 256
"""The most elements of a head that Flash Decode supports."""
Layers = Iterator["Linear"]


@dataclass(frozen=True)
class Linear:
    """One rank's part of a linear layer: its weight is [n, k]. `row`: its output is summed over the ranks."""

    name: str
    n: int
    k: int
    row: bool = False


@dataclass(frozen=True)
class Attention:
    """The exchanges of a decode step: all query heads, the KV heads they share, and elements of a query and of an output head."""

    q_heads: int
    kv_heads: int
    query_dim: int
    output_dim: int
    latent: bool = False
    """Whether the cache holds latents, which Flash Decode does not support."""


@dataclass(frozen=True)
class Architecture:
    """The tensor-parallel layers of a model, each kind once."""

    family: str
    ranks: int
    dtype: str
    layers: tuple[Linear, ...]
    attention: Attention
    notes: tuple[str, ...] = ()
    """The parts of the model that are not covered, one line each."""
    quantize: str = ""
    """How inputs of its FP8 weights are quantised: row, block or static; empty for other weights."""

    def problems(
        self, tokens: Sequence[int], *, dtype: str | None = None, train: bool = False, kv_len: int | None = None
    ) -> dict[Problem, str]:
        """The problems for these numbers of tokens, each with the names of the layers that need it.

        - `train`: also the products of the backward.
        - `kv_len`: also decode steps, over a KV cache of `kv_len` tokens that is sharded over the ranks.
        """
        found: dict[Problem, list[str]] = {}
        of = dtype or self.dtype
        for layer in self.layers:
            for m in tokens:
                for problem, name in self._of_layer(layer, m, of, train):
                    chosen = problem if dtype else self._in_fp8(problem)
                    found.setdefault(chosen, []).append(name)
        if kv_len is not None:
            for batch in (m for m in tokens if m <= MOST_DECODED):
                for problem, name in self._of_decode(batch, kv_len, of):
                    found.setdefault(problem, []).append(name)
        return {problem: ", ".join(dict.fromkeys(names)) for problem, names in found.items()}

    def _of_layer(self, layer: Linear, m: int, dtype: str, train: bool) -> Iterator[tuple[Problem, str]]:
        ranks, scattered = self.ranks, m % self.ranks == 0
        if layer.row:
            yield GemmReduceScatter(m, layer.n, layer.k, dtype, "replicated", ranks), layer.name
            if scattered:
                yield GemmReduceScatter(m, layer.n, layer.k, dtype, "scattered", ranks), layer.name
            if scattered and train:
                yield AllGatherGemm(m, layer.k, layer.n, dtype, "m", ranks, "kn"), f"{layer.name}, backward"
        elif scattered:
            yield AllGatherGemm(m, layer.n, layer.k, dtype, "m", ranks), layer.name
            if train:
                yield GemmReduceScatter(m, layer.k, layer.n, dtype, "scattered", ranks, "kn"), f"{layer.name}, backward"

    def _in_fp8(self, problem: Problem) -> Problem:
        """The same product with weights in e4m3 where the model has them. Sizes that e4m3 does not support keep their type."""
        result = problem.dtype if problem.dtype in ("bf16", "fp16") else "bf16"
        more = {"scales": SCALES_OF.get(self.quantize, ""), "quantize": self.quantize, "result": result}
        try:
            return replace(problem, dtype="e4m3", **more) if self.quantize else problem  # type: ignore[call-arg]
        except UsageError:
            return problem

    def _of_decode(self, batch: int, kv_len: int, dtype: str) -> Iterator[tuple[Problem, str]]:
        own, ranks = self.attention, self.ranks
        if not own.latent and own.output_dim <= LARGEST_HEAD:
            yield FlashDecode(batch, own.q_heads, own.kv_heads, own.output_dim, kv_len, dtype, ranks), "decode attention"
        yield HeadGather(batch, own.q_heads, own.query_dim, dtype, ranks), "queries of all heads"
        yield DecodeMerge(batch, own.q_heads, own.output_dim, dtype, ranks, "head_scatter"), "merge of decode attention"


def read_architecture(path: Path, ranks: int, *, split: bool = False) -> Architecture:
    """The architecture of a config.json on `ranks` ranks. `split`: Q, K, V, gate and up are separate products.

    Raises UsageError for a malformed file, an unknown family, and sizes that `ranks` does not divide.
    """
    return architecture_of(_read(path), ranks, split=split, named=f"file {path}")


def architecture_of(config: Mapping[str, Any], ranks: int, *, split: bool = False, named: str = "the config") -> Architecture:
    """See `read_architecture`."""
    quantized = "quantization_config" in config
    text = config.get("text_config")
    whole, config = config, text if isinstance(text, Mapping) else config  # a multimodal model
    family = config.get("model_type")
    layers_of = FAMILIES.get(family) if isinstance(family, str) else None
    if layers_of is None:
        raise UsageError(f"{named} has model_type {family!r}; allowed are {', '.join(FAMILIES)}: give another --model")
    sizes = Sizes(config, ranks, named)
    layers = tuple(layers_of(sizes, split))
    stated = (of.get(name) for of in (config, whole) for name in ("torch_dtype", "dtype"))
    dtype = DTYPES.get(str(next(filter(None, stated), "")).removeprefix("torch."), "bf16")
    notes = []
    if sizes.experts:
        notes.append("its routed experts are left out: they are grouped products, which no operator computes")
    quantize = quantization_of(whole.get("quantization_config") or config.get("quantization_config"))
    if quantized and not quantize:
        notes.append(f"its weights are quantized; these are the problems of {dtype} weights")
    return Architecture(str(family), ranks, dtype, layers, sizes.attention(), tuple(notes), quantize)


def quantization_of(stated: object) -> str:
    """How engines quantise inputs for weights of a `quantization_config`: row, block or static; empty for other weights."""
    if not isinstance(stated, Mapping):
        return ""
    method = stated.get("quant_method")
    if method == "fp8":
        if stated.get("weight_block_size"):
            return "block" if list(stated["weight_block_size"]) == [128, 128] else ""
        return "static" if stated.get("activation_scheme") == "static" else "row"
    if method == "fbgemm_fp8":
        return "row"
    groups = stated.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping) and len(groups) == 1:
        (group,) = groups.values()
        weights, inputs = (group.get(name) or {} for name in ("weights", "input_activations"))
        if (weights.get("type"), weights.get("num_bits")) == ("float", 8):
            return "row" if inputs.get("dynamic") and weights.get("strategy") in ("channel", "tensor") else ""
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise UsageError(f"file {path} holds more than {LARGEST_FILE >> 20} MiB: give another --model")
        found = json.loads(data)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give the config.json of a model as --model") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"file {path} is not JSON ({error}): give the config.json of a model as --model") from None
    if not isinstance(found, dict):
        raise UsageError(f"file {path} holds no JSON object: give the config.json of a model as --model")
    return found


class Sizes:
    """The sizes of a config, each checked when it is asked for."""

    def __init__(self, config: Mapping[str, Any], ranks: int, named: str) -> None:
        self.config = config
        self.ranks = ranks
        self.named = named

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; 0 is allowed only if the default is 0."""
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < (0 if default == 0 else 1):
            raise UsageError(f"{self.named} has {name} {value!r}; it must be a whole number above 0: give another --model")
        return value

    def own(self, name: str, value: int) -> int:
        """The part of one rank."""
        if value % self.ranks:
            raise UsageError(f"{self.named} has {name} {value} on {self.ranks} ranks, which must divide it: give another --tp")
        return value // self.ranks

    @property
    def hidden(self) -> int:
        return self.whole("hidden_size")

    @property
    def heads(self) -> int:
        return self.whole("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.whole("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        return self.whole("head_dim", self.hidden // self.heads)

    @property
    def experts(self) -> int:
        """Routed experts; 0 in a dense model."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        return max(self.whole(name, 0) for name in names)

    @property
    def own_kv_heads(self) -> int:
        """KV heads of a rank. If there are fewer KV heads than ranks, several ranks have the same head."""
        if self.kv_heads < self.ranks and self.ranks % self.kv_heads == 0:
            return 1
        return self.own("num_key_value_heads", self.kv_heads)

    @property
    def latent(self) -> bool:
        return self.config.get("kv_lora_rank") is not None

    def attention(self) -> Attention:
        if not self.latent:
            return Attention(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        rank = self.whole("kv_lora_rank")
        return Attention(self.heads, 1, rank + self.whole("qk_rope_head_dim"), rank, latent=True)


def _grouped_attention(sizes: Sizes, split: bool) -> Layers:
    q, kv = sizes.own("num_attention_heads", sizes.heads) * sizes.head_dim, sizes.own_kv_heads * sizes.head_dim
    if split:
        # One gather feeds all three products; it is fused with the widest.
        yield Linear("Q, K, V", q, sizes.hidden)
    else:
        yield Linear("QKV", q + 2 * kv, sizes.hidden)
    yield Linear("attention output", sizes.hidden, q, row=True)


def _latent_attention(sizes: Sizes, split: bool) -> Layers:
    """Multi-head latent attention: the latents are gathered, and each rank expands some heads from them."""
    del split
    heads = sizes.own("num_attention_heads", sizes.heads)
    nope, rope, value = (sizes.whole(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if sizes.config.get("q_lora_rank") is None:
        yield Linear("Q", heads * (nope + rope), sizes.hidden)
    else:
        yield Linear("Q from its latent", heads * (nope + rope), sizes.whole("q_lora_rank"))
    yield Linear("K and V from their latent", heads * (nope + value), sizes.whole("kv_lora_rank"))
    yield Linear("attention output", sizes.hidden, heads * value, row=True)


def _mlp(sizes: Sizes, width: int, split: bool, name: str = "MLP") -> Layers:
    own = sizes.own(f"width of the {name}", width)
    yield Linear(f"gate, up of the {name}", own if split else 2 * own, sizes.hidden)
    yield Linear(f"down of the {name}", sizes.hidden, own, row=True)


def _dense(sizes: Sizes, split: bool) -> Layers:
    yield from _grouped_attention(sizes, split)
    yield from _mlp(sizes, sizes.whole("intermediate_size"), split)


def _mixtral(sizes: Sizes, split: bool) -> Layers:
    yield from _grouped_attention(sizes, split)


def _qwen_moe(sizes: Sizes, split: bool) -> Layers:
    yield from _grouped_attention(sizes, split)
    if sizes.config.get("mlp_only_layers") or sizes.whole("decoder_sparse_step", 1) > 1:
        yield from _mlp(sizes, sizes.whole("intermediate_size"), split)
    if shared := sizes.whole("shared_expert_intermediate_size", 0):
        yield from _mlp(sizes, shared, split, "shared expert")


def _deepseek(sizes: Sizes, split: bool) -> Layers:
    yield from (_latent_attention if sizes.latent else _grouped_attention)(sizes, split)
    if not sizes.experts or sizes.whole("first_k_dense_replace", 0):
        yield from _mlp(sizes, sizes.whole("intermediate_size"), split)
    if sizes.experts and (shared := sizes.whole("n_shared_experts", 0)):
        yield from _mlp(sizes, shared * sizes.whole("moe_intermediate_size"), split, "shared experts")


FAMILIES: dict[str, Callable[[Sizes, bool], Layers]] = {
    "llama": _dense,
    "mistral": _dense,
    "ministral": _dense,
    "mixtral": _mixtral,
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
"""Builders of architectures by the `model_type` of a config."""


def tokens_of(text: str) -> tuple[int, ...]:
    """`1,16,64...8192`: numbers of tokens. `...` repeats the factor of the two numbers before it, or doubles, up to the last.

    Raises UsageError.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("...")
        found.append(_tokens(first, text))
        if not dots:
            continue
        end, before = _tokens(last, text), found[-2] if len(found) > 1 else 0
        factor = found[-1] // before if before and found[-1] % before == 0 and found[-1] > before else 2
        if end < found[-1]:
            raise _wrong(text)
        while found[-1] * factor < end:
            found.append(found[-1] * factor)
        found.append(end)
    return tuple(dict.fromkeys(found))


def _tokens(text: str, whole: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()) or len(text) > 9 or not int(text):
        raise _wrong(whole)
    return int(text)


def _wrong(text: str) -> UsageError:
    return UsageError(f"tokens is {text!r}; it must be numbers such as 1,16,64...8192: give others as --tokens")
