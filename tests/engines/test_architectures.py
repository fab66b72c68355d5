"""Configs of Hugging Face as problems: sizes counted by hand for models of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotax.core.errors import UsageError
from autotax.engines.architectures import FAMILIES, Linear, architecture_of, read_architecture, tokens_of
from autotax.operators.problems import AllGatherGemm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather

Config = dict[str, Any]


def grouped(kind: str, hidden: int, heads: int, kv_heads: int, **more: Any) -> Config:
    """A model config with the keys that most models have."""
    common = {"model_type": kind, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return common | {"torch_dtype": "bfloat16", "num_hidden_layers": 32, "hidden_act": "silu"} | more


MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LLAMA_70B = grouped("llama", 8192, 64, 8, intermediate_size=28672, head_dim=128)
QWEN2_72B = grouped("qwen2", 8192, 64, 8, intermediate_size=29568)
QWEN3_32B = grouped("qwen3", 5120, 64, 8, intermediate_size=25600, head_dim=128)
QWEN2_57B_A14B = grouped(
    "qwen2_moe", 3584, 28, 4, intermediate_size=18944, moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
    num_experts=64, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
QWEN3_235B_A22B = grouped(
    "qwen3_moe", 4096, 64, 4, intermediate_size=12288, moe_intermediate_size=1536, num_experts=128, head_dim=128,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
MISTRAL_7B = grouped("mistral", 4096, 32, 8, intermediate_size=14336, head_dim=None)
MISTRAL_NEMO = grouped("mistral", 5120, 32, 8, intermediate_size=14336, head_dim=128)
MIXTRAL_8X7B = grouped("mixtral", 4096, 32, 8, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2)
DEEPSEEK_V3 = grouped(
    "deepseek_v3", 7168, 128, 128, intermediate_size=18432, moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256,
    first_k_dense_replace=3, q_lora_rank=1536, quantization_config={"quant_method": "fp8"}, **MLA,
)  # fmt: skip
DEEPSEEK_V2_LITE = grouped(
    "deepseek_v2", 2048, 16, 16, intermediate_size=10944, moe_intermediate_size=1408, n_shared_experts=2, n_routed_experts=64,
    first_k_dense_replace=1, q_lora_rank=None, **MLA,
)  # fmt: skip
DEEPSEEK_MOE_16B = grouped(
    "deepseek", 2048, 16, 16, intermediate_size=10944, moe_intermediate_size=1408, n_shared_experts=2, n_routed_experts=64,
    first_k_dense_replace=1,
)  # fmt: skip

COUNTED: dict[str, tuple[Config, int, list[tuple[str, int, int]]]] = {
    "Llama 3.1 70B": (LLAMA_70B, 8, [("column", 1280, 8192), ("row", 8192, 1024), ("column", 7168, 8192), ("row", 8192, 3584)]),
    "Qwen2.5 72B": (QWEN2_72B, 8, [("column", 1280, 8192), ("row", 8192, 1024), ("column", 7392, 8192), ("row", 8192, 3696)]),
    "Qwen3 32B": (QWEN3_32B, 4, [("column", 2560, 5120), ("row", 5120, 2048), ("column", 12800, 5120), ("row", 5120, 6400)]),
    "Qwen2 57B-A14B": (
        QWEN2_57B_A14B,
        4,
        [("column", 1152, 3584), ("row", 3584, 896), ("column", 10240, 3584), ("row", 3584, 5120)],
    ),
    "Qwen3 235B-A22B, fewer KV heads than ranks": (QWEN3_235B_A22B, 8, [("column", 1280, 4096), ("row", 4096, 1024)]),
    "Mistral 7B": (MISTRAL_7B, 2, [("column", 3072, 4096), ("row", 4096, 2048), ("column", 14336, 4096), ("row", 4096, 7168)]),
    "Mistral Nemo": (MISTRAL_NEMO, 4, [("column", 1536, 5120), ("row", 5120, 1024), ("column", 7168, 5120), ("row", 5120, 3584)]),
    "Mixtral 8x7B": (MIXTRAL_8X7B, 4, [("column", 1536, 4096), ("row", 4096, 1024)]),
    "DeepSeek V3": (
        DEEPSEEK_V3,
        8,
        [
            *[("column", 3072, 1536), ("column", 4096, 512), ("row", 7168, 2048)],
            *[("column", 4608, 7168), ("row", 7168, 2304), ("column", 512, 7168), ("row", 7168, 256)],
        ],
    ),
    "DeepSeek V2 Lite": (
        DEEPSEEK_V2_LITE,
        2,
        [
            *[("column", 1536, 2048), ("column", 2048, 512), ("row", 2048, 1024)],
            *[("column", 10944, 2048), ("row", 2048, 5472), ("column", 2816, 2048), ("row", 2048, 1408)],
        ],
    ),
    "DeepSeek MoE 16B": (
        DEEPSEEK_MOE_16B,
        2,
        [
            *[("column", 3072, 2048), ("row", 2048, 1024)],
            *[("column", 10944, 2048), ("row", 2048, 5472), ("column", 2816, 2048), ("row", 2048, 1408)],
        ],
    ),
}


@pytest.mark.parametrize(("config", "ranks", "layers"), COUNTED.values(), ids=COUNTED.keys())
def test_the_layers_of_a_model_are_those_that_a_rank_has(config: Config, ranks: int, layers: list[tuple[str, int, int]]) -> None:
    found = architecture_of(config, ranks)
    assert [("row" if each.row else "column", each.n, each.k) for each in found.layers] == layers
    assert found.dtype == "bf16"
    assert bool(found.notes) == any("experts" in name for name in config)


def test_a_layer_asks_for_what_its_numbers_of_tokens_allow() -> None:
    found = architecture_of(LLAMA_70B, 8).problems([4, 64], kv_len=4096)
    assert list(found)[:3] == [
        AllGatherGemm(64, 1280, 8192, "bf16", "m", 8),  # 8 ranks do not divide 4 tokens
        GemmReduceScatter(4, 8192, 1024, "bf16", "replicated", 8),
        GemmReduceScatter(64, 8192, 1024, "bf16", "replicated", 8),
    ]
    assert found[GemmReduceScatter(64, 8192, 3584, "bf16", "scattered", 8)] == "down of the MLP"
    assert {each for each in found if not isinstance(each, AllGatherGemm | GemmReduceScatter)} == {
        problem
        for batch in (4, 64)
        for problem in (
            FlashDecode(batch, 64, 8, 128, 4096, "bf16", 8),
            HeadGather(batch, 64, 128, "bf16", 8),
            DecodeMerge(batch, 64, 128, "bf16", 8, "head_scatter"),
        )
    }


def test_a_latent_cache_is_merged_but_not_attended_to() -> None:
    found = architecture_of(DEEPSEEK_V3, 8).problems([16, 8192], kv_len=4096)
    decode = [each for each in found if not isinstance(each, AllGatherGemm | GemmReduceScatter)]
    assert decode == [HeadGather(16, 128, 576, "bf16", 8), DecodeMerge(16, 128, 512, "bf16", 8, "head_scatter")]


def test_the_backward_takes_the_weights_the_other_way() -> None:
    whole, forward = (architecture_of(MIXTRAL_8X7B, 4).problems([64], train=train) for train in (True, False))
    assert {each: layer for each, layer in whole.items() if each not in forward} == {
        GemmReduceScatter(64, 4096, 1536, "bf16", "scattered", 4, "kn"): "QKV, backward",
        AllGatherGemm(64, 1024, 4096, "bf16", "m", 4, "kn"): "attention output, backward",
    }


def test_products_that_are_apart_are_as_wide_as_the_widest() -> None:
    found = architecture_of(LLAMA_70B, 8, split=True)
    assert found.layers[0] == Linear("Q, K, V", 1024, 8192)
    assert found.layers[2] == Linear("gate, up of the MLP", 3584, 8192)


def test_layers_of_the_same_shape_are_one_problem() -> None:
    found = architecture_of(grouped("llama", 4096, 32, 32, intermediate_size=4096), 2).problems([1], dtype="fp16")
    assert found == {GemmReduceScatter(1, 4096, 2048, "fp16", "replicated", 2): "attention output, down of the MLP"}


def test_a_model_that_sees_has_its_text_inside(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    seeing = {"model_type": "mistral3", "dtype": "float16", "text_config": MISTRAL_NEMO | {"torch_dtype": None}}
    path.write_text(json.dumps(seeing))
    found = read_architecture(path, 4)
    assert (found.family, found.dtype, found.layers) == ("mistral", "fp16", architecture_of(MISTRAL_NEMO, 4).layers)


WRONG: dict[str, tuple[Config, str]] = {
    "an unknown family": ({"model_type": "gpt2"}, f"model_type 'gpt2'; allowed are {', '.join(FAMILIES)}"),
    "no family": ({}, "model_type None"),
    "a family that is no word": ({"model_type": ["llama"]}, "model_type"),
    "a size that lacks": ({"model_type": "llama", "hidden_size": 64}, "num_attention_heads None; it must be a whole number"),
    "a size that is no number": (LLAMA_70B | {"hidden_size": "8192"}, "hidden_size '8192'"),
    "a size below zero": (LLAMA_70B | {"intermediate_size": -1}, "intermediate_size -1"),
    "heads that the ranks do not divide": (LLAMA_70B | {"num_attention_heads": 28}, "num_attention_heads 28 on 8 ranks"),
    "an MLP that they do not divide": (LLAMA_70B | {"intermediate_size": 100}, "width of the MLP 100 on 8 ranks"),
    "KV heads that they do not share": (LLAMA_70B | {"num_key_value_heads": 12}, "num_key_value_heads 12 on 8 ranks"),
}


@pytest.mark.parametrize(("config", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_config_that_is_wrong_is_refused(config: Config, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        architecture_of(config, 8)
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\0", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"give the config\.json of a model as --model"):
        read_architecture(path, 8)


def test_tokens_go_on_as_they_began() -> None:
    assert tokens_of("1,16,64...8192") == (1, 16, 64, 256, 1024, 4096, 8192)
    assert tokens_of("3...20") == (3, 6, 12, 20)
    assert tokens_of("7,7, 9") == (7, 9)
    assert tokens_of("5,7...20") == (5, 7, 14, 20)


@pytest.mark.parametrize("text", ["", "1,", "0", "-1", "1...", "...8", "8...1", "1.5", "many", "1" * 30, "٣"])
def test_tokens_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"tokens is .*: give others as --tokens"):
        tokens_of(text)


@pytest.mark.parametrize(
    ("stated", "scales", "quantize"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "block", "block"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "row", "row"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "static"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"type": "float", "num_bits": 8, "strategy": "channel"},
                        "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
                    }
                },
            },
            "row",
            "row",
        ),
        ({"quant_method": "awq"}, "", ""),
        (None, "", ""),
    ],
)
def test_a_model_of_fp8_weights_has_problems_of_fp8(stated: object, scales: str, quantize: str) -> None:
    architecture = architecture_of({**LLAMA_70B, "quantization_config": stated}, 2)
    for problem in architecture.problems([64]):
        told = problem.to_dict()
        assert (told.get("scales", ""), told.get("quantize", "")) == (scales, quantize)
        assert told["dtype"] == ("e4m3" if scales else "bf16")
    assert {problem.dtype for problem in architecture.problems([64], dtype="fp16")} == {"fp16"}
