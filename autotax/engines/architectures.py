"""Lists the problems of a Hugging Face model at a degree of tensor parallelism.

A config.json names the sizes of a model. Its column-parallel layers are All-Gather + GEMM where activations are sharded along
the sequence; its row-parallel layers are GEMM + Reduce-Scatter there, and GEMM + All-Reduce where they are not. Where a
residual and an RMSNorm follow the sum, engines fuse the three: all-reduce-norm, for few rows with the product in front. Most
families have the layers of Llama or of DeepSeek, and their configs say which; `Family` has the differences. Routed experts are
grouped products, which no operator computes: they are left out.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from autotax.core.errors import UsageError, did_you_mean
from autotax.core.files import as_utf8, read_once
from autotax.core.problem import Problem
from autotax.engines.quantization import LONGEST, Quantization, quantization_of
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather
from autotax.operators.scaled import SCALES_OF, accumulate_of, quants_of_norms
from autotax.spaces.all_reduce_norm import MOST_MULTIPLIED

LARGEST_FILE = 2**24
"""The most bytes of a config.json."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MOST_DECODED = 256
"""The most query tokens of a decode step; more tokens are a prefill."""
MOST_LAYERS = 1024
"""The most decoder layers whose modules are looked for in a config's lists."""
LARGEST_HEAD = 256
"""The most elements of a head that Flash Decode supports."""
Layers = Iterator["Linear"]
_TABLES = tomllib.loads((Path(__file__).parents[1] / "templates/families.toml").read_text())
NAMES, KEYS, NORMS, MODULES = (_TABLES[name] for name in ("names", "keys", "norms", "modules"))
"""Other keys of a size, keys by what they say, families by their norms, and modules of a decoder layer by our names."""


@dataclass(frozen=True)
class Linear:
    """One rank's part of a linear layer: its weight is [n, k]. `row`: its output is summed over the ranks. `quantize`: how inputs
    of its FP8 weight are quantised, empty for other weights.
    """

    name: str
    n: int
    k: int
    row: bool = False
    quantize: str = ""


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
    """The tensor-parallel layers of a model, each kind once, or twice if some of its weights are FP8 and others are not."""

    family: str
    ranks: int
    dtype: str
    layers: tuple[Linear, ...]
    attention: Attention
    notes: tuple[str, ...] = ()
    """The parts of the model that are not covered, one line each."""
    quantize: str = ""
    """How inputs of its FP8 weights are quantised: row, block or static; empty for other weights."""
    norm: int | None = None
    """The `offset` of all-reduce-norm for the RMSNorm behind sum and residual; None where no such norm follows."""

    def problems(
        self, tokens: Sequence[int], *, dtype: str | None = None, train: bool = False, kv_len: int | None = None
    ) -> dict[Problem, str]:
        """The problems for these numbers of tokens, each with the names of the layers that need it.

        - `dtype`: the type of all matrices, in place of the model's; no layer is FP8 then.
        - `train`: also the products of the backward, and no norms, whose operator has none.
        - `kv_len`: also decode steps, over a KV cache of `kv_len` tokens that is sharded over the ranks.
        """
        layers: dict[Problem, list[str]] = {}
        of = dtype or self.dtype
        for layer, m in product(self.layers, tokens):
            layer = replace(layer, quantize="") if dtype else layer
            for problem, name in self._of_layer(layer, m, of, train):
                layers.setdefault(_in_fp8(problem, layer.quantize), []).append(name)
            for problem in () if train else self._of_norm(layer, m, of, "" if dtype else self.quantize):
                layers.setdefault(problem, []).append(f"norm behind {layer.name}")
        if kv_len is not None:
            for batch in (m for m in tokens if m <= MOST_DECODED):
                for problem, name in self._of_decode(batch, kv_len, of):
                    layers.setdefault(problem, []).append(name)
        return {problem: ", ".join(dict.fromkeys(names)) for problem, names in layers.items()}

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

    def _of_norm(self, layer: Linear, m: int, dtype: str, quantize: str) -> Iterator[Problem]:
        """Sum, residual and norm behind a layer, for few rows also with the product in front. Results are also e4m3 where layers
        quantise by row or by a static scale: engines fuse the norm with that quantiser. Plugins ask for a product in front only
        with the quantiser of its own layer.
        """
        if self.norm is None or not layer.row:
            return
        front: tuple[Any, ...] = (layer.k, SCALES_OF[layer.quantize], layer.quantize) if layer.quantize else (layer.k,)
        for quant in quants_of_norms(quantize):
            multiplied = m <= MOST_MULTIPLIED and quant in quants_of_norms(layer.quantize)
            for behind in ((), front) if multiplied else ((),):
                with suppress(UsageError):  # more rows or columns than the operator supports
                    yield AllReduceNorm(m, layer.n, dtype, self.ranks, "added", quant, self.norm, *behind)

    def _of_decode(self, batch: int, kv_len: int, dtype: str) -> Iterator[tuple[Problem, str]]:
        own, ranks = self.attention, self.ranks
        if not own.latent and own.output_dim <= LARGEST_HEAD:
            yield FlashDecode(batch, own.q_heads, own.kv_heads, own.output_dim, kv_len, dtype, ranks), "decode attention"
        yield HeadGather(batch, own.q_heads, own.query_dim, dtype, ranks), "queries of all heads"
        yield DecodeMerge(batch, own.q_heads, own.output_dim, dtype, ranks, "head_scatter"), "merge of decode attention"


def _in_fp8(problem: Problem, quantize: str) -> Problem:
    """The same product with a weight in e4m3, if inputs are quantised. Sizes that e4m3 does not support keep their type."""
    if not quantize:
        return problem
    result = problem.dtype if problem.dtype in ("bf16", "fp16") else "bf16"
    more = {"result": result, "quantize": quantize, "accumulate": accumulate_of(quantize)}
    try:
        return replace(problem, dtype="e4m3", scales=SCALES_OF[quantize], **more)  # type: ignore[call-arg]
    except UsageError:
        return problem


def read_architecture(
    path: Path, ranks: int, *, split: bool = False, train: bool = False, quantize: str | None = None
) -> Architecture:
    """The architecture of a config.json on `ranks` ranks.

    - `split`: Q, K, V, gate and up are separate products.
    - `train`: with the output layer, which multiplies every token in training and the last token of a sequence in a server.
    - `quantize`: row, block or static: weights are FP8, and their inputs are quantised so, whatever the config states.

    Raises UsageError for a malformed file, a family without a list of layers, and sizes that `ranks` does not divide.
    """
    return architecture_of(_read(path), ranks, split=split, train=train, quantize=quantize, whose=f"file {path}")


def architecture_of(
    config: Mapping[str, Any], ranks: int, *, split: bool = False, train: bool = False, quantize: str | None = None,
    whose: str = "the config",
) -> Architecture:  # fmt: skip
    """As `read_architecture`; messages say `whose` config it is."""
    configs = [config]
    while text := next((part for name in KEYS["wrappers"] if isinstance(part := configs[0].get(name), Mapping)), None):
        configs.insert(0, text)
    family, layout = _family(configs, whose)
    sizes = Sizes(configs, ranks, layout, whose)
    stated = (of.get(name) for of in configs for name in ("torch_dtype", "dtype"))
    dtype = DTYPES.get(str(next(filter(None, stated), "")).removeprefix("torch."), "bf16")
    layers, notes = list(_attention(sizes, split)), []
    if sizes.has_dense_layers:
        layers += _mlp(sizes, sizes.inner, split, "MLP")
    if shared := sizes.shared_width:
        layers += _mlp(sizes, shared, split, "shared experts")
    if sizes.experts:
        notes.append("its routed experts are left out: they are grouped products, which no operator computes")
    if sizes.side_by_side:
        notes.append("its attention and MLP run side by side: a server that adds both first needs one reduction for the two")
    quantized = quantization_of(next((of["quantization_config"] for of in configs if of.get("quantization_config")), None))
    quantized = replace(quantized, quantize=quantize, reason="", only_vllm=False) if quantize else quantized
    layers = [replace(layer, quantize=form) for layer in layers for form in _forms(layer.name, quantized, sizes)]
    notes += _notes_of(quantized, layers, dtype)
    if (reason := sizes.without_output(train)) is None:
        layers.append(Linear("output layer", sizes.whole("vocab_size") // ranks, sizes.hidden))
    else:
        notes.append(f"its output layer (lm_head) is left out: {reason}")
    attention = sizes.attention()
    if sizes.assumed:
        taken = ", ".join(f"{name} {value}" for name, value in sizes.assumed.items())
        notes.append(f"its config leaves out what transformers takes by default: {taken}")
    return Architecture(family, ranks, dtype, tuple(layers), attention, tuple(notes), quantized.quantize, sizes.norm_of(family))


def _forms(name: str, quantized: Quantization, sizes: Sizes) -> list[str]:
    """`Linear.quantize` of the layers of one name: one value, or two if a checkpoint quantises some of these layers only."""
    if not quantized.quantize or not (quantized.ignored.entries or quantized.targets.entries):
        return [quantized.quantize]
    covered = {quantized.covers([f"layers.{number}.{of}" for of in MODULES[name]]) for number in sizes.numbers_of(name)}
    return [quantized.quantize if fp8 else "" for fp8 in sorted(covered, reverse=True)]


def _notes_of(quantized: Quantization, layers: Sequence[Linear], dtype: str) -> list[str]:
    """Names the weights that are not FP8, and the plugin that leaves some to its engine."""
    if quantized.reason:
        left = f"its weights are quantized {quantized.reason}, which plugins leave to the engine"
        return [f"{left}; these are the problems of {dtype} weights"]
    notes = []
    if quantized.quantize and (plain := [layer.name for layer in layers if not layer.quantize]):
        both = {layer.name for layer in layers if layer.quantize}
        names = ", ".join(f"some {name}" if name in both else name for name in plain)
        notes.append(f"its config leaves weights of these layers in {dtype}: {names}")
    if quantized.only_vllm:
        notes.append("the plugin of vLLM takes its FP8 weights; that of SGLang leaves them to SGLang")
    return notes


def _family(configs: Sequence[Mapping[str, Any]], name: str) -> tuple[str, Family]:
    """The family of the innermost config that states one. Raises UsageError, with the reason, for a family without a layout."""
    family = next((stated for of in configs if (stated := of.get("model_type")) is not None), None)
    family_name = str(family).removesuffix("_text") if isinstance(family, str) else ""
    if (layout := FAMILIES.get(family_name)) is not None:
        return family_name, layout
    advice = "list the products of its layers in a file, and give that as --shapes"
    if family_name in REFUSED:
        raise UsageError(f"{name} has model_type {family!r}, which has no plan: {REFUSED[family_name]}; {advice}")
    guess = did_you_mean(family_name, FAMILIES)
    allowed = f"allowed are {', '.join(FAMILIES)}"
    raise UsageError(f"{name} has model_type {family!r}; {allowed}: {f'{guess} Or ' if guess else ''}{advice}")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_once(path, LARGEST_FILE)
        if len(data) > LARGEST_FILE:
            raise UsageError(f"file {path} holds more than {LARGEST_FILE >> 20} MiB: give another --model")
        config = json.loads(as_utf8(data))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"file {path} cannot be read ({error.strerror}): give the config.json of a model as --model") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"file {path} is not JSON ({error}): give the config.json of a model as --model") from None
    if not isinstance(config, dict):
        raise UsageError(f"file {path} holds no JSON object: give the config.json of a model as --model")
    return config


@dataclass(frozen=True)
class Family:
    """The differences of a family from Llama, for configs that do not state them."""

    gated: bool = True
    """Whether its MLP has a gate beside the product up."""
    always_dense: bool = False
    """Whether each layer has a dense MLP beside its experts."""
    widening: int | None = None
    """The width of an MLP over the hidden size, where the config does not state it."""
    dense: str = "intermediate_size"
    """The key of the width of a dense MLP."""
    expert: str = "moe_intermediate_size"
    """The key of the width of a shared expert."""
    shared: int = 0
    """Shared experts of a config that has no number of them."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Sizes that a text model inside another config may leave out, as transformers has them."""


class Sizes:
    """The sizes of a model, each checked when it is asked for.

    `configs` are those of the text model and of what wraps it, innermost first.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], ranks: int, family: Family, name: str) -> None:
        self.config, self.ranks, self.family, self.named = configs[0], ranks, family, name
        self.assumed: dict[str, int] = {}
        """Defaults that took the place of sizes which the config leaves out."""
        self._defaults = family.defaults if len(configs) > 1 else {}
        self.heads = self.whole("num_attention_heads")
        self.latent = self.config.get("kv_lora_rank") is not None

    def stated(self, name: str) -> Any:
        """The value of a key, of one of its other names, or its default in the family; None if there is none."""
        for key in (name, *NAMES.get(name, ())):
            value: Any = self.config
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        if name in self._defaults:
            self.assumed[name] = self._defaults[name]
        return self._defaults.get(name)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; 0 is allowed only if the default is 0."""
        value = self.stated(name)
        value = default if value is None else value
        if type(value) is not int or value < (0 if default == 0 else 1):
            has = f"{self.named} has {name} {repr(value)[:LONGEST]}"
            raise UsageError(f"{has}; it must be a whole number above 0: give another --model")
        return value

    def own(self, name: str, value: int) -> int:
        if value % self.ranks:
            raise UsageError(f"{self.named} has {name} {value} on {self.ranks} ranks, which must divide it: give another --tp")
        return value // self.ranks

    @property
    def hidden(self) -> int:
        return self.whole("hidden_size")

    @property
    def kv_heads(self) -> int:
        if self.config.get("multi_query_attention") and self.config.get("multi_query_group_num"):
            return self.whole("multi_query_group_num")
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1
        return self.whole("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        if self.stated("head_dim") is not None:
            return self.whole("head_dim")
        if self.hidden % self.heads:
            have = f"hidden_size {self.hidden} and num_attention_heads {self.heads}, which must divide it"
            raise UsageError(f"{self.named} has {have} as there is no head_dim: give another --model")
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        return self.whole(self.family.dense, self.family.widening and self.family.widening * self.hidden)

    @property
    def side_by_side(self) -> bool:
        """Whether attention and MLP have the same input, and their outputs are added."""
        return any(self.config.get(name) is True for name in KEYS["side_by_side"])

    def norm_of(self, family: str) -> int | None:
        """See Architecture.norm."""
        apart = self.side_by_side or family in NORMS["apart"] or not isinstance(self.config.get("rms_norm_eps"), int | float)
        return None if apart else int(family in NORMS["offset"])

    @property
    def experts(self) -> int:
        """Routed experts; 0 in a dense model."""
        return max(self.whole(name, 0) for name in KEYS["experts"])

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have a dense MLP: all of them in a dense model, some of them in most mixtures."""
        kinds = self.config.get("mlp_layer_types")
        return (
            not self.experts
            or self.family.always_dense
            or any(self.whole(name, 0) for name in KEYS["dense_layers"])
            or any(self.whole(name, 1) > 1 for name in KEYS["steps"])
            or bool(self.config.get("mlp_only_layers"))
            or (isinstance(kinds, list) and "dense" in kinds)
        )

    def numbers_of(self, name: str) -> range:
        """The numbers of the decoder layers that have layers of a name. Mixtures may begin with some that have a dense MLP."""
        every = min(self.whole("num_hidden_layers", 1), MOST_LAYERS)
        dense = min(max(self.whole(key, 0) for key in KEYS["dense_layers"]), every) if self.experts else 0
        if dense and not self.family.always_dense and name.endswith("of the MLP"):
            return range(dense)
        return range(dense if name.endswith("of the shared experts") and dense < every else 0, every)

    @property
    def shared_width(self) -> int:
        """The width of the shared experts together; 0 if there are none."""
        if whole := max(self.whole(name, 0) for name in KEYS["shared_widths"]):
            return whole
        shared = max(self.family.shared, *(self.whole(name, 0) for name in KEYS["shared_experts"])) if self.experts else 0
        own = "moe_shared_expert_intermediate_size"
        return shared * self.whole(self.family.expert if self.stated(own) is None else own) if shared else 0

    @property
    def own_kv_heads(self) -> int:
        """KV heads of a rank. If there are fewer KV heads than ranks, several ranks have the same head."""
        if self.kv_heads < self.ranks and self.ranks % self.kv_heads == 0:
            return 1
        return self.own("num_key_value_heads", self.kv_heads)

    def attention(self) -> Attention:
        if not self.latent:
            return Attention(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        rank = self.whole("kv_lora_rank")
        return Attention(self.heads, 1, rank + self.whole("qk_rope_head_dim"), rank, latent=True)

    def without_output(self, train: bool) -> str | None:
        """The reason why the output layer is left out; None if it is planned."""
        if not train:
            return "a server multiplies the last token of each sequence only, and gathers none before; --train plans it"
        if self.stated("vocab_size") is None:
            return "the config has no vocab_size"
        if (words := self.whole("vocab_size")) % self.ranks:
            return f"{self.ranks} ranks do not divide vocab_size {words}"
        return None


def _attention(sizes: Sizes, split: bool) -> Layers:
    heads = sizes.own("num_attention_heads", sizes.heads)
    if sizes.latent:
        yield from _latent_attention(sizes, heads)
        return
    q, kv = heads * sizes.head_dim, sizes.own_kv_heads * sizes.head_dim
    if split:
        # One gather feeds all three products; it is fused with the widest.
        yield Linear("Q, K, V", q, sizes.hidden)
    else:
        yield Linear("QKV", q + 2 * kv, sizes.hidden)
    yield Linear("attention output", sizes.hidden, q, row=True)


def _latent_attention(sizes: Sizes, heads: int) -> Layers:
    """Multi-head latent attention: the latents are gathered, and each rank expands some heads from them."""
    nope, rope, value = (sizes.whole(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if sizes.config.get("q_lora_rank") is None:
        yield Linear("Q", heads * (nope + rope), sizes.hidden)
    else:
        yield Linear("Q from its latent", heads * (nope + rope), sizes.whole("q_lora_rank"))
    yield Linear("K and V from their latent", heads * (nope + value), sizes.whole("kv_lora_rank"))
    yield Linear("attention output", sizes.hidden, heads * value, row=True)


def _mlp(sizes: Sizes, width: int, split: bool, name: str) -> Layers:
    own = sizes.own(f"width of the {name}", width)
    if sizes.family.gated:
        yield Linear(f"gate, up of the {name}", own if split else 2 * own, sizes.hidden)
    else:
        yield Linear(f"up of the {name}", own, sizes.hidden)
    yield Linear(f"down of the {name}", sizes.hidden, own, row=True)


FAMILIES: dict[str, Family] = {
    name: Family(**{key: of[key] for key in of.keys() - {"names"}}) for of in _TABLES["family"] for name in of["names"]
}
"""Families by the `model_type` of a config, without `_text` at its end."""
REFUSED: dict[str, str] = {name: of["reason"] for of in _TABLES["refused"] for name in of["names"]}
"""The reason why a family has no plan."""


def tokens_of(text: str) -> tuple[int, ...]:
    """`1,16,64...8192`: numbers of tokens. `...` repeats the factor of the two numbers before it, or doubles, up to the last.

    Raises UsageError.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("...")
        numbers.append(_tokens(first, text))
        if not dots:
            continue
        end, before = _tokens(last, text), numbers[-2] if len(numbers) > 1 else 0
        factor = numbers[-1] // before if before and numbers[-1] % before == 0 and numbers[-1] > before else 2
        if end < numbers[-1]:
            raise _wrong(text)
        while numbers[-1] * factor < end:
            numbers.append(numbers[-1] * factor)
        numbers.append(end)
    return tuple(dict.fromkeys(numbers))


def _tokens(text: str, whole: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()) or len(text) > 9 or not int(text):
        raise _wrong(whole)
    return int(text)


def _wrong(text: str) -> UsageError:
    return UsageError(f"tokens is {text!r}; it must be numbers such as 1,16,64...8192: give others as --tokens")


ASKED = {"vllm": ("sum", "merge", "norm"), "sglang": ("sum", "merge", "norm", "sharded rows"), "torch": ("sharded rows",)}
"""Which problems a plugin looks up, by its name: see `_kind`."""


def _kind(problem: Problem) -> str:
    """`sum`: a row-parallel layer whose output each rank needs whole. `sharded rows`: a layer whose activations are sharded along
    the sequence, for torch's fused operators.
    """
    if isinstance(problem, GemmReduceScatter) and problem.output == "replicated":
        return "sum"
    kinds = {AllGatherGemm: "sharded rows", GemmReduceScatter: "sharded rows", DecodeMerge: "merge", AllReduceNorm: "norm"}
    return kinds.get(type(problem), "")


def asked_by(engine: str, layers: Mapping[Problem, str]) -> dict[Problem, str]:
    """The problems of a model, with their layers, for which the plugin of an engine looks winners up."""
    return {problem: names for problem, names in layers.items() if _kind(problem) in ASKED[engine]}
