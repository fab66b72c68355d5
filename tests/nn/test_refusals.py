"""A module that knows the shapes it is called with refuses what a new one refuses, in the same line, and leaves `out` alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autotax.core.errors import UsageError
from autotax.nn import AllGatherLinear, DecodeMerge, FlashDecode, LinearAllReduce, LinearReduceScatter, sized, tensor_checks
from tests.nn.checks import normal

F32 = torch.float32
SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "type": lambda tensor: tensor.to(torch.float16 if tensor.is_floating_point() else torch.int64),
    "device": lambda tensor: tensor.to("meta"),
    "layout": lambda tensor: tensor.new_zeros(*tensor.shape, 2)[..., 0],
    "address": lambda tensor: tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape),
    "shape": lambda tensor: tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1),
}

COPIED = ("layout", "address")
"""Faults for which a module copies a small tensor instead of refusing it."""


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as error:
        call()
    return str(error.value)


def attention(page: int) -> FlashDecode:
    return FlashDecode(2, 4, 16, 2, 16, dtype=F32, device="cpu", page=page)


def call_of(page: int) -> dict[str, Tensor]:
    cache = torch.ones(3, page, 2, 16) if page else torch.ones(2, 2, 16, 16)
    table = {"block_table": torch.tensor([[2], [0]], dtype=torch.int32)} if page else {}
    shared = {"q": torch.ones(2, 4, 16), "k_shard": cache, "v_shard": cache.clone(), "out": torch.full((2, 4, 16), math.nan)}
    return shared | table | {"kv_lens": torch.tensor([16, 3], dtype=torch.int32)}


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("page", [0, 16])
def test_attention_refuses_a_wrong_tensor(page: int, spoil: str) -> None:
    used = attention(page)
    used(**call_of(page))
    for name in call_of(page):
        if spoil in COPIED and name in ("q", "kv_lens", "block_table"):
            continue
        given = call_of(page)
        given[name] = SPOILT[spoil](given[name])
        message = refused(lambda: used(**given))  # noqa: B023
        assert message == refused(lambda: attention(page)(**given))  # noqa: B023
        assert message.startswith(f"{name} ")
        assert name == "out" or given["out"].isnan().all()
    used(**call_of(page))


def test_a_module_that_could_not_be_closed_refuses_calls() -> None:
    def gone() -> None:
        raise RuntimeError("a peer is gone")

    for used, call in (
        (layer := AllGatherLinear(torch.ones(8, 16)), lambda: layer(torch.ones(2, 16))),
        (attend := attention(0), lambda: attend(**call_of(0))),
    ):
        call()
        used._world, used._prepared = SimpleNamespace(synchronize=gone), SimpleNamespace()  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="gone"):
            used.close()
        assert "was closed" in refused(call)


def test_sizes_that_never_come_again_do_not_fill_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized, "MOST_KNOWN", 4)
    attend = attention(0)
    for size in (*range(1, 12), 3):
        cache = torch.ones(2, 2, size, 16)
        assert attend(torch.ones(2, 4, 16), cache, cache, torch.full((2,), size, dtype=torch.int32)).shape == (2, 4, 16)
        assert max(map(len, (attend._known, attend._calls))) <= 4


@pytest.mark.parametrize("page", [0, 16])
def test_calls_of_other_shapes_in_turn_pass_the_full_checks_once(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, both, checks = attention(page), (call_of(page), call_of(page)), []
    both[1].update({name: both[1][name][:1].clone() for name in ("q", "out", "kv_lens", "block_table") if name in both[1]})
    if not page:
        both[1].update({name: both[1][name][:1].clone() for name in ("k_shard", "v_shard")})
    monkeypatch.setattr(tensor_checks, "require_plain", lambda *given: checks.append(given))
    for number in range(6):
        call = both[number % 2]
        call["out"].fill_(math.nan)
        assert torch.equal(attend(**call), torch.ones(2 - number % 2, 4, 16))
        assert attend(**{name: tensor for name, tensor in call.items() if name != "out"}).shape == call["q"].shape
        assert bool(checks) is (number < 2), number
        checks.clear()


@pytest.mark.parametrize("kind", [AllGatherLinear, LinearReduceScatter, LinearAllReduce])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_layer_refuses_a_wrong_tensor(spoil: str, kind: type[AllGatherLinear | LinearReduceScatter | LinearAllReduce]) -> None:
    used, x, out = kind(torch.ones(8, 16)), torch.ones(2, 16), torch.full((2, 8), math.nan)
    used(x)
    bad_x, bad_out, bad_weight = (SPOILT[spoil](tensor) for tensor in (x, out, used.weight))
    for name, call in {
        "x": lambda layer: layer(bad_x if spoil not in COPIED else x[0], out),
        "out": lambda layer: layer(x, bad_out),
        "weight": lambda layer: layer.run(x, bad_weight, out),
    }.items():
        message = refused(lambda: call(used))  # noqa: B023
        assert message == refused(lambda: call(kind(torch.ones(8, 16))))  # noqa: B023
        assert message.startswith(f"{name} is ")
        assert out.isnan().all()


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_merge_refuses_a_wrong_tensor(spoil: str) -> None:
    """A small tensor with a wrong layout or address is copied. The kernel reads log-sum-exps with any strides."""
    used, right = DecodeMerge(4, 16, 2, dtype=F32, device="cpu"), torch.full((2, 4, 16), 1.0)
    given = {"o": right, "lse": torch.zeros(2, 4), "out": torch.full((2, 4, 16), math.nan)}
    assert torch.equal(used(**given), right)
    for name in given:
        if spoil in COPIED and name != "out":
            continue
        given["out"].fill_(math.nan)
        message = refused(lambda: used(**given | {name: SPOILT[spoil](given[name])}))  # noqa: B023
        anew = DecodeMerge(4, 16, 2, dtype=F32, device="cpu")
        assert message == refused(lambda: anew(**given | {name: SPOILT[spoil](given[name])}))  # noqa: B023
        assert message.startswith(f"{name} is ")
        assert given["out"].isnan().all()
    assert torch.equal(used(**given), right)


@pytest.mark.parametrize("spoil", ["type", "layout", "address", "shape"])
def test_a_layer_refuses_a_weight_that_was_changed_in_place(spoil: str) -> None:
    layer, x = AllGatherLinear(torch.ones(8, 16)), torch.ones(2, 16)
    layer(x)
    layer.weight.data = SPOILT[spoil](layer.weight)
    assert refused(lambda: layer(x)).startswith("weight is ")


@pytest.mark.parametrize("wanted", ["q", "k_shard", "v_shard"])
def test_attention_that_torch_would_record_is_refused(wanted: str) -> None:
    used, given = attention(0), call_of(0)
    used(**given)
    given[wanted].requires_grad_()
    given["out"].fill_(math.nan)
    assert "there is no backward" in refused(lambda: used(**given))
    assert given["out"].isnan().all()
    with torch.no_grad():
        assert used(**given).isfinite().all()


def test_a_layer_that_torch_would_record_into_out_is_refused() -> None:
    for weight, x in (
        (torch.ones(8, 16), torch.ones(2, 16, requires_grad=True)),
        (nn.Parameter(torch.ones(8, 16)), torch.ones(2, 16)),
    ):
        layer = AllGatherLinear(weight)
        with torch.no_grad():
            layer(x)
        out = torch.full((2, 8), math.nan)
        assert "call this without out" in refused(lambda: layer(x, out))  # noqa: B023
        assert out.isnan().all()


def test_a_module_that_was_closed_is_refused_after_calls_too() -> None:
    layer, attend = AllGatherLinear(torch.ones(8, 16)), attention(0)
    like = AllGatherLinear(torch.ones(8, 16), like=layer)
    calls = [lambda: layer(torch.ones(2, 16)), lambda: like(torch.ones(2, 16)), lambda: attend(**call_of(0))]
    for call in calls:
        call()
    layer.close()
    attend.close()
    assert all("was closed" in refused(call) for call in calls)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def assign(layer: AllGatherLinear, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight, requires_grad=False)


def data(layer: AllGatherLinear, weight: Tensor) -> None:
    layer.weight.data = weight


def load(layer: AllGatherLinear, weight: Tensor) -> None:
    layer.load_state_dict({"weight": weight}, assign=True)


def register(layer: AllGatherLinear, weight: Tensor) -> None:
    layer.weight.data = weight / 2
    parametrize.register_parametrization(layer, "weight", Doubled())


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.clone])
@pytest.mark.parametrize("change", [assign, data, load, register])
def test_a_call_multiplies_by_what_the_weight_is_now(change: Callable[..., None], kind: Callable[[Tensor], Tensor]) -> None:
    layer, x, weight = (
        AllGatherLinear(kind(torch.ones(8, 16))),
        normal(2, 16, seed=1, dtype=F32),
        normal(8, 16, seed=2, dtype=F32),
    )
    with torch.no_grad():
        layer(x)
        change(layer, weight)
        assert torch.equal(layer(x), x @ weight.t())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllGatherLinear(None, None, 8), "weight is of type NoneType"),
        (lambda: AllGatherLinear([1, 2], None, 8), "weight is of type list"),
        (lambda: AllGatherLinear(torch.ones(4, 8), None, 8, bias=True), "bias is of type bool"),
        (lambda: AllGatherLinear(torch.ones(4, 8), None, 8, bias=torch.ones(3)), r"bias is \[3\]; it must be \[4\]"),
        (lambda: LinearAllReduce(torch.ones(4, 8), None, 8, bias=torch.ones(4, 1)), r"bias is \[4, 1\]; it must be \[4\]"),
    ],
)
def test_construction_refuses_a_wrong_weight_or_bias(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
