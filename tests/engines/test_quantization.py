"""FP8 checkpoints: which layers of a config are FP8, how their inputs are quantised, and which forms the plugins leave."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autotax.core.errors import UsageError
from autotax.engines.architectures import architecture_of
from autotax.operators.problems import AllGatherGemm
from tests.engines.test_architectures import DEEPSEEK_V3, LLAMA_70B, RMS, Config


def compressed(weights: Config, inputs: Config | None, **more: Any) -> Config:
    """A `quantization_config` as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax"} | weights
    inputs = inputs and {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None} | inputs
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    usual = {"format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {"config_groups": {"group_0": group}, "quant_method": "compressed-tensors", **usual, **more}


def modelopt(algorithm: str, bits: int = 8) -> Config:
    part = {"dynamic": False, "num_bits": bits, "type": "float"}
    groups = {"group_0": {"input_activations": part, "weights": part, "targets": ["Linear"]}}
    return {"config_groups": groups, "ignore": ["lm_head"], "quant_algo": algorithm, "quant_method": "modelopt"}


BLOCKS = {"strategy": "block", "block_structure": [128, 128], "group_size": None}
STATIC_INPUTS = {"strategy": "tensor", "dynamic": False}
BY_TOKEN = {"strategy": "token", "dynamic": True}
BY_GROUP = {"strategy": "group", "group_size": 128, "dynamic": True}
FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

CHECKPOINTS: dict[str, tuple[object, str, str, str]] = {
    "blocks, as Qwen3's": (FP8_BLOCKS, "block", "block", ""),
    "dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "row", "row", ""),
    "static": ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "static", ""),
    "FP8-dynamic of llm-compressor": (compressed({"strategy": "channel"}, BY_TOKEN), "row", "row", ""),
    "FP8 of llm-compressor": (compressed({"strategy": "tensor"}, STATIC_INPUTS), "tensor", "static", ""),
    "FP8-block of llm-compressor": (compressed(BLOCKS, BY_GROUP), "block", "block", ""),
    "fbgemm with a bound": ({"activation_scale_ub": 1200.0, "quant_method": "fbgemm_fp8"}, "row", "row", "leaves them to SGLang"),
    "modelopt": (modelopt("FP8"), "tensor", "static", "leaves them to SGLang"),
    "modelopt by channels": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "row", "row", "leaves them to SGLang"),
    "modelopt, wrapped": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        *("tensor", "static", "leaves them to SGLang"),
    ),
    "powers of two, as DeepSeek V3.1's": (FP8_BLOCKS | {"scale_fmt": "ue8m0"}, "", "", "powers of two (scale_fmt ue8m0)"),
    "other blocks": (FP8_BLOCKS | {"weight_block_size": [64, 64]}, "", "", "in blocks of [64, 64]"),
    "no blocks": (FP8_BLOCKS | {"weight_block_size": 128}, "", "", "in blocks of 128"),
    "other groups of inputs": (compressed(BLOCKS, BY_GROUP | {"group_size": 64}), "", "", "for groups of 64"),
    "static inputs of channels": (compressed({"strategy": "channel"}, STATIC_INPUTS), "", "", "by channel for static inputs"),
    "inputs of 16 bits": (compressed({"strategy": "channel"}, None), "", "", "other types than 8-bit floats"),
    "integers": (compressed({"strategy": "channel", "type": "int"}, BY_TOKEN), "", "", "other types than 8-bit floats"),
    "several groups": (compressed({}, None, config_groups={"a": {}, "b": {}}), "", "", "in several groups"),
    "no groups": (compressed({}, None, config_groups=[]), "", "", "in several groups"),
    "modelopt in 4 bits": (modelopt("NVFP4", 4), "", "", "by modelopt as NVFP4"),
    "awq": ({"quant_method": "awq"}, "", "", "by awq, which plugins leave to the engine; these are the problems of bf16 weights"),
    "no method": ({"bits": 8}, "", "", "by a method that its config leaves out"),
    "none": (None, "", "", ""),
}


@pytest.mark.parametrize(("stated", "scales", "quantize", "note"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_model_of_fp8_weights_has_problems_of_fp8(stated: object, scales: str, quantize: str, note: str) -> None:
    architecture = architecture_of({**LLAMA_70B, **RMS, "quantization_config": stated}, 2)
    for problem in architecture.problems([64]):
        fields = problem.to_dict()
        behind_norm = problem.op == "all-reduce-norm"
        assert fields["dtype"] == ("bf16" if behind_norm or not scales else "e4m3")
        if behind_norm and not fields.get("k"):
            continue
        assert (fields.get("scales", ""), fields.get("quantize", "")) == (scales, quantize)
        assert (fields.get("accumulate") == "fast") == (quantize in ("row", "static") and not behind_norm)
    assert any(note in line for line in architecture.notes)
    assert any("plugin" in line for line in architecture.notes) == bool(note)
    in_fp16 = {(problem.dtype, getattr(problem, "quantize", "none")) for problem in architecture.problems([64], dtype="fp16")}
    assert in_fp16 == {("fp16", "none")}


FP8 = {"quant_method": "fbgemm_fp8"}
SOME = [f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 79) for part in ("gate", "up", "down")]
EVERY_OUTPUT = [*(f"model.layers.{layer}.self_attn.o_proj" for layer in range(80)), "model.decoder.self_attn.o_proj"]
ATTENTION = {"QKV", "attention output"}
OF_MLP = {"gate, up of the MLP", "down of the MLP"}
UNQUANTISED: dict[str, tuple[Config, set[str], set[str]]] = {
    "the output layer": ({"modules_to_not_convert": ["lm_head"], **FP8}, set(), set()),
    "the first and the last MLP, and all attention": (
        {"modules_to_not_convert": [*SOME, *(f"model.layers.{layer}.self_attn" for layer in range(80))], **FP8},
        ATTENTION, OF_MLP,
    ),
    "one part of a product": ({"modules_to_not_convert": ["model.layers.7.self_attn.k_proj"], **FP8}, set(), {"QKV"}),
    "outputs of attention, as MiMo's": (FP8_BLOCKS | {"ignored_layers": EVERY_OUTPUT}, {"attention output"}, set()),
    "a router, a norm and a tower": (
        FP8_BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp.gate", "gate", "model.visual.layers.0.mlp.up_proj"]},
        set(), set(),
    ),
    "in a model of several media": (
        FP8_BLOCKS | {"modules_to_not_convert": ["model.language_model.layers.0.mlp.up_proj"]}, set(), {"gate, up of the MLP"},
    ),
    "expressions": (
        compressed(BLOCKS, BY_GROUP, ignore=["re:.*vision_tower.*", r"re:.*self_attn\.[qkv]_proj$"]), {"QKV"}, set(),
    ),
    "a wildcard at the end": (modelopt("FP8") | {"ignore": ["model.layers.1*", "lm_head*"]}, set(), ATTENTION | OF_MLP),
    "a wildcard inside": (
        modelopt("FP8") | {"ignore": ["model.layers.*.self_attn", "*down_proj"]}, {*ATTENTION, "down of the MLP"}, set(),
    ),
    "targets": (
        {**FP8, "quant_method": "compressed-tensors", "config_groups": {"g": {
            **compressed({"strategy": "channel"}, BY_TOKEN)["config_groups"]["group_0"], "targets": ["re:.*mlp.*"],
        }}},
        ATTENTION, set(),
    ),
    "no list": ({"modules_to_not_convert": 7, **FP8}, set(), set()),
}  # fmt: skip


@pytest.mark.parametrize(("stated", "plain", "both"), UNQUANTISED.values(), ids=UNQUANTISED.keys())
def test_modules_that_a_checkpoint_leaves_out_keep_the_models_type(stated: Config, plain: set[str], both: set[str]) -> None:
    architecture = architecture_of(LLAMA_70B | {"num_hidden_layers": 80, "quantization_config": stated}, 2)
    types: dict[str, set[str]] = {}
    for problem, names in architecture.problems([64]).items():
        for name in re.split(r", (?!up)", names):
            types.setdefault(name, set()).add(problem.dtype)
    assert {name for name, dtypes in types.items() if dtypes == {"bf16"}} == plain
    assert {name for name, dtypes in types.items() if dtypes == {"bf16", "e4m3"}} == both
    notes = [note for note in architecture.notes if "leaves weights of these layers in bf16" in note]
    assert len(notes) == bool(plain | both)
    assert all(f"some {name}" in notes[0] for name in both) and all(name in notes[0] for name in plain)


def test_dense_layers_of_a_mixture_are_the_first_ones() -> None:
    """Its other layers have experts, so a list that has all dense MLPs leaves none in FP8."""
    listed = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(3) for part in ("gate", "up", "down")]
    mixture = DEEPSEEK_V3 | {"num_hidden_layers": 61, "quantization_config": FP8_BLOCKS | {"ignored_layers": listed}}
    layers = architecture_of(mixture, 8).layers
    assert {layer.name for layer in layers if not layer.quantize} == OF_MLP
    assert len(layers) == len({layer.name for layer in layers})


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"names modules by '\('.*: give another --model"):
        architecture_of(LLAMA_70B | {"quantization_config": compressed(BLOCKS, BY_GROUP, ignore=["re:("])}, 2)


def test_the_output_layer_is_never_fp8() -> None:
    config = LLAMA_70B | {"vocab_size": 128256, "quantization_config": FP8_BLOCKS}
    problems = architecture_of(config, 2, train=True).problems([64], train=True)
    assert problems[AllGatherGemm(64, 64128, 8192, "bf16", "m", 2)] == "output layer"


def test_a_caller_says_how_inputs_are_quantised() -> None:
    for config in (LLAMA_70B, LLAMA_70B | {"quantization_config": FP8_BLOCKS | {"scale_fmt": "ue8m0"}}):
        architecture = architecture_of(config, 2, quantize="row")
        assert {(problem.dtype, problem.to_dict()["quantize"]) for problem in architecture.problems([64])} == {("e4m3", "row")}
        assert not any("quantized" in note for note in architecture.notes)


@pytest.mark.parametrize("expression", ["(a+)+b", "(w|w)*x", ".*.*.*.*.*.*.*x", r"\w?" * 30 + "!"])
def test_an_expression_that_may_take_forever_is_refused(expression: str) -> None:
    config = LLAMA_70B | {"quantization_config": compressed(BLOCKS, BY_GROUP, ignore=[f"re:{expression}"])}
    with pytest.raises(UsageError, match="expressions repeat no groups, and repeat at most 6 times: give another --model"):
        architecture_of(config, 2)
