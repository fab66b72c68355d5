"""Programs that users of torch write against any of its modules: each has its right value, or is refused in one line."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

from autotax.core.errors import UsageError
from autotax.heap.world import World
from autotax.nn import (
    AllGatherLinear,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    LinearAllReduce,
    LinearReduceScatter,
    Tuned,
)
from autotax.nn.scaled_linear import ScaledLinear, layout_of
from autotax.operators.problems import AllGatherGemm
from autotax.operators.scaled import dequantised, quantised, scales_of
from autotax.runner.ranks import Ranks
from tests.nn.checks import normal

F32, CODES = torch.float32, torch.float8_e4m3fn
N, K, M = 32, 256, 4
LAYERS = {"gather": AllGatherLinear, "scatter": LinearReduceScatter, "reduce": LinearAllReduce}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def refused(call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    said = str(error.value)
    assert "\n" not in said
    assert all(part in said for part in parts), said


def layer_of(kind: str, **more: Any) -> Any:
    return LAYERS[kind](nn.Parameter(normal(N, K, seed=1, dtype=F32)), None, M, **more)


def coded(kind: str = "reduce", quantize: str | None = "row", **more: Any) -> tuple[ScaledLinear, Tensor]:
    """A layer with a weight in e4m3, and an x."""
    weight = normal(N, K, seed=1, dtype=F32).to(CODES)
    made: Any = LAYERS[kind](weight, None, M, **{"scales": torch.full((1, N), 0.5), "quantize": quantize} | more)
    return made, normal(M, K, seed=2, dtype=torch.bfloat16)


# State and copies.


@each_layer
def test_a_backward_leaves_state_and_submodules_as_they_were(kind: str) -> None:
    layers = layer_of(kind), coded(kind, backward_weight=nn.Parameter(normal(N, K, seed=3, dtype=torch.bfloat16)))[0]
    for layer in layers:
        before = list(layer.state_dict())
        layer(normal(M, K, seed=2, dtype=layer.weight.dtype if layer is layers[0] else torch.bfloat16)).float().sum().backward()
        assert list(layer.state_dict()) == before
        assert [name for name, _ in layer.named_modules()] == [""]
        layer.close()


@each_layer
def test_a_parametrized_layer_can_be_copied_and_every_member_read(kind: str) -> None:
    layer, x = layer_of(kind), normal(M, K, seed=2, dtype=F32)
    right = layer(x).detach()
    inspect.getmembers(layer)
    parametrizations.weight_norm(layer)
    torch.testing.assert_close(copy.deepcopy(layer)(x).detach(), right)
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_modules_of_a_forked_process_are_the_parents() -> None:
    layer = layer_of("reduce")
    x = normal(M, K, seed=2, dtype=F32)
    right = layer(x)
    child = os.fork()
    if not child:
        try:
            layer(x)
        except UsageError as error:
            os._exit(0 if "a fork of" in str(error) else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(layer(x), right)


# Arguments of other types, and other tracers.

USED: dict[str, Callable[[], tuple[Any, list[Tensor]]]] = {
    **{kind: lambda kind=kind: (layer_of(kind), [normal(M, K, seed=2, dtype=F32)]) for kind in LAYERS},
    "norm": lambda: (AllReduceNorm(K, M, dtype=F32, device="cpu"), [torch.ones(M, K), torch.ones(K), torch.ones(M, K)]),
    "merge": lambda: (DecodeMerge(2, 16, M, dtype=F32, device="cpu"), [torch.ones(M, 2, 16), torch.ones(M, 2)]),
    "attention": lambda: (
        FlashDecode(1, 2, 16, M, 8, dtype=F32, device="cpu"),
        [torch.ones(M, 2, 16), torch.ones(M, 1, 8, 16), torch.ones(M, 1, 8, 16), torch.ones(M, dtype=torch.int32)],
    ),
    "prefill": lambda: (GatherAttention(1, 1, 16, 8, device="cpu"), [torch.ones(1, 8, 1, 16).bfloat16()] * 3),
    "e4m3": lambda: (lambda layer, x: (layer, [x]))(*coded()),
}


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("recording", [True, False], ids=["recording", "no_grad"])
def test_what_is_no_tensor_is_refused(name: str, recording: bool) -> None:
    module, tensors = USED[name]()
    with torch.set_grad_enabled(recording and name not in LAYERS):
        module(*tensors)
        for number, tensor in enumerate(tensors):
            for other in (None, [1.0], 2.0, tensor.view(torch.uint8).numpy()):
                refused(lambda: module(*tensors[:number], other, *tensors[number + 1 :]))  # noqa: B023
        module(*tensors)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("name", USED)
def test_tracers_that_do_not_see_kernels_are_refused(name: str) -> None:
    module, tensors = USED[name]()
    with torch.no_grad():
        for _ in range(2):
            refused(lambda: make_fx(lambda *given: module(*given))(*tensors), "a tracer records")
            module(*tensors)
        refused(lambda: torch.jit.trace(module, tuple(tensors), check_trace=False), "a tracer records")


def test_a_recorded_call_refuses_tensors_without_values() -> None:
    for kind in LAYERS:
        refused(lambda: layer_of(kind)(torch.zeros(M, K, device="meta")), "x is on the meta device")  # noqa: B023
    module, (q, k, _) = USED["prefill"]()
    refused(lambda: module(q.requires_grad_(), k, k.to("meta")), "v is on the meta device")
    with FakeTensorMode():
        refused(lambda: LinearAllReduce(torch.empty(N, K), None, M), "FakeTensorMode")


OPTIONS: dict[str, Callable[[], Any]] = {
    "sizes": lambda: layer_of("reduce", sizes=4),
    "bias": lambda: layer_of("reduce", bias=3),
    "norm": lambda: layer_of("reduce", norm=3),
    "like": lambda: layer_of("reduce", like=3),
    "weight": lambda: LinearAllReduce("x", None, M),  # type: ignore[arg-type]
    "group": lambda: LinearAllReduce(torch.ones(N, K), [0, 1], M),  # type: ignore[arg-type]
    "eps": lambda: AllReduceNorm(K, M, device="cpu", eps="1e-6"),  # type: ignore[arg-type]
    "batch_invariant": lambda: layer_of("reduce", like=layer_of("reduce"), batch_invariant=True),
    "sizes of attention": lambda: GatherAttention(1, 2, 16, 8, device="cpu", sizes=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_another_type_are_refused(option: str) -> None:
    refused(OPTIONS[option], option.split()[0])


# Weights in e4m3.

SPOILT: dict[str, tuple[str, Callable[[ScaledLinear], Any]]] = {
    "bf16": ("weight is torch.bfloat16", lambda layer: layer.to(torch.bfloat16)),
    "float32": ("weight is torch.float32", lambda layer: layer.float()),
    "scales of another type": ("scales is torch.bfloat16", lambda layer: setattr(layer, "scales", layer.scales.bfloat16())),
    "scales of another shape": ("scales is torch.float32 [1, 16]", lambda layer: setattr(layer, "scales", layer.scales[:, :16])),
    "turned weight": ("weight is not contiguous", lambda layer: setattr(layer, "weight", layer.weight.view(K, N).t())),
    "freed weight": ("was freed", lambda layer: layer.weight.untyped_storage().resize_(0)),
    "freed scales": ("was freed", lambda layer: layer.scales.untyped_storage().resize_(0)),
    "scales with a gradient": ("require a gradient", lambda layer: layer.scales.requires_grad_()),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_weight_in_e4m3_that_was_spoilt_is_refused(how: str) -> None:
    layer, x = coded()
    layer(x)
    said, spoil = SPOILT[how]
    spoil(layer)
    refused(lambda: layer(x), said)


def test_scales_with_any_strides_are_read_as_they_are() -> None:
    layer, x = coded()
    right = layer(x)
    layer.scales = torch.full((1, 2 * N), 9.0).index_fill_(1, torch.arange(0, 2 * N, 2), 0.5)[:, ::2]
    assert torch.equal(layer(x), right)
    layer.scales = (-layer.scales.contiguous())._neg_view() * -1
    assert torch.equal(layer(x), -right)


OF_CODES: dict[str, tuple[Callable[[], Any], str]] = {
    "no norm of a gather": (lambda: coded("gather", norm=AllReduceNorm(N, M, device="cpu")), "norm is given to an all-gather"),
    "no other norm": (lambda: coded(norm=3), "norm is of type int"),
    "no norm at all": (lambda: coded()[0].normed(coded()[1], torch.ones(N)), "made without a norm"),
    "no other layout": (lambda: coded(layout="kn"), "layout is given"),
    "one dimension": (lambda: LinearAllReduce(torch.zeros(16).to(CODES), None, M, scales=torch.ones(1)), "weight is [16]"),
    "a scale that is a number": (lambda: coded(scales=0.5), "scales float"),
    "a scale of x that is a number": (lambda: coded(scales=torch.ones(1), quantize="static", input_scale=0.5), "input_scale is"),
    "two scales of x": (lambda: coded(scales=torch.ones(1), quantize="static", input_scale=torch.ones(2)), "input_scale is"),
    "another backward": (lambda: coded(backward_weight=torch.ones(K, N).bfloat16()), "backward_weight is torch.bfloat16"),
    "weights of two types": (
        lambda: AllGatherLinear([torch.ones(N, K).to(CODES), torch.ones(N, K).bfloat16()], None, M, scales=[torch.ones(1)] * 2),
        "a weight is torch.bfloat16",
    ),
    "the gathered x": (lambda: coded("gather")[0](coded()[1], gathered=True), "gathered is given"),
    "turned scales of x": (
        lambda: coded(scales=torch.ones(1, 2), quantize=None)[0](torch.ones(M, K).to(CODES), torch.ones(2, M)), "scales of x are",
    ),
    "scales of x elsewhere": (
        lambda: coded(quantize=None)[0](torch.ones(M, K).to(CODES), torch.ones(M, 1, device="meta")), "scales of x are",
    ),
    "out that is the weight": (
        lambda: (lambda layer, x: layer(x, None, layer.weight.view(torch.bfloat16).view(-1)[: M * N].view(M, N)))(*coded()),
        "out shares memory with weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", OF_CODES)
def test_layers_of_e4m3_refuse(how: str) -> None:
    refused(OF_CODES[how][0], OF_CODES[how][1])


def test_a_class_of_the_users_keeps_its_forward_or_is_refused() -> None:
    class Adapter(LinearAllReduce):
        def forward(self, *given: Any, **more: Any) -> Tensor:
            return super().forward(*given, **more) + 3

    x = normal(M, K, seed=2, dtype=F32)
    weight = normal(N, K, seed=1, dtype=F32)
    torch.testing.assert_close(Adapter(weight, None, M)(x), x @ weight.t() + 3)
    refused(lambda: Adapter(weight.to(CODES), None, M, scales=torch.ones(1)), "Adapter is a class derived")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("shape", "n", "k", "quantize", "layout"),
    [
        ((2, 128), 256, 16384, None, "block"), ((1, 128), 128, 16384, "block", "block"), ((1, 128), 128, 16384, None, "row"),
        ((256, 1), 256, 16384, None, "row"), ((256,), 256, 256, "row", "row"), ((), 256, 256, None, "tensor"),
    ],
)  # fmt: skip
def test_scales_of_blocks_are_not_those_of_rows(
    shape: tuple[int, ...], n: int, k: int, quantize: str | None, layout: str
) -> None:
    assert layout_of(torch.ones(shape), n, k, quantize) == layout
    refused(lambda: layout_of(torch.ones(4, n // 4), n, k))


def test_a_second_derivative_of_codes_is_refused() -> None:
    layer, x = coded(backward_weight=nn.Parameter(normal(N, K, seed=3, dtype=torch.bfloat16)))
    x.requires_grad_()
    refused(lambda: torch.autograd.grad(layer(x).sum(), x, create_graph=True), "create_graph")


# Ranks.


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


def one_rank_refuses(world: World) -> list[str]:
    """The messages of all ranks, with `check`, for calls that rank 1 alone would refuse."""
    said, more = [], {"device": "cpu", "check": True}
    layer = layer_of("reduce", check=True)
    codes, x = coded(quantize=None, check=True)
    norm, merge = AllReduceNorm(K, M, dtype=F32, **more), DecodeMerge(2, 16, M, dtype=F32, masked=True, **more)
    prefill = GatherAttention(1, 2, 16, 16, **more)
    problem = AllGatherGemm(2 * M, N, K, "fp32", "m", 2)
    tuned = Tuned(problem, **more)
    wide, ones, cu = torch.ones(M, K), torch.ones(M, N), torch.tensor([0, M])
    q = torch.ones(1, 8, 2, 16).bfloat16()

    def spoilt(tensor: Any, other: Any) -> Any:
        return other if world.rank else tensor

    calls: list[Callable[[], Any]] = [
        lambda: layer(wide, residual=spoilt(ones, ones[:1])),
        lambda: codes(x.to(CODES), spoilt(torch.ones(M, 1), None)),
        lambda: norm(wide, wide[0], wide, scales_out=spoilt(None, wide[0])),
        lambda: merge(torch.ones(M, 2, 16), torch.ones(M, 2), seq_lens=spoilt(cu[1:], None), query_start_loc=cu),
        lambda: prefill(q, *[spoilt(q[:, :, :1], q[:, :4, :1])] * 2),
        lambda: tuned(wide, spoilt(normal(N, K, seed=1, dtype=F32), wide)),
    ]
    with torch.no_grad():
        for call in calls:
            try:
                call()
            except UsageError as error:
                said.append(str(error))
    for module in (layer, codes, norm, merge, prefill, tuned):
        module.close()
    return said


def test_with_check_a_call_that_one_rank_refuses_is_refused_on_all(two: Ranks) -> None:
    first, second = two.run(one_rank_refuses, timeout=120)
    assert first == second
    assert len(first) == 6
    assert all("rank 0: ready; rank 1: " in line for line in first), first


def values(world: World) -> list[bool]:
    grads = []
    for codes in (True, False):
        weight, bias = nn.Parameter(normal(N, K, seed=3, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(N).bfloat16())
        more: dict[str, Any] = {"scales": torch.ones(1, N), "quantize": "row", "backward_weight": weight} if codes else {}
        layer = LinearReduceScatter(weight.detach().to(CODES) if codes else weight, None, M, bias=bias, **more)
        (layer(normal(M, K, seed=4, dtype=torch.bfloat16)).float() * (1 + world.rank)).sum().backward()
        assert bias.grad is not None
        grads.append(bias.grad)
        layer.close()
    blocks = torch.rand(2, 128, generator=torch.Generator().manual_seed(1)) + 0.5
    weight, x = normal(256, 16384, seed=5, dtype=F32).to(CODES), normal(M, 16384, seed=6, dtype=torch.bfloat16)
    large: Any = LinearAllReduce(weight, None, M, scales=blocks, quantize="block")  # type: ignore[call-arg]
    scales = scales_of(x, "block")
    numbers = dequantised(quantised(x, scales, "block"), scales, "block", weight=False)
    right = 2 * numbers @ dequantised(weight, blocks, "block", weight=True).t()
    near = float((large(x).float() - right).norm() / right.norm()) < 1e-2
    large.close()
    try:
        AllReduceNorm(K, M, device="cpu", eps=1e-6 + world.rank)
    except UsageError as error:
        return [torch.equal(*grads), near, "eps=1.000001" in str(error)]
    return [False]


def test_values_on_ranks(two: Ranks) -> None:
    assert two.run(values, timeout=120) == [[True] * 3] * 2


def empty_pools(_: World) -> bool:
    """Attention over pools of no page, on ranks that hold no token."""
    attend = FlashDecode(1, 2, 16, M, 32, dtype=F32, device="cpu", page=16)
    pool, counts = torch.zeros(0, 16, 1, 16), torch.zeros(M, dtype=torch.int32)
    output = attend(torch.ones(M, 2, 16), pool, pool, counts, torch.full((M, 1), -1, dtype=torch.int32))
    attend.close()
    return bool(output.any())


def test_pools_may_have_no_page(two: Ranks) -> None:
    assert two.run(empty_pools, timeout=60) == [False, False]
