"""Configs of Hugging Face as problems: sizes counted by hand, and every family of decoders planned or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotax.core.errors import UsageError
from autotax.engines.architectures import (
    FAMILIES,
    NORMS,
    REFUSED,
    Linear,
    architecture_of,
    asked_by,
    read_architecture,
    tokens_of,
)
from autotax.operators.problems import AllGatherGemm, AllReduceNorm, DecodeMerge, FlashDecode, GemmReduceScatter, HeadGather

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

GPT_OSS_120B = grouped("gpt_oss", 2880, 64, 8, intermediate_size=2880, head_dim=64, num_local_experts=128)
GEMMA_3_TEXT = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
GEMMA_3_4B = {"model_type": "gemma3", "text_config": GEMMA_3_TEXT}
GLM_45 = grouped(
    "glm4_moe", 5120, 96, 8, intermediate_size=12288, moe_intermediate_size=1536, n_shared_experts=1, n_routed_experts=160,
    first_k_dense_replace=3, head_dim=128,
)  # fmt: skip
LLAMA_4 = grouped(
    "llama4_text", 5120, 40, 8, intermediate_size=8192, intermediate_size_mlp=16384, head_dim=128, num_local_experts=128,
    interleave_moe_layer_step=2,
)  # fmt: skip
GEMMA_7B = grouped("gemma", 3072, 16, 16, intermediate_size=24576, head_dim=256)
PHI_3_MINI = grouped("phi3", 3072, 32, 32, intermediate_size=8192)
LLAVA_7B = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
FALCON_40B = {
    "model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True,
    "parallel_attn": True, "multi_query": True, "ffn_hidden_size": None,
}  # fmt: skip
FALCON_7B = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True, "parallel_attn": True}
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_inner": None}
COMMAND_R_PLUS = grouped("cohere", 12288, 96, 8, intermediate_size=33792)
NEMOTRON_340B = grouped("nemotron", 18432, 96, 8, intermediate_size=73728)
CHATGLM3_6B = {
    "model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "multi_query_attention": True,
    "multi_query_group_num": 2, "ffn_hidden_size": 13696, "padded_vocab_size": 65024,
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8},
    "ffn_config": {"moe_num_experts": 16, "ffn_hidden_size": 10752},
}  # fmt: skip
ERNIE_21B = grouped(
    "ernie4_5_moe", 2560, 20, 4, intermediate_size=12288, moe_intermediate_size=1536, moe_num_experts=64,
    moe_num_shared_experts=2, moe_layer_start_index=1, head_dim=128,
)  # fmt: skip
QWEN3_OMNI = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "text_config": grouped(
            "qwen3_omni_moe_text", 2048, 32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768, intermediate_size=768,
        )
    },
}  # fmt: skip
OPT_66B = grouped("opt", 9216, 72, 72, ffn_dim=36864)

COUNTED: dict[str, tuple[Config, int, list[tuple[str, int, int]]]] = {
    "gpt-oss 120B": (GPT_OSS_120B, 8, [("column", 640, 2880), ("row", 2880, 512)]),
    "Gemma 3 4B, most sizes by default": (
        GEMMA_3_4B,
        4,
        [("column", 1024, 2560), ("row", 2560, 512), ("column", 5120, 2560), ("row", 2560, 2560)],
    ),
    "GLM 4.5": (
        GLM_45,
        8,
        [
            *[("column", 1792, 5120), ("row", 5120, 1536)],
            *[("column", 3072, 5120), ("row", 5120, 1536), ("column", 384, 5120), ("row", 5120, 192)],
        ],
    ),
    "Llama 4 Maverick": (
        {"model_type": "llama4", "text_config": LLAMA_4},
        8,
        [
            *[("column", 896, 5120), ("row", 5120, 640)],
            *[("column", 4096, 5120), ("row", 5120, 2048), ("column", 2048, 5120), ("row", 5120, 1024)],
        ],
    ),
    "Llama 4 Scout": (
        {"model_type": "llama4", "text_config": LLAMA_4 | {"interleave_moe_layer_step": 1, "num_local_experts": 16}},
        8,
        [("column", 896, 5120), ("row", 5120, 640), ("column", 2048, 5120), ("row", 5120, 1024)],
    ),
    "Phi 3 mini": (PHI_3_MINI, 4, [("column", 2304, 3072), ("row", 3072, 768), ("column", 4096, 3072), ("row", 3072, 2048)]),
    "LLaVA 1.5 7B, all sizes by default": (
        LLAVA_7B,
        2,
        [("column", 6144, 4096), ("row", 4096, 2048), ("column", 11008, 4096), ("row", 4096, 5504)],
    ),
    "Falcon 40B": (FALCON_40B, 8, [("column", 1152, 8192), ("row", 8192, 1024), ("column", 4096, 8192), ("row", 8192, 4096)]),
    "Falcon 7B": (FALCON_7B, 1, [("column", 4672, 4544), ("row", 4544, 4544), ("column", 18176, 4544), ("row", 4544, 18176)]),
    "GPT-2 XL": (GPT2_XL, 5, [("column", 960, 1600), ("row", 1600, 320), ("column", 1280, 1600), ("row", 1600, 1280)]),
    "Command R+": (
        COMMAND_R_PLUS,
        8,
        [("column", 1792, 12288), ("row", 12288, 1536), ("column", 8448, 12288), ("row", 12288, 4224)],
    ),
    "Nemotron 4 340B": (
        NEMOTRON_340B,
        8,
        [("column", 2688, 18432), ("row", 18432, 2304), ("column", 9216, 18432), ("row", 18432, 9216)],
    ),
    "ChatGLM3 6B": (CHATGLM3_6B, 2, [("column", 2304, 4096), ("row", 4096, 2048), ("column", 13696, 4096), ("row", 4096, 6848)]),
    "DBRX": (DBRX, 8, [("column", 1024, 6144), ("row", 6144, 768)]),
    "ERNIE 4.5 21B-A3B": (
        ERNIE_21B,
        4,
        [
            *[("column", 896, 2560), ("row", 2560, 640)],
            *[("column", 6144, 2560), ("row", 2560, 3072), ("column", 1536, 2560), ("row", 2560, 768)],
        ],
    ),
    "Qwen3 Omni, wrapped twice": (QWEN3_OMNI, 4, [("column", 1280, 2048), ("row", 2048, 1024)]),
    "OPT 66B": (OPT_66B, 8, [("column", 3456, 9216), ("row", 9216, 1152), ("column", 4608, 9216), ("row", 9216, 4608)]),
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
    architecture = architecture_of(config, ranks)
    assert [("row" if layer.row else "column", layer.n, layer.k) for layer in architecture.layers] == layers
    assert architecture.dtype == "bf16"
    assert any("routed experts" in note for note in architecture.notes) == ("expert" in json.dumps(config))


FORMS: dict[str, tuple[Config, bool, int]] = {
    "at the top": ({"quantization_config": {"quant_method": "fp8"}}, False, 1),
    "beside the text model": ({"quantization_config": {"quant_method": "fp8"}}, True, 1),
    "inside the text model": ({"text_config": LLAMA_70B | {"quantization_config": {"quant_method": "fp8"}}}, False, 1),
    "null": ({"quantization_config": None}, False, 0),
    "null beside the text model": ({"quantization_config": None}, True, 0),
    "null inside the text model": ({"text_config": LLAMA_70B | {"quantization_config": None}}, False, 0),
    "empty": ({"quantization_config": {}}, False, 0),
    "absent": ({}, True, 0),
}


@pytest.mark.parametrize(("more", "wrapped", "rows"), FORMS.values(), ids=FORMS.keys())
def test_quantized_weights_are_found_wherever_the_config_says_so(more: Config, wrapped: bool, rows: int) -> None:
    config = {"model_type": "kimi_k25", "text_config": LLAMA_70B} | more if wrapped else LLAMA_70B | more
    architecture = architecture_of(config, 8)
    assert architecture.quantize == "row" * rows and not any("quantized" in note for note in architecture.notes)


OUTPUTS: dict[str, tuple[Config, bool, int | None, str]] = {
    "a server": ({"vocab_size": 128256}, False, None, "--train plans it"),
    "training": ({"vocab_size": 128256}, True, 16032, ""),
    "words that the ranks do not divide": ({"vocab_size": 50257}, True, None, "8 ranks do not divide vocab_size 50257"),
    "no vocabulary": ({}, True, None, "the config has no vocab_size"),
}


@pytest.mark.parametrize(("more", "train", "n", "reason"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_the_output_layer_is_planned_or_the_plan_says_why_not(more: Config, train: bool, n: int | None, reason: str) -> None:
    plan = architecture_of(LLAMA_70B | more, 8, train=train)
    [*said] = [note for note in plan.notes if "output layer (lm_head) is left out" in note]
    assert len(said) == (n is None) and all(reason in note for note in said)
    assert [layer for layer in plan.layers if layer.name == "output layer"] == ([Linear("output layer", n, 8192)] if n else [])


def test_sizes_that_a_text_model_leaves_out_are_named() -> None:
    [said] = [note for note in architecture_of(GEMMA_3_4B, 4).notes if "by default" in note]
    assert said.endswith("num_attention_heads 8, head_dim 256, num_key_value_heads 4")
    assert not any("by default" in note for note in architecture_of(LLAMA_70B, 8).notes)


DECODERS = """
    AXK1 AfmoeForCausalLM=afmoe AliceAI=alice_ai Apertus=apertus BailingMoe=bailing_moe BailingMoeV2=bailing_moe_v2
    BailingMoeV2_5=bailing_hybrid BailingMoeV3=bailing_moe_v3 Beam=beam Bloom=bloom ChatGLM=chatglm Cohere=cohere Cohere2=cohere2
    Cohere2Moe=cohere2_moe Dbrx=dbrx DeciLM=deci Deepseek=deepseek DeepseekV2=deepseek_v2 DeepseekV3=deepseek_v3
    DeepseekV32=deepseek_v32 DeepseekV4=deepseek_v4 DomynEdge=domyn_edge Dory=dory Ernie4_5=ernie4_5 Ernie4_5_Moe=ernie4_5_moe
    Exaone=exaone Exaone4=exaone4 ExaoneMoe=exaone_moe Falcon=falcon FalconMamba=falcon_mamba FalconH1=falcon_h1 Flint=flint
    Gemma=gemma Gemma2=gemma2 Gemma3=gemma3_text Rnj1=rnj1 Gemma3n=gemma3n_text Gemma4=gemma4_text Qwen3Next=qwen3_next
    Qwen4Exp=qwen4_exp Glm4=glm4 Glm4Moe=glm4_moe Glm4MoeLite=glm4_moe_lite GlmMoeDsa=glm_moe_dsa Glm5Next=glm5next GptOss=gpt_oss
    GPT2=gpt2 GPTJ=gptj Granite=granite GraniteMoe=granitemoe GraniteMoeHybrid=granitemoehybrid GraniteMoeShared=granitemoeshared
    HrmText=hrm_text HYV3=hy_v3 HYV4=hy_v4 HyperCLOVAX=hyperclovax InternLM2=internlm2 InternLM3=internlm3 IQuestCoder=llama
    IQuestLoopCoder=iquestloopcoder Jamba=jamba K2Horizon=k2_horizon KimiLinear=kimi_linear Lfm2=lfm2 Lfm2Moe=lfm2_moe
    Laguna=laguna Llama=llama Llama4=llama4_text LongcatFlash=longcat_flash Mamba=mamba Mamba2=mamba2 MiniCPM=minicpm
    MiniCPM3=minicpm3 MiniMaxM2=minimax_m2 MiniMaxM3=minimax_m3 Inkling=inkling_model Ministral3=ministral3 Mistral=mistral
    Mixtral=mixtral MiMo=mimo MiMoV2Flash=mimo_v2_flash MiMoV2=mimo_v2 Nemotron=nemotron NemotronH=nemotron_h
    NemotronHPuzzle=nemotron_h_puzzle MuseGlimmer=muse_glimmer OlmoHybrid=olmo_hybrid Olmoe=olmoe OPT=opt Orion=orion
    PanguEmbedded=PanguEmbedded PanguProMoEV2=PanguProMoE PanguUltraMoE=pangu_ultra_moe Param2MoE=param2moe Phi3=phi3
    PhiMoE=phimoe Plamo3=plamo3 Qwen2=qwen2 Qwen2Moe=qwen2_moe Qwen3=qwen3
    Qwen3Moe=qwen3_moe Qwen3_5=qwen3_5_text Qwen3_5Moe=qwen3_5_moe_text
    SarvamMoE=sarvam_moe SarvamMLA=sarvam_mla Step1=step1 Step3Text=step3_text Step3p5=step3p5 Step5=step5 StableLm=stablelm
    Solar=solar TeleChat2=telechat TeleFLM=TeleFLM Zamba2=zamba2 Arcee=arcee Cwm=cwm FlexOlmo=flex_olmo Glm=glm
    GPTBigCode=gpt_bigcode GPTNeoX=gpt_neox HunYuanDenseV1=hunyuan_v1_dense HunYuanMoEV1=hunyuan_v1_moe Jais2=jais2
    Kolibri1=kolibri1 Mellum=mellum Nanbeige=nanbeige Olmo=olmo Olmo2=olmo2 Olmo3=olmo3 Phi=phi SeedOss=seed_oss SmolLM3=smollm3
    Starcoder2=starcoder2 VaultGemma=vaultgemma
"""
"""The decoders of the registry of vLLM 0.33, each with its model_type: those of its own, then those that transformers runs."""
WITHOUT_A_LIST = {
    *("PanguEmbedded", "PanguProMoE", "TeleFLM", "bailing_moe_v3", "beam", "dory", "flint", "glm5next", "hrm", "hunyuan_v1_moe"),
    *("hy_v4", "inkling_model", "iquestloopcoder", "k2_horizon", "kolibri1", "mellum", "muse_glimmer", "nanbeige"),
    *("pangu_ultra_moe", "qwen4_exp", "step1", "step5", "telechat"),
}
"""Families whose layers are listed nowhere here."""
ANY = grouped(
    "", 4096, 32, 8, intermediate_size=8192, intermediate_size_mlp=8192, moe_intermediate_size=512, num_experts=8, head_dim=128
)


@pytest.mark.parametrize("kind", dict.fromkeys(name.partition("=")[2] or name for name in DECODERS.split()))
def test_every_decoder_is_planned_or_refused_with_the_reason_and_another_way(kind: str) -> None:
    known = kind.removesuffix("_text")
    config = ANY | {"model_type": kind}
    if known in FAMILIES:
        layers = architecture_of(config, 4).layers
        assert layers[:2] == (Linear("QKV", 1536, 4096), Linear("attention output", 4096, 1024, row=True))
        return
    with pytest.raises(UsageError, match="list the products of its layers in a file, and give that as --shapes") as refused:
        architecture_of(config, 4)
    assert repr(kind) in str(refused.value)
    assert REFUSED.get(known, "allowed are") in str(refused.value)
    assert (known in REFUSED) != (known in WITHOUT_A_LIST)


def test_a_layer_asks_for_what_its_numbers_of_tokens_allow() -> None:
    problems = architecture_of(LLAMA_70B, 8).problems([4, 64], kv_len=4096)
    assert list(problems)[:3] == [
        AllGatherGemm(64, 1280, 8192, "bf16", "m", 8),  # 8 ranks do not divide 4 tokens
        GemmReduceScatter(4, 8192, 1024, "bf16", "replicated", 8),
        GemmReduceScatter(64, 8192, 1024, "bf16", "replicated", 8),
    ]
    assert problems[GemmReduceScatter(64, 8192, 3584, "bf16", "scattered", 8)] == "down of the MLP"
    assert {problem for problem in problems if not isinstance(problem, AllGatherGemm | GemmReduceScatter)} == {
        problem
        for batch in (4, 64)
        for problem in (
            FlashDecode(batch, 64, 8, 128, 4096, "bf16", 8),
            HeadGather(batch, 64, 128, "bf16", 8),
            DecodeMerge(batch, 64, 128, "bf16", 8, "head_scatter"),
        )
    }


def test_a_latent_cache_is_merged_but_not_attended_to() -> None:
    problems = architecture_of(DEEPSEEK_V3, 8).problems([16, 8192], kv_len=4096)
    decode = [problem for problem in problems if not isinstance(problem, AllGatherGemm | GemmReduceScatter)]
    assert decode == [HeadGather(16, 128, 576, "bf16", 8), DecodeMerge(16, 128, 512, "bf16", 8, "head_scatter")]


RMS = {"rms_norm_eps": 1e-5}
STATIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
DYNAMIC = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}


def norms_of(config: Config, tokens: list[int], **more: Any) -> dict[AllReduceNorm, str]:
    problems = architecture_of(config, 2).problems(tokens, **more)
    return {problem: layers for problem, layers in problems.items() if isinstance(problem, AllReduceNorm)}


def test_residual_and_norm_behind_a_sum_are_a_problem() -> None:
    norms = norms_of(LLAMA_70B | RMS, [4, 8192, 16384])  # the operator takes 8192 rows at most
    alone = [AllReduceNorm(m, 8192, "bf16", 2, "added") for m in (4, 8192)]
    behind = [AllReduceNorm(4, 8192, "bf16", 2, "added", k=k) for k in (4096, 14336)]
    assert set(norms) == {*alone, *behind}
    norms = {problem: layers for problem, layers in norms.items() if not problem.k}
    assert set(norms.values()) == {"norm behind attention output, norm behind down of the MLP"}
    assert not norms_of(LLAMA_70B | RMS, [4], train=True)
    fields = {(problem.quant, problem.k, problem.quantize) for problem in norms_of(LLAMA_70B | RMS | STATIC, [4])}
    behind = {(quant, k, "static") for quant in ("none", "tensor") for k in (4096, 14336)}
    assert fields == behind | {("none", 0, "none"), ("tensor", 0, "none")}
    by_row = norms_of(LLAMA_70B | RMS | DYNAMIC, [4])
    assert {problem.quant for problem in by_row} == {problem.quantize for problem in by_row} == {"none", "row"}


def test_other_orders_of_sum_residual_and_norm_are_left_out() -> None:
    assert {norm.offset for norm in norms_of(GEMMA_7B | RMS, [4])} == {1}
    others = (LLAMA_70B, FALCON_40B | RMS, *({**LLAMA_70B, **RMS, "model_type": kind} for kind in NORMS["apart"]))
    assert not any(norms_of(config, [4]) for config in others)
    assert set(NORMS["apart"]) | set(NORMS["offset"]) <= FAMILIES.keys()


@pytest.mark.parametrize(("engine", "asked"), [("vllm", 3), ("sglang", 3), ("torch", 0)])
def test_plugins_of_engines_ask_for_norms(engine: str, asked: int) -> None:
    problems = asked_by(engine, architecture_of(LLAMA_70B | RMS, 2).problems([4]))
    assert sum(isinstance(problem, AllReduceNorm) for problem in problems) == asked


def test_the_backward_takes_the_weights_the_other_way() -> None:
    whole, forward = (architecture_of(MIXTRAL_8X7B, 4).problems([64], train=train) for train in (True, False))
    assert {problem: layer for problem, layer in whole.items() if problem not in forward} == {
        GemmReduceScatter(64, 4096, 1536, "bf16", "scattered", 4, "kn"): "QKV, backward",
        AllGatherGemm(64, 1024, 4096, "bf16", "m", 4, "kn"): "attention output, backward",
    }


def test_products_that_are_apart_are_as_wide_as_the_widest() -> None:
    architecture = architecture_of(LLAMA_70B, 8, split=True)
    assert architecture.layers[0] == Linear("Q, K, V", 1024, 8192)
    assert architecture.layers[2] == Linear("gate, up of the MLP", 3584, 8192)


def test_layers_of_the_same_shape_are_one_problem() -> None:
    problems = architecture_of(grouped("llama", 4096, 32, 32, intermediate_size=4096), 2).problems([1], dtype="fp16")
    assert problems == {GemmReduceScatter(1, 4096, 2048, "fp16", "replicated", 2): "attention output, down of the MLP"}


def test_a_model_that_sees_has_its_text_inside(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    seeing = {"model_type": "mistral3", "dtype": "float16", "text_config": MISTRAL_NEMO | {"torch_dtype": None}}
    path.write_text(json.dumps(seeing))
    model = read_architecture(path, 4)
    assert (model.family, model.dtype, model.layers) == ("mistral", "fp16", architecture_of(MISTRAL_NEMO, 4).layers)


WRONG: dict[str, tuple[Config, str]] = {
    "an unknown family": ({"model_type": "lama"}, f"model_type 'lama'; allowed are {', '.join(FAMILIES)}: did you mean llama?"),
    "a family of states": ({"model_type": "mamba2"}, "which has no plan: some of its layers hold a recurrent state"),
    "a text model of states": ({"model_type": "x", "text_config": {"model_type": "qwen3_5_text"}}, "model_type 'qwen3_5_text'"),
    "heads that do not divide": (LLAMA_70B | {"head_dim": None, "num_attention_heads": 48}, "num_attention_heads 48, which must"),
    "a head of no elements": (LLAMA_70B | {"head_dim": 0}, "head_dim 0; it must be a whole number"),
    "experts that are a list": (LLAMA_70B | {"num_experts": [64, 64]}, "num_experts [64, 64]"),
    "a text model that is empty": ({"model_type": "llava", "text_config": {}}, "model_type 'llava'"),
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
