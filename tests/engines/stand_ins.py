"""Stand-ins of vLLM 0.33 and SGLang 0.5.23: the names, signatures and behaviour that the plugins rely on, in plain torch.

The frameworks need GPUs and torches of their own. `test_contracts` holds the signatures against their wheels.
"""

# ruff: noqa: ARG001 - stand-ins take what the real ones take

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotax.operators import scaled


@contextmanager
def modules(**named: Any) -> Iterator[None]:
    """Makes modules importable; `a__b=names` is the module a.b."""
    made: dict[str, ModuleType] = {}
    for path, names in named.items():
        parts = path.split("__")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            module = made.setdefault(name, ModuleType(name))
            module.__path__ = []  # type: ignore[attr-defined]
            if length > 1:
                setattr(made[".".join(parts[: length - 1])], parts[length - 1], module)
        vars(made[".".join(parts)]).update(names)
    # mock.patch.dict would also remove modules that other code imports before the test ends.
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


class GroupCoordinator:
    """Both frameworks' view of a group of ranks."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()
        self.device = torch.get_default_device()
        self.sums = 0
        """Collectives that the framework did by itself."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        self.sums += 1
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        return total


def plain_merge(o: Tensor, lse: Tensor, group: GroupCoordinator, base: float) -> tuple[Tensor, Tensor]:
    """All heads, merged, as both frameworks merge them."""
    group.sums += 1
    os_and_lses: list[list[Tensor]] = []
    for mine in (o, lse):
        every = [torch.empty_like(mine) for _ in range(group.world_size)]
        dist.all_gather(every, mine.contiguous(), group=group.device_group)
        os_and_lses.append(every)
    outputs, lses = (torch.stack(tensors) for tensors in os_and_lses)
    scaled = lses * math.log(base)
    return (torch.softmax(scaled, 0)[..., None] * outputs).sum(0), torch.logsumexp(scaled, 0) / math.log(base)


def own_heads(whole: Tensor, group: GroupCoordinator) -> Tensor:
    share = whole.shape[1] // group.world_size
    return whole[:, group.rank_in_group * share : (group.rank_in_group + 1) * share].contiguous()


class UnquantizedLinearMethod:
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Quantized(UnquantizedLinearMethod):
    """A linear method that is not a plain product."""

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...


class Quantising:
    """Both frameworks' FP8 weights: created as checkpoints have them, stored as products take them, multiplied by torch.

    `products` counts those that the framework computed itself. `scale_ub`: the upper bound of scales of rows, as FBGEMM's
    checkpoints state it.
    """

    scale_ub: float | None = None

    def __init__(self, quantize: str, of_weight: str) -> None:
        self.quantize, self.of_weight = quantize, of_weight

    def create(self, layer: nn.Module, n: int, k: int, rank: int) -> None:
        seed = torch.Generator(torch.get_default_device()).manual_seed(10 + rank)
        codes = torch.randn(n, k, generator=seed).to(torch.float8_e4m3fn)
        layer.weight, self.products = nn.Parameter(codes, False), 0
        shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), k // 128)}[self.of_weight]
        name = "weight_scale_inv" if self.of_weight == "block" else "weight_scale"
        setattr(layer, name, nn.Parameter((torch.rand(shape, generator=seed) + 0.5) / 64, False))
        layer.input_scale = nn.Parameter(torch.full((1,), 1 / 64), False) if self.quantize == "static" else None
        if self.scale_ub is not None:
            layer.input_scale_ub = nn.Parameter(torch.tensor(self.scale_ub), False)

    def store(self, layer: nn.Module) -> None:
        """Only weights with scales of blocks stay as they were."""
        if self.of_weight != "block":
            layer.weight = nn.Parameter(layer.weight.t(), False)
        if self.quantize == "static":
            layer.input_scale = nn.Parameter(layer.input_scale.max(), False)

    def multiply(self, layer: Any, x: Tensor) -> Tensor:
        self.products += 1
        most = scaled.greatest_magnitude(self.scale_ub, self.quantize)
        scales = layer.input_scale.view(1) if self.quantize == "static" else scaled.scales_of(x, self.quantize, most)
        a = scaled.dequantised(scaled.quantised(x, scales, self.quantize), scales, scaled.SCALES_OF[self.quantize], weight=False)
        return (a @ numbers_of(layer).t()).to(x.dtype)


def numbers_of(layer: Any) -> Tensor:
    """The float32 weight [n, k] of an FP8 layer, as it is stored."""
    if hasattr(layer, "weight_scale_inv"):
        return scaled.dequantised(layer.weight, layer.weight_scale_inv, "block", weight=True)
    return layer.weight.t().float() * layer.weight_scale.view(-1, 1)


# vLLM.

op_registry_oot: dict[str, type] = {}


class PluggableLayer(nn.Module):
    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
        def decorator(layer_cls: Any) -> Any:
            reg_name = name if name is not None else cls.__name__
            assert reg_name not in op_registry_oot, f"Duplicate layer name: {reg_name}"
            op_registry_oot[reg_name] = layer_cls
            return layer_cls

        return decorator if _decorated_layer_cls is None else decorator(_decorated_layer_cls)


class RowParallelLinear(PluggableLayer):
    """Stands in for vLLM's RowParallelLinear, which sums over the ranks by default."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: Any = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = (0, 1) if disable_tp else (dist.get_rank(), dist.get_world_size())
        self.output_size, self.input_size_per_partition = output_size, input_size // self.tp_size
        self.input_is_parallel, self.skip_bias_add, self.reduce_results = input_is_parallel, skip_bias_add, reduce_results
        self.return_bias, self.prefix = return_bias, prefix
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_method = quant_config or UnquantizedLinearMethod()
        seed = torch.Generator(torch.get_default_device()).manual_seed(10 + self.tp_rank)
        if hasattr(self.quant_method, "create_weights"):
            self.quant_method.create_weights(self, output_size, self.input_size_per_partition)
        else:
            drawn = torch.randn(output_size, self.input_size_per_partition, generator=seed)
            self.weight = nn.Parameter(drawn.to(self.params_dtype), False)
        self.bias = nn.Parameter(torch.ones(output_size), False) if bias else None

    def forward(self, input_: Tensor) -> Any:
        bias_ = None if (self.tp_rank > 0 or self.skip_bias_add) else self.bias
        output = self.quant_method.apply(self, input_, bias_)
        if self.reduce_results and self.tp_size > 1:
            output = the_group().all_reduce(output)
        return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output


class Fp8LinearMethod:
    """vLLM's method, which holds its kernel in `fp8_linear`."""

    def __init__(self, quantize: str, of_weight: str, ue8m0: bool = False) -> None:
        self.kernel = Quantising(quantize, of_weight)
        inputs = {"static": (-1, -1), "row": (1, -1), "block": (1, 128)}[quantize]
        weights = {"tensor": (-1, -1), "channel": (-1, 1), "block": (128, 128)}[of_weight]
        keys = [SimpleNamespace(scale=SimpleNamespace(static=static, group_shape=group))
                for static, group in ((quantize == "static", inputs), (True, weights))]  # fmt: skip
        config = SimpleNamespace(activation_quant_key=keys[0], weight_quant_key=keys[1], out_dtype=torch.bfloat16)
        self.fp8_linear = SimpleNamespace(config=config, quant_fp8=SimpleNamespace(use_ue8m0=ue8m0))

    def create_weights(self, layer: nn.Module, n: int, k: int) -> None:
        self.kernel.create(layer, n, k, layer.tp_rank)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.kernel.store(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.multiply(layer, x)


class QuantFP8:
    def forward_native(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None, use_triton: bool = False
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class VllmConfig:
    """vLLM's configuration, whose hash is a part of the key of compiled graphs."""

    def compute_hash(self, include_version: bool = True) -> str:
        return "0123456789"


def dcp_a2a_lse_reduce(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: GroupCoordinator, ctx: Any = None, return_lse: bool = False,
    is_lse_base_on_e: bool = True, seq_lens: Tensor | None = None, query_start_loc: Tensor | None = None,
) -> Any:  # fmt: skip
    assert seq_lens is query_start_loc is None
    whole, sums = plain_merge(cp_attn_out, cp_attn_lse, cp_group, math.e if is_lse_base_on_e else 2.0)
    return (own_heads(whole, cp_group), own_heads(sums, cp_group)) if return_lse else own_heads(whole, cp_group)


def cp_lse_ag_out_rs(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: GroupCoordinator, ctx: Any = None, return_lse: bool = False,
    is_lse_base_on_e: bool = True, seq_lens: Tensor | None = None, query_start_loc: Tensor | None = None,
) -> Any:  # fmt: skip
    return dcp_a2a_lse_reduce(cp_attn_out, cp_attn_lse, cp_group, ctx, return_lse, is_lse_base_on_e)


def cp_lse_ag_out_ar(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: GroupCoordinator, ctx: Any = None, return_lse: bool = False,
    is_lse_base_on_e: bool = True, seq_lens: Tensor | None = None, query_start_loc: Tensor | None = None,
) -> Any:  # fmt: skip
    pair = plain_merge(cp_attn_out, cp_attn_lse, cp_group, math.e if is_lse_base_on_e else 2.0)
    return pair if return_lse else pair[0]


class RMSNorm(nn.Module):
    """Both frameworks' norm; with `offset=1` it stands in for GemmaRMSNorm."""

    def __init__(self, weight: Tensor, offset: int = 0) -> None:
        super().__init__()
        self.weight, self.offset, self.variance_epsilon = nn.Parameter(weight, False), offset, 1e-5

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        weight = self.weight + self.offset
        return nn.functional.rms_norm(total, weight.shape, weight, self.variance_epsilon), total


def fused_allreduce_rms_norm(hidden_states: Tensor, residual: Tensor, norm: RMSNorm) -> Any:
    return norm(the_group().all_reduce(hidden_states), residual)


def fused_allreduce_gemma_rms_norm(hidden_states: Tensor, residual: Tensor, norm: RMSNorm) -> Any:
    return norm(the_group().all_reduce(hidden_states), residual)


def call_trtllm_fused_allreduce_norm(
    allreduce_in: Tensor, residual: Tensor, rms_gamma: Tensor, rms_eps: float, world_size: int, launch_with_pdl: bool,
    fp32_acc: bool, max_token_num: int, pattern_code: int, norm_out: Tensor | None = None, quant_out: Tensor | None = None,
    scale_out: Tensor | None = None, scale_factor: Tensor | None = None, weight_bias: float = 0.0,
) -> None:  # fmt: skip
    total = the_group().all_reduce(allreduce_in) + residual
    normed = nn.functional.rms_norm(total, rms_gamma.shape, rms_gamma + weight_bias, rms_eps)
    (residual if norm_out is None else allreduce_in).copy_(total)
    if quant_out is None or norm_out is not None:
        (allreduce_in if norm_out is None else norm_out).copy_(normed)
    if quant_out is not None and scale_factor is not None:
        quant_out.copy_((normed / scale_factor).clamp(-448, 448).to(quant_out.dtype))


_fused: list[torch.library.Library] = []


def define_fused_norm() -> None:
    """The operator that vLLM's compiler puts into graphs."""
    if not _fused:
        _fused.append(torch.library.Library("vllm", "FRAGMENT"))
        _fused[0].define(
            "flashinfer_trtllm_fused_allreduce_norm(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, "
            "float rms_eps, int world_size, bool launch_with_pdl, bool fp32_acc, int max_token_num, int pattern_code, "
            "Tensor(c!)? norm_out=None, Tensor(d!)? quant_out=None, "
            "Tensor(e!)? scale_out=None, Tensor? scale_factor=None, float weight_bias=0.0) -> ()"
        )
        _fused[0].impl("flashinfer_trtllm_fused_allreduce_norm", call_trtllm_fused_allreduce_norm, "CPU")


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x + x_residual
    return nn.functional.rms_norm(total, (total.shape[-1],), weight, epsilon), total


def define_norm() -> None:
    """The operator that vLLM makes of its norm."""
    if not hasattr(torch.ops.vllm_ir, "fused_add_rms_norm"):
        library = torch.library.Library("vllm_ir", "FRAGMENT")
        library.define("fused_add_rms_norm" + torch.library.infer_schema(fused_add_rms_norm, mutates_args=()))
        library.impl("fused_add_rms_norm", fused_add_rms_norm, "CompositeExplicitAutograd")
        _fused.append(library)


def rms_norm_dynamic_per_token_quant(
    result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float, scale_ub: Tensor | None,
    residual: Tensor | None,
) -> None:  # fmt: skip
    assert scale_ub is None and residual is not None
    y, total = fused_add_rms_norm(input, residual, weight, epsilon)
    residual.copy_(total)
    scale.copy_(scaled.scales_of(y, "row"))
    result.copy_(scaled.quantised(y, scale, "row"))


def fused_add_rms_norm_static_fp8_quant(
    result: Tensor, input: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> None:
    y, total = fused_add_rms_norm(input, residual, weight, epsilon)
    residual.copy_(total)
    result.copy_(scaled.quantised(y, scale, "static"))


def define_quantising_norms() -> None:
    """Operators of vLLM's extension, which its passes put into graphs."""
    if hasattr(torch.ops._C, rms_norm_dynamic_per_token_quant.__name__):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    for function, written in (
        (rms_norm_dynamic_per_token_quant, {"result", "scale", "residual"}),
        (fused_add_rms_norm_static_fp8_quant, {"result", "residual"}),
    ):
        name = function.__name__
        library.define(name + torch.library.infer_schema(function, mutates_args=written))
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, lambda *_: None, "Meta")
    _fused.append(library)


class CallableInductorPass:
    def __init__(self, callable: Any, uuid: Any = None) -> None:
        self.callable, self._uuid = callable, uuid

    def __call__(self, graph: torch.fx.Graph) -> Any:
        return self.callable(graph)

    def uuid(self) -> Any:
        return self._uuid


class PostGradPassManager:
    """The passes that vLLM gives to torch's compiler."""

    def __init__(self) -> None:
        self.passes: list[CallableInductorPass] = []

    def configure(self, config: VllmConfig) -> None:
        assert isinstance(config, VllmConfig)

    def add(self, pass_: CallableInductorPass) -> None:
        assert isinstance(pass_, CallableInductorPass)
        self.passes.append(pass_)


_groups: list[GroupCoordinator] = []


def the_group() -> GroupCoordinator:
    if not _groups:
        _groups.append(GroupCoordinator())
    return _groups[0]


def get_tp_group() -> GroupCoordinator:
    return the_group()


@contextmanager
def vllm() -> Iterator[None]:
    """A process in which vLLM seems to be installed."""
    op_registry_oot.clear()
    _groups.clear()
    merges = (dcp_a2a_lse_reduce, cp_lse_ag_out_rs, cp_lse_ag_out_ar)
    define_fused_norm()
    define_norm()
    define_quantising_norms()
    with modules(
        vllm__model_executor__layers__linear={
            "RowParallelLinear": RowParallelLinear, "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        vllm__model_executor__layers__quantization__fp8={"Fp8LinearMethod": Fp8LinearMethod},
        vllm__model_executor__layers__quantization__input_quant_fp8={"QuantFP8": QuantFP8},
        vllm__model_executor__custom_op={"PluggableLayer": PluggableLayer, "op_registry_oot": op_registry_oot},
        vllm__config__vllm={"VllmConfig": VllmConfig},
        vllm__distributed__parallel_state={"get_tp_group": get_tp_group, "GroupCoordinator": GroupCoordinator},
        vllm__v1__attention__ops__dcp={merge.__name__: merge for merge in merges},
        vllm__models__common__ops__fused_allreduce_rms_norm={"fused_allreduce_rms_norm": fused_allreduce_rms_norm},
        vllm__models__some_model={"fused_allreduce_rms_norm": fused_allreduce_rms_norm},
        vllm__model_executor__layers__fused_allreduce_gemma_rms_norm={
            "fused_allreduce_gemma_rms_norm": fused_allreduce_gemma_rms_norm,
        },
        vllm__compilation__passes__fusion__allreduce_rms_fusion={
            "call_trtllm_fused_allreduce_norm": call_trtllm_fused_allreduce_norm,
        },
        vllm__compilation__passes__pass_manager={"PostGradPassManager": PostGradPassManager},
        vllm__compilation__passes__inductor_pass={"CallableInductorPass": CallableInductorPass},
        vllm__ir__ops__layernorm={"fused_add_rms_norm": fused_add_rms_norm},
        vllm__v1__attention__backends__flash_attn={"dcp_a2a_lse_reduce": dcp_a2a_lse_reduce},
    ):  # fmt: skip
        own, configure = VllmConfig.compute_hash, PostGradPassManager.configure
        try:
            yield
        finally:
            VllmConfig.compute_hash = own  # type: ignore[method-assign]
            PostGradPassManager.configure = configure  # type: ignore[method-assign]


# SGLang.


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AROUND, *, source: Any = None) -> None:
        assert (hook_type, source) == (HookType.AROUND, None)
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls, owners: dict[str, Any]) -> None:
        """Wraps what is hooked, as SGLang does; `owners` are the objects that hold the targets."""
        for target, hook in cls.hooks.items():
            owner, name = owners[target], target.rpartition(".")[2]
            original = getattr(owner, name)

            def wrapped(*args: Any, _hook: Any = hook, _original: Any = original, **kwargs: Any) -> Any:
                return _hook(_original, *args, **kwargs)

            setattr(owner, name, functools.wraps(original)(wrapped))


flags = SimpleNamespace(sp_active=False, tokens=0, skip=False, quantized=False)


def should_skip_mlp_all_reduce() -> bool:
    return flags.skip


def get_parallel() -> Any:
    return SimpleNamespace(tp_group=the_group())


def get_forward() -> Any:
    return flags


def get_exec() -> Any:
    return SimpleNamespace(comm=SimpleNamespace(enable_quant_communications=flags.quantized))


def sp_fused_matmul_eligible(linear: Any) -> bool:
    return linear.bias is None and linear.weight.is_floating_point() and linear.weight.itemsize > 1


def sp_num_tokens() -> int:
    return flags.tokens


def column_parallel_g_matmul(linear: Any, input_parallel: Tensor, bias: Any) -> Tensor:
    assert bias is None
    if not sp_fused_matmul_eligible(linear):
        return linear.quant_method.apply(linear, gathered(input_parallel), bias)[: sp_num_tokens()]
    name = get_parallel().tp_group.device_group.group_name
    _, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
        input_parallel.contiguous(), [linear.weight.t()], gather_dim=0, group_name=name
    )
    return outputs[0][: sp_num_tokens()]


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(the_group().world_size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def row_parallel_gbar_matmul(linear: Any, input_: Tensor, bias: Any) -> Tensor:
    group = the_group()
    x = nn.functional.pad(input_, (0, 0, 0, -len(input_) % group.world_size))
    return group.all_reduce(linear.quant_method.apply(linear, x, bias)).chunk(group.world_size)[group.rank_in_group]


def sglang_a2a_lse_reduce(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: GroupCoordinator, is_lse_base_on_e: bool = True,
    cuda_graph_buffers: Any = None, comm_backend: str = "a2a",
) -> Tensor:  # fmt: skip
    return own_heads(plain_merge(cp_attn_out, cp_attn_lse, cp_group, math.e if is_lse_base_on_e else 2.0)[0], cp_group)


def cp_lse_ag_out_rs_mha(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: GroupCoordinator, return_lse: bool = False
) -> Any:
    whole, sums = plain_merge(cp_attn_out, cp_attn_lse, cp_group, math.e)
    return (own_heads(whole, cp_group), own_heads(sums, cp_group)) if return_lse else own_heads(whole, cp_group)


def cp_lse_ag_out_rs_mla(
    cp_attn_out: Tensor, cp_attn_lse: Tensor, cp_group: GroupCoordinator, ctx: Any = None, is_lse_base_on_e: bool = False
) -> Tensor:
    whole, _ = plain_merge(cp_attn_out, cp_attn_lse, cp_group, math.e if is_lse_base_on_e else 2.0)
    return own_heads(whole, cp_group).transpose(0, 1).contiguous()


class SglangRowParallelLinear(nn.Module):
    """Stands in for SGLang's RowParallelLinear with plain tensor parallelism."""

    def __init__(self, input_size: int, output_size: int, reduce_results: bool = True, quant_method: Any = None) -> None:
        super().__init__()
        self.tp_group, self.parallel_group, self.use_dp_attention_reduce = the_group(), None, False
        self.input_is_parallel, self.reduce_results, self.skip_bias_add = True, reduce_results, False
        self.use_decode_attn_tp, self.quant_method = False, quant_method or UnquantizedLinearMethod()
        self.input_size_per_partition, self.output_size = input_size // self.tp_group.world_size, output_size
        self.params_dtype, self.bias = torch.bfloat16 if quant_method else torch.float32, None
        if quant_method:
            quant_method.create_weights(self, output_size, self.input_size_per_partition)
            return
        seed = torch.Generator().manual_seed(10 + dist.get_rank())
        self.weight = nn.Parameter(torch.randn(output_size, self.input_size_per_partition, generator=seed), False)

    def forward(
        self, input_: Tensor, skip_all_reduce: bool = False, forward_batch: Any = None, output_tensor: Any = None
    ) -> Any:
        output = self.quant_method.apply(self, input_, bias=self.bias)
        if self.reduce_results and not skip_all_reduce and not should_skip_mlp_all_reduce():
            output = get_parallel().tp_group.all_reduce(output)
        return output, None


class SglangFp8LinearMethod:
    """SGLang's method, which repeats the scale of a weight for each of its rows where it has CUTLASS."""

    def __init__(self, quantize: str, of_weight: str, scale_fmt: str | None = None) -> None:
        self.kernel, self.use_marlin, self.use_mxfp8 = Quantising(quantize, of_weight), False, False
        self.weight_block_size = [128, 128] if of_weight == "block" else None
        self.quant_config = SimpleNamespace(scale_fmt=scale_fmt)

    def create_weights(self, layer: nn.Module, n: int, k: int) -> None:
        self.kernel.create(layer, n, k, dist.get_rank())

    def process_weights_after_loading(self, layer: Any) -> None:
        self.kernel.store(layer)
        if self.kernel.of_weight == "tensor":
            layer.weight_scale = nn.Parameter(layer.weight_scale.expand(layer.output_size, 1).contiguous(), False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.multiply(layer, x)


SglangFp8LinearMethod.__name__ = SglangFp8LinearMethod.__qualname__ = "Fp8LinearMethod"


class W8A8Fp8LinearMethod(SglangFp8LinearMethod):
    def __init__(self) -> None:
        super().__init__("row", "channel")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply(layer, x, bias)


def _forward_with_allreduce_fusion(
    norm_module: RMSNorm, x: Tensor, residual: Tensor | None, post_residual_addition: Tensor | None, weight: Tensor,
    use_attn_tp_group: bool = True,
) -> Any:  # fmt: skip
    residual = residual if residual is None or post_residual_addition is None else residual + post_residual_addition
    return norm_module(get_parallel().tp_group.all_reduce(x), residual)


def all_reduce_residual_norm(
    input: Tensor, residual: Tensor, norm_weight: Tensor, norm_eps: float, *, world_size: int, gemma: bool = False,
    residual_out: Tensor | None = None, cluster_size: int | None = None, two_shot: bool | None = None,
    vecs_per_thread: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = get_parallel().tp_group.all_reduce(input) + residual
    residual_out = total if residual_out is None else residual_out.copy_(total)
    return nn.functional.rms_norm(total, norm_weight.shape, norm_weight + gemma, norm_eps), residual_out


@contextmanager
def sglang() -> Iterator[dict[str, Any]]:
    """A process in which SGLang seems to be installed; gives the objects that hold what is hooked."""
    _groups.clear()
    HookRegistry.hooks.clear()
    own = {"forward": SglangRowParallelLinear.forward}
    sp = {
        "column_parallel_g_matmul": column_parallel_g_matmul, "sp_fused_matmul_eligible": sp_fused_matmul_eligible,
        "sp_num_tokens": sp_num_tokens, "row_parallel_gbar_matmul": row_parallel_gbar_matmul,
    }  # fmt: skip
    dcp = {
        "dcp_a2a_lse_reduce": sglang_a2a_lse_reduce, "cp_lse_ag_out_rs_mha": cp_lse_ag_out_rs_mha,
        "cp_lse_ag_out_rs_mla": cp_lse_ag_out_rs_mla,
    }  # fmt: skip
    with modules(
        sglang__srt__layers__linear={"RowParallelLinear": SglangRowParallelLinear},
        sglang__srt__layers__layernorm_sp=sp,
        sglang__srt__layers__dcp__comm=dcp,
        sglang__srt__layers__layernorm={"_forward_with_allreduce_fusion": _forward_with_allreduce_fusion},
        sglang__kernels__ops__communication__all_reduce_fusion={"all_reduce_residual_norm": all_reduce_residual_norm},
        sglang__srt__layers__moe__utils={"should_skip_mlp_all_reduce": should_skip_mlp_all_reduce},
        sglang__srt__layers__quantization__fp8={"Fp8LinearMethod": SglangFp8LinearMethod},
        sglang__srt__layers__quantization__w8a8_fp8={"W8A8Fp8LinearMethod": W8A8Fp8LinearMethod},
        sglang__srt__layers__quantization__unquant={"UnquantizedLinearMethod": UnquantizedLinearMethod},
        sglang__srt__plugins__hook_registry={"HookRegistry": HookRegistry, "HookType": HookType},
        sglang__srt__runtime_context={"get_parallel": get_parallel, "get_forward": get_forward, "get_exec": get_exec},
    ):
        layers, fusion = "sglang.srt.layers", "sglang.kernels.ops.communication.all_reduce_fusion"
        try:
            yield {
                f"{layers}.layernorm_sp.column_parallel_g_matmul": sys.modules[f"{layers}.layernorm_sp"],
                f"{layers}.layernorm_sp.row_parallel_gbar_matmul": sys.modules[f"{layers}.layernorm_sp"],
                f"{layers}.linear.RowParallelLinear.forward": SglangRowParallelLinear,
                f"{layers}.layernorm._forward_with_allreduce_fusion": sys.modules[f"{layers}.layernorm"],
                f"{fusion}.all_reduce_residual_norm": sys.modules[fusion],
            } | {f"{layers}.dcp.comm.{name}": sys.modules[f"{layers}.dcp.comm"] for name in dcp}
        finally:
            SglangRowParallelLinear.forward = own["forward"]  # type: ignore[method-assign]
