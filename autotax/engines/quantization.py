"""FP8 weights of a checkpoint, as the `quantization_config` of its config.json states them.

Forms are listed as FP8 if the plugin of vLLM or SGLang takes the layers that the engine makes of them: see `_stored` in
autotax.engines.vllm and autotax.engines.sglang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any

from autotax.core.errors import UsageError

LONGEST = 60
"""Most characters of a value that a message repeats."""
LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Keys of modules that are not quantised."""
MOST_REPEATS = 6
"""Most repeats in an expression: each multiplies the tries by up to the letters of a name."""
_REPEATS, _REPEATED_GROUP = re.compile(r"[*+{]|(?<![(*+?}])\?"), re.compile(r"\)[*+{]")
_OUTER = re.compile(r"((model|language_model|text_model)\.)+")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""The names of a decoder's parents, alone and in a model of several media."""


@dataclass(frozen=True)
class Modules:
    """Modules of a decoder by the entries of a config: a name or a part of it, a wildcard, or `re:` and an expression."""

    entries: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        """Whether an entry names a module, such as layers.3.mlp.up_proj, or one of its parents."""
        words = name.split(".")
        runs = {".".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}
        if not runs.isdisjoint(self._names):
            return True
        parents = [".".join(words[:last]) for last in range(1, len(words) + 1)]
        return any(pattern.match(prefix + parent) for pattern in self._patterns for prefix in _PREFIXES for parent in parents)

    @cached_property
    def _names(self) -> frozenset[str]:
        plain = (entry.removesuffix("*").strip(".") for entry in self.entries if not entry.startswith("re:"))
        return frozenset(_OUTER.sub("", name, count=1) for name in plain if "*" not in name)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        own = [_compiled(entry.removeprefix("re:")) for entry in self.entries if entry.startswith("re:")]
        wild = (entry.removesuffix("*").rstrip(".") for entry in self.entries if not entry.startswith("re:"))
        return own + [re.compile(translate(name)) for name in wild if "*" in name]


@dataclass(frozen=True)
class Quantization:
    """The form of a checkpoint's weights, and the modules that have it."""

    quantize: str = ""
    """How engines quantise inputs: row, block or static; empty for weights that are not FP8, or in a form that plugins leave."""
    reason: str = ""
    """How weights are quantised that plugins leave to the engine; empty for others."""
    ignored: Modules = Modules()
    targets: Modules = Modules()
    """The quantised modules; all of them if it has no entries."""
    only_vllm: bool = False
    """Whether the plugin of SGLang leaves such layers to SGLang."""

    def covers(self, names: Sequence[str]) -> bool:
        """Whether a weight is quantised. `names` are those of its parts; each begins with `layers.` and a number."""
        chosen = not self.targets.entries or any(name in self.targets for name in names)
        return chosen and not any(name in self.ignored for name in names)


def quantization_of(stated: object) -> Quantization:
    """The quantisation of a `quantization_config`. Anything but an object with keys is none."""
    if not isinstance(stated, Mapping) or not stated:
        return Quantization()
    inner = {**stated, **_part(stated, "quantization")}  # modelopt may wrap its keys once more
    method = str(inner.get("quant_method", "a method that its config leaves out"))
    quantize, reason = _form(method, inner)
    targets = tuple(_strings(_group(inner).get("targets"))) if method == "compressed-tensors" else ()
    return Quantization(
        quantize,
        reason,
        Modules(tuple(entry for key in LISTS for entry in _strings(inner.get(key)))),
        Modules(() if "Linear" in targets else targets),
        only_vllm=bool(quantize) and (method == "fbgemm_fp8" or method.startswith("modelopt")),
    )


def _form(method: str, stated: Mapping[str, Any]) -> tuple[str, str]:
    """How inputs are quantised, or why plugins leave such weights."""
    if stated.get("scale_fmt") == "ue8m0":
        return "", "with scales that are powers of two (scale_fmt ue8m0)"
    if method == "fp8":
        static = stated.get("activation_scheme") == "static"
        if not (block := stated.get("weight_block_size")):
            return "static" if static else "row", ""
        return ("block", "") if block == [128, 128] and not static else ("", f"in blocks of {_short(block)}")
    if method == "fbgemm_fp8":
        return "row", ""
    if method.startswith("modelopt"):
        algorithm = str(stated.get("quant_algo")).upper()
        quantize = {"FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "row"}.get(algorithm, "")
        return quantize, "" if quantize else f"by modelopt as {algorithm[:LONGEST]}"
    if method == "compressed-tensors":
        return _of_compressed_tensors(stated)
    return "", f"by {method[:LONGEST]}"


def _of_compressed_tensors(stated: Mapping[str, Any]) -> tuple[str, str]:
    group = _group(stated)
    weights, inputs = _part(group, "weights"), _part(group, "input_activations")
    if not group:
        return "", "in several groups"
    if any((part.get("type"), part.get("num_bits")) != ("float", 8) for part in (weights, inputs)):
        return "", "to other types than 8-bit floats for weights and inputs"
    dynamic, how = inputs.get("dynamic"), (weights.get("strategy"), inputs.get("strategy"))
    if dynamic is True and how[0] in ("channel", "tensor"):
        return "row", ""
    if dynamic is True and how == ("block", "group") and weights.get("block_structure") == [128, 128]:
        return ("block", "") if inputs.get("group_size") == 128 else ("", f"for groups of {_short(inputs.get('group_size'))}")
    if not dynamic and how == ("tensor", "tensor"):
        return "static", ""
    return "", f"by {_short(how[0])} for {'dynamic' if dynamic else 'static'} inputs by {_short(how[1])}"


def _compiled(expression: str) -> re.Pattern[str]:
    """An expression of a stranger's file. Raises UsageError for one that may take forever, which no signal would end."""
    names = f"quantization_config names modules by {_short(expression)!r}"
    if len(_REPEATS.findall(expression)) > MOST_REPEATS or _REPEATED_GROUP.search(expression):
        limit = f"expressions repeat no groups, and repeat at most {MOST_REPEATS} times"
        raise UsageError(f"{names}; {limit}: give another --model")
    try:
        return re.compile(expression)
    except re.error as error:
        raise UsageError(f"{names} ({error}): give another --model") from None


def _group(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group of layers of compressed-tensors; empty if there is not just one."""
    groups = _part(stated, "config_groups")
    return _part(groups, next(iter(groups))) if len(groups) == 1 else {}


def _part(stated: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = stated.get(key)
    return part if isinstance(part, Mapping) else {}


def _strings(stated: object) -> Iterator[str]:
    yield from (entry for entry in stated if isinstance(entry, str)) if isinstance(stated, list) else ()


def _short(value: object) -> str:
    return str(value)[:LONGEST]
