"""Cases of the behaviour that a torch user expects of any module. They run on all ranks for each subject: `cases_of(subject)`.

To test a new module, add a Subject: it makes the module, its inputs and the expected result. docs/runtime.md names the cases.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.hardware import detect
from autotax.heap.world import World
from autotax.nn import (
    AllGatherLinear,
    AllReduceNorm,
    DecodeMerge,
    FlashDecode,
    GatherAttention,
    LinearAllReduce,
    LinearReduceScatter,
    groups,
)
from autotax.nn.base import Module
from autotax.nn.consensus import DTYPES
from autotax.operators.all_reduce_norm import AllReduceNorm as Problem
from autotax.operators.verification import TOLERANCE, relative_error
from autotax.spaces import space_for
from tests.nn.checks import DIM, HEADS, HIDDEN, KV_HEADS, K, N, attention, cache_of, everyones, normal, paged, weight_of

F32 = torch.float32
ROWS = 4
MOST = 8
"""The most rows or sequences in a call."""
ROOM = 16


LINEARS = {"gather": AllGatherLinear, "scatter": LinearReduceScatter, "reduce": LinearAllReduce}


@dataclass
class Subject:
    """A module under test on one rank. `linear`: calls are linear in a weight; a key of LINEARS."""

    name: str
    linear: str = ""
    config: Config | None = None
    layout: str = "nk"
    keep: bool = True
    page: int = 0
    output: str = "replicated"
    world: World = field(init=False)
    dtype: torch.dtype = field(init=False, default=F32)
    """Of all inputs and results."""

    @property
    def recorded(self) -> bool:
        """Whether torch records calls for a backward."""
        return bool(self.linear)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[DTYPES[self.dtype]]

    def watch(self, module: Any, before: Callable[[], object]) -> None:
        """Makes kernels call `before` first; `module` has been called."""
        for key, (call, *rest) in list(module._known.items()):
            entry = lambda *given, call=call: before() or call(*given), *rest
            module._known[key] = module._latest = entry

    @property
    def kind(self) -> Any:
        return LINEARS.get(self.linear, FlashDecode)

    def laid_out(self, weight: Tensor) -> Tensor:
        """A weight [n, k] in the layout of the layer."""
        return weight if self.layout == "nk" else weight.t().contiguous()

    def make(self, **more: Any) -> Any:
        if not self.linear:
            usual: dict[str, Any] = {"dtype": F32, "device": "cpu", "config": self.config}
            usual |= {"output": self.output, "page": self.page}
            return FlashDecode(KV_HEADS, HEADS, DIM, ROWS if self.config else MOST, ROOM * self.world.size, **(usual | more))
        weight = more.pop("weight", None)
        if weight is None:
            weight = nn.Parameter(self.laid_out(weight_of(self.world)), requires_grad=False)
        usual = {"config": self.config, "layout": self.layout} | ({} if self.keep else {"keep_gathered": False})
        return self.kind(weight, more.pop("group", None), MOST * self.world.size, **(usual | more))

    def inputs(self, seed: int = 1, rows: int = ROWS) -> list[Tensor]:
        """The input tensors of a call. The ranks exchange or share the first one."""
        if self.linear:
            return [normal(rows, K, seed=10 * seed + self.world.rank, dtype=F32)]
        mine = cache_of(self.world, rows, ROOM, seed, F32) if rows else (torch.zeros(0, KV_HEADS, ROOM, DIM),) * 2
        cache = (*mine, torch.zeros(0, dtype=torch.int32)) if not rows else mine
        return [normal(rows, HEADS, DIM, seed=seed, dtype=F32), *(paged(*cache, self.page) if self.page else cache)]

    @property
    def names(self) -> list[str]:
        """The names of the input tensors in messages."""
        return ["x"] if self.linear else ["q", "k_shard", "v_shard", "kv_lens", *["block_table"] * (self.page > 0)]

    def out_rows(self, rows: int = ROWS) -> int:
        """Rows of the result for `rows` rows of x."""
        ranks = self.world.size
        return {"gather": rows * ranks, "scatter": rows // ranks}.get(self.linear, rows)

    def out(self, rows: int = ROWS) -> Tensor:
        if self.linear:
            return torch.zeros(self.out_rows(rows), N)
        return torch.zeros(rows, HEADS // (self.world.size if self.output == "head_scatter" else 1), DIM)

    def right(self, module: Any, inputs: list[Tensor], seed: int = 1) -> Tensor:
        """The expected result, computed in plain torch. Collective."""
        if self.linear:
            weight = module.weight.detach().float()
            return self.plain(inputs[0].float(), weight if self.layout == "nk" else weight.t(), module.bias)
        mine = cache_of(self.world, len(inputs[0]), ROOM, seed, F32)
        whole = attention(inputs[0], everyones(self.world, mine))
        heads = self.out().shape[1]
        return whole[:, self.world.rank * heads % HEADS :][:, :heads]

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The linear layer in plain torch, weight [n, k]. Collective."""
        if self.linear == "gather":
            whole = torch.cat([tensors[0] for tensors in everyones(self.world, (x,))])
            return nn.functional.linear(whole, weight, bias)
        total = torch.stack([tensors[0] for tensors in everyones(self.world, (x @ weight.t(),))]).sum(0)
        own = total.chunk(self.world.size)[self.world.rank] if self.linear == "scatter" else total
        return own if bias is None else own + bias

    def by_operator(self, module: Any, x: Tensor, rest: list[Tensor]) -> Any:
        """A call through torch.ops."""
        if self.linear:
            return module.OPERATORS[0](x, module.weight, module.handle)
        return torch.ops.autotax.flash_decode(x, *rest[:3], module.handle, *rest[3:])

    @property
    def described(self) -> str:
        """The sizes as `repr` prints them."""
        return "in_features=40, out_features=24, bias=False" if self.linear else "q_heads=4, kv_heads=2"

    def is_right(self, module: Any, seed: int = 1, rows: int = ROWS) -> None:
        inputs = self.inputs(seed, rows)
        output = called(module, *inputs)
        assert relative_error(output, self.right(module, inputs, seed)) <= self.tolerance


@dataclass
class MergeSubject(Subject):
    """The merge of partial results: calls bring O and LSE, which each rank has of its own."""

    base: str = "e"

    @property
    def kind(self) -> type[Module]:
        return DecodeMerge

    def make(self, **more: Any) -> Any:
        usual: dict[str, Any] = {"dtype": F32, "device": "cpu", "config": self.config, "output": self.output, "base": self.base}
        return DecodeMerge(HEADS, DIM, ROWS if self.config else MOST, **(usual | more))

    def inputs(self, seed: int = 1, rows: int = ROWS) -> list[Tensor]:
        return self.of_rank(self.world.rank, seed, rows)

    @property
    def names(self) -> list[str]:
        return ["o", "lse"]

    def of_rank(self, rank: int, seed: int, rows: int = ROWS) -> list[Tensor]:
        lse = 3 * normal(rows, HEADS, seed=1000 * seed + rank, dtype=F32)
        o = normal(rows, HEADS, DIM, seed=1000 * seed + 100 + rank, dtype=F32)
        if rows:
            lse[rank % rows, 0] = -math.inf
        return [o, lse]

    def right(self, module: Any, inputs: list[Tensor], seed: int = 1) -> Tensor:
        return self.merged(seed, len(inputs[0]))[0]

    def merged(self, seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """The merged O and LSE of this rank's heads, in float64."""
        brought = [self.of_rank(rank, seed, rows) for rank in range(self.world.size)]
        outs, sums = (torch.stack(tensors).double() for tensors in zip(*brought, strict=True))
        scale = math.log(2.0) if self.base == "2" else 1.0
        whole = (torch.softmax(sums * scale, 0)[..., None] * outs).sum(0).float()
        heads = self.out().shape[1]
        own = slice(self.world.rank * heads % HEADS, self.world.rank * heads % HEADS + heads)
        return whole[:, own], (torch.logsumexp(sums * scale, 0) / scale).float()[:, own]

    def by_operator(self, module: Any, x: Tensor, rest: list[Tensor]) -> Any:
        return torch.ops.autotax.decode_merge(x, *rest, module.handle)

    @property
    def described(self) -> str:
        return f"heads={HEADS}, head_dim={DIM}"


@dataclass
class NormSubject(Subject):
    """All-reduce, residual and norm: calls bring x, the weight and the residual, and return y and the new residual."""

    @property
    def kind(self) -> type[Module]:
        return AllReduceNorm

    def make(self, **more: Any) -> Any:
        usual: dict[str, Any] = {"dtype": F32, "device": "cpu", "config": self.config}
        return AllReduceNorm(HIDDEN, ROWS if self.config else MOST, **(usual | more))

    def inputs(self, seed: int = 1, rows: int = ROWS) -> list[Tensor]:
        x = normal(rows, HIDDEN, seed=1000 * seed + self.world.rank, dtype=F32)
        return [x, normal(HIDDEN, seed=seed + 10, dtype=F32), normal(rows, HIDDEN, seed=seed + 20, dtype=F32)]

    @property
    def names(self) -> list[str]:
        return ["x", "weight", "residual"]

    def out(self, rows: int = ROWS) -> Tensor:
        return torch.zeros(rows, HIDDEN)

    def right(self, module: Any, inputs: list[Tensor], seed: int = 1) -> Tensor:
        return self.both(inputs, seed)[0]

    def both(self, inputs: list[Tensor], seed: int = 1) -> tuple[Tensor, Tensor]:
        """y and the new residual, by torch's own norm."""
        rows = len(inputs[0])
        parts = [normal(rows, HIDDEN, seed=1000 * seed + rank, dtype=F32) for rank in range(self.world.size)]
        total = torch.stack(parts).sum(0) + inputs[2]
        return nn.functional.rms_norm(total, (HIDDEN,), inputs[1], 1e-6), total

    def by_operator(self, module: Any, x: Tensor, rest: list[Tensor]) -> Any:
        return torch.ops.autotax.all_reduce_norm(x, rest[0], module.handle, rest[1])

    @property
    def described(self) -> str:
        return f"hidden={HIDDEN}, max_m="


@dataclass
class GatherSubject(Subject):
    """Attention over sequence shards: calls bring Q, K and V of a rank's tokens. Rows are sequences."""

    dtype: torch.dtype = field(init=False, default=torch.bfloat16)

    @property
    def recorded(self) -> bool:
        return True

    @property
    def kind(self) -> type[Module]:
        return GatherAttention

    def make(self, **more: Any) -> Any:
        tokens = ROOM * self.world.size
        usual: dict[str, Any] = {"dtype": self.dtype, "device": "cpu", "config": self.config}
        return GatherAttention(KV_HEADS, HEADS, DIM, tokens, max_batch=ROWS if self.config else MOST, **(usual | more))

    def watch(self, module: Any, before: Callable[[], object]) -> None:
        for problem, (call, like) in list(module._calls.items()):
            module._calls[problem] = lambda *given, call=call: before() or call(*given), like

    def inputs(self, seed: int = 1, rows: int = ROWS) -> list[Tensor]:
        return self.of_rank(self.world.rank, seed, rows)

    def of_rank(self, rank: int, seed: int, rows: int) -> list[Tensor]:
        heads = enumerate((HEADS, KV_HEADS, KV_HEADS))
        return [normal(rows, ROOM, count, DIM, seed=1000 * seed + 10 * rank + i, dtype=self.dtype) for i, count in heads]

    @property
    def names(self) -> list[str]:
        return ["q", "k", "v"]

    def out(self, rows: int = ROWS) -> Tensor:
        return torch.zeros(rows, ROOM, HEADS, DIM, dtype=self.dtype)

    def right(self, module: Any, inputs: list[Tensor], seed: int = 1) -> Tensor:
        brought = [self.of_rank(rank, seed, len(inputs[0])) for rank in range(self.world.size)]
        whole = (torch.cat(tensors, 1).float().transpose(1, 2) for tensors in zip(*brought, strict=True))
        o = nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True).transpose(1, 2)
        return o[:, ROOM * self.world.rank :][:, :ROOM]

    def by_operator(self, module: Any, x: Tensor, rest: list[Tensor]) -> Any:
        return torch.ops.autotax.gather_attention(x, *rest, module.handle)

    @property
    def described(self) -> str:
        return f"kv_heads={KV_HEADS}, q_heads={HEADS}, head_dim={DIM}, max_seq_len={ROOM * self.world.size}"


def first(result: Any) -> Tensor:
    """The result of a call, or the first of several."""
    result = result if isinstance(result, Tensor) else result[0]
    assert isinstance(result, Tensor)
    return result


def called(module: Any, *tensors: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return first(module(*tensors, **more))


def refused(call: Callable[[], Any], *parts: str) -> None:
    try:
        call()
    except UsageError as error:
        message = str(error)
        assert "\n" not in message, message
        assert all(part in message for part in parts), message
    else:
        raise AssertionError("it is not refused")


@contextmanager
def made(subject: Subject, **more: Any) -> Iterator[Any]:
    module = subject.make(**more)
    yield module
    module.close()


# Autograd.


def out_that_requires_a_gradient(subject: Subject) -> None:
    with made(subject) as module:
        out = subject.out().requires_grad_()
        why = "call this without out" if subject.recorded else "there is no backward"
        refused(lambda: module(*subject.inputs(), out=out), why)
        refused(lambda: module(*subject.inputs(), out=out * 1), why)
        subject.is_right(module)


def input_that_requires_a_gradient(subject: Subject) -> None:
    with made(subject) as module:
        x, *rest = subject.inputs()
        x.requires_grad_()
        if subject.recorded:
            refused(lambda: module(x, *rest, out=subject.out()), "call this without out")
            assert module(x, *rest).requires_grad
        else:
            for more in ({}, {"out": subject.out()}):
                refused(lambda: module(x, *rest, **more), "there is no backward")  # noqa: B023
        with torch.no_grad():
            assert not first(module(x, *rest)).requires_grad
        with torch.inference_mode():
            assert first(module(x, *rest)).is_inference()


def operators_of_torch_ops_and_gradients(subject: Subject) -> None:
    with made(subject) as module:
        x, *rest = subject.inputs()
        x.requires_grad_()
        if subject.linear:
            _, write = module.OPERATORS
            right = module(x)
            output = subject.by_operator(module, x, rest)
            assert torch.equal(output, right)
            given = torch.ones_like(right)
            assert torch.equal(torch.autograd.grad(output, x, given)[0], torch.autograd.grad(right, x, given)[0])
            refused(lambda: write(x, module.weight, subject.out(), module.handle), "call this without out")
        else:
            refused(lambda: subject.by_operator(module, x, rest), "there is no backward")


def version_of_out(subject: Subject) -> None:
    with made(subject) as module:
        out = subject.out()
        for _ in range(2):
            before = out._version
            called(module, *subject.inputs(), out=out)
            assert out._version > before
        saved = subject.out().requires_grad_()
        product = (saved * out).sum()
        called(module, *subject.inputs(), out=out)
        try:
            product.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            raise AssertionError("backward takes what was overwritten")
        with torch.inference_mode():
            module(*subject.inputs(), out=subject.out())


def forward_mode(subject: Subject) -> None:
    with made(subject) as module, torch.no_grad():
        x, *rest = subject.inputs()
        with forward_ad.dual_level():
            with forward_ad._set_fwd_grad_enabled(True):
                dual = forward_ad.make_dual(x, x)
                refused(lambda: module(dual, *rest), "tangent")
            subject.is_right(module)


def transforms(subject: Subject) -> None:
    with made(subject) as module, torch.no_grad():
        x, *rest = subject.inputs()
        module(x, *rest)
        refused(lambda: torch.vmap(lambda y: module(y, *rest))(torch.stack([x, x])), "torch.func")
        refused(lambda: torch.func.jvp(lambda y: module(y, *rest), (x,), (x,)))
        subject.is_right(module)


# Threads and devices.


def in_thread(call: Callable[[], Any]) -> Any:
    """Runs a call on another thread; returns its result or its exception."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join()
    return outcomes[0]


def two_threads(subject: Subject) -> None:
    with made(subject) as module:
        right = called(module, *subject.inputs())
        assert torch.equal(in_thread(lambda: called(module, *subject.inputs())), right)
        with module._guards[0]:
            error = in_thread(lambda: called(module, *subject.inputs()))
            assert isinstance(in_thread(subject.make), UsageError) or module._world is None
        assert isinstance(error, UsageError), error
        assert "'worker'" in str(error)
        assert torch.equal(called(module, *subject.inputs()), right)


def threads_in_turn(subject: Subject) -> None:
    with made(subject) as module:
        right = called(module, *subject.inputs())

        for _ in range(2):
            assert torch.equal(in_thread(lambda: called(module, *subject.inputs())), right)
            assert torch.equal(called(module, *subject.inputs()), right)


def device_guard(subject: Subject) -> None:
    """A stand-in for a thread whose current GPU is another: each call happens on the module's, and the thread's comes back."""
    with made(subject) as module:
        current, during = [3], []

        @contextmanager
        def device(index: int) -> Iterator[None]:
            before, current[0] = current[0], index
            yield
            current[0] = before

        called(module, *subject.inputs())
        subject.watch(module, lambda: during.append(current[0]))
        module._guards = module._calls_of_group, 1, False
        with mock.patch.object(groups, "current_device", lambda: current[0]), mock.patch("torch.cuda.device", device):
            subject.is_right(module)
            assert (current, during) == ([3], [1])
            current[0] = 1
            subject.is_right(module)
            assert (current, during) == ([1], [1, 1])


def device_at_construction(subject: Subject) -> None:
    """A stand-in for ranks that make a module for a GPU which is not the current one."""
    from autotax.nn.base import require_current

    with mock.patch.object(groups, "current_device", lambda: 0):
        refused(lambda: require_current(torch.device("cuda", 1)), "is for cuda:1", "cuda:0", "set_device")
        with mock.patch.object(Module, "_place", lambda _: torch.device("cuda", 1)):
            moved = mock.patch("autotax.nn.base.world_of", lambda *_: None)
            placed = mock.patch.object(subject.kind, "_place", lambda _: torch.device("cuda", 1))
            with moved, mock.patch("torch.cuda.is_current_stream_capturing", lambda: False), placed:
                refused(subject.make, "cuda:1", "set_device")


# Copies.


def deepcopy_of_a_parent(subject: Subject) -> None:
    with made(subject) as module:
        parent = nn.Sequential(module)
        subject.is_right(module)
        other = copy.deepcopy(parent)[0]
        assert other is not module
        assert other.handle != module.handle
        if subject.linear:
            assert other.weight is not module.weight
        subject.is_right(other)
        other.close()
        subject.is_right(module)


def pickle_of_a_parent(subject: Subject) -> None:
    with made(subject) as module:
        file = io.BytesIO()
        torch.save(nn.Sequential(module), file)
        file.seek(0)
        for other in (pickle.loads(pickle.dumps(nn.Sequential(module)))[0], torch.load(file, weights_only=False)[0]):
            assert other.choices == ()
            subject.is_right(other)
            assert other.choices == module.choices
            other.close()
        subject.is_right(module)


def group_of_a_copy(subject: Subject) -> None:
    group = dist.new_group(list(range(subject.world.size)))
    with made(subject, group=group, db="nobody.db") as module:
        twin = copy.deepcopy(module)
        subject.is_right(twin)
        twin.close()
        other = pickle.loads(pickle.dumps(module))
        refused(lambda: called(other, *subject.inputs()), "saved with a group of some ranks", "prepare(group)")
        other.prepare(group)
        subject.is_right(other)
        other.close()


def no_password_in_a_file(subject: Subject) -> None:
    with made(subject) as module:
        module._db = "postgresql://me:secret@host/db"
        assert b"secret" not in pickle.dumps(module)


def state_dict(subject: Subject) -> None:
    with made(subject) as module, made(subject) as other:
        assert list(module.state_dict()) == ["weight"] * bool(subject.linear)
        if subject.linear:
            other.load_state_dict({"weight": torch.zeros_like(module.weight)})
            assert not called(other, *subject.inputs()).any()
        other.load_state_dict(module.state_dict())
        assert torch.equal(called(other, *subject.inputs()), called(module, *subject.inputs()))


def representation(subject: Subject) -> None:
    with made(subject) as module:
        text = repr(module)
        assert f"ranks={subject.world.size}" in text
        assert subject.described in text


# Shapes, types and layouts.


def empty_batch(subject: Subject) -> None:
    with made(subject) as module:
        for more in ({}, {"out": subject.out(0)}):
            assert called(module, *subject.inputs(rows=0), **more).shape == subject.out(0).shape
        subject.is_right(module)


def other_layouts(subject: Subject) -> None:
    with made(subject) as module:
        x, *rest = subject.inputs()
        right = called(module, x, *rest)
        for other in (torch.stack([x, x], -1)[..., 0], torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(x.shape)):
            assert torch.equal(called(module, other, *rest), right)
        narrow = torch.stack([subject.out()] * 2, -1)[..., 0]
        refused(lambda: called(module, x, *rest, out=narrow), "out is not contiguous")


def autocast(subject: Subject) -> None:
    other = torch.bfloat16 if subject.dtype is F32 else F32
    with made(subject) as module, torch.autocast("cpu", torch.bfloat16):
        x, *rest = subject.inputs()
        given = [x.to(other), *rest]
        result = called(module, *given)
        assert result.dtype is subject.dtype
        assert torch.equal(result, called(module, given[0].to(subject.dtype), *rest))
    with made(subject) as module:
        refused(lambda: called(module, *given), str(other))


def export(subject: Subject) -> None:
    with made(subject) as module, torch.no_grad():
        inputs = tuple(subject.inputs())
        right = first(module(*inputs))
        for strict in (False, True):
            program = torch.export.export(module, inputs, strict=strict)
            assert torch.equal(first(program.module()(*inputs)), right)
        subject.is_right(module)


# Checks between ranks.


def rows_that_differ(subject: Subject) -> None:
    with made(subject, check=True) as module:
        subject.is_right(module)
        some = subject.inputs(rows=ROWS - 2 * subject.world.rank)
        refused(lambda: called(module, *some), "differs between the ranks", "rank 1: call 1")
        subject.is_right(module)


def call_that_one_rank_refuses(subject: Subject) -> None:
    with made(subject, check=True) as module:
        x, *rest = subject.inputs()
        x = x.double() if subject.world.rank else x
        refused(lambda: called(module, x, *rest), "rank 0: ready", "torch.float64")
        subject.is_right(module)


def modules_in_another_order(subject: Subject) -> None:
    with made(subject, check=True) as one, made(subject, check=True) as two:
        subject.is_right(one)
        subject.is_right(two)
        refused(lambda: called((one, two)[subject.world.rank], *subject.inputs()), "differs between the ranks")


def check_by_the_environment(subject: Subject) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        with mock.patch.dict("os.environ", {"AUTOTAX_CHECK": value}), made(subject) as module:
            assert module._check is expected


# Tensors that are not what their memory holds.


def negated(tensor: Tensor) -> Tensor:
    """The same values, in a view of their negatives."""
    view = (-tensor)._neg_view()
    assert view.is_neg()
    return view


def imaginary(tensor: Tensor) -> Tensor:
    """The same values, as the imaginary part of a conjugate, which torch negates lazily."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    return view


def unwaited(tensor: Tensor) -> Tensor:
    """The same values, from a functional collective that nobody has waited for. Collective."""
    rows, rank = len(tensor), dist.get_rank()
    result = functional.all_gather_tensor(tensor.contiguous(), 0, dist.group.WORLD)[rank * rows : (rank + 1) * rows]  # type: ignore[arg-type]
    assert type(result) is functional.AsyncCollectiveTensor
    return result


def derived(tensor: Tensor) -> Tensor:
    """The same values, of a class of tensors that changes no operator."""
    return tensor.as_subclass(Derived)


class Derived(Tensor):
    """A subclass that changes nothing."""


class Watched(Tensor):
    """A class that sees each operator, as many libraries have one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Tripled(Tensor):
    """A class whose memory holds a third of its values."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.as_subclass(Tensor) * 3 if isinstance(arg, Tripled) else arg for arg in args), **(kwargs or {}))


class Served(nn.Parameter):
    """A weight like those of serving engines."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def distributed(tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def without_memory(tensor: Tensor) -> Tensor:
    """A view into the middle of a storage that is then freed, as FSDP frees parameters."""
    flat = torch.cat([tensor.new_zeros(64), tensor.reshape(-1)])
    view = flat[64:].view(tensor.shape)
    flat.untyped_storage().resize_(0)
    return view


OTHER_KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "DTensor": (distributed, "is a DTensor"),
    "watched": (lambda tensor: tensor.as_subclass(Watched), "is a Watched"),
    "dispatched": (lambda tensor: Tensor._make_subclass(Tripled, tensor), "is a Tripled"),
    "fake": (lambda tensor: FakeTensorMode().from_tensor(tensor), "is a FakeTensor"),
    "lazy": (lambda tensor: nn.UninitializedParameter(requires_grad=False), "is an UninitializedParameter"),  # noqa: ARG005
    "functionalized": (torch._to_functional_tensor, "is functionalized"),
    "COO": (Tensor.to_sparse, "is laid out as torch.sparse_coo"),
    "CSR": (lambda tensor: tensor.reshape(len(tensor), -1).to_sparse_csr(), "is laid out as torch.sparse_csr"),
    "MKL-DNN": (lambda tensor: tensor.float().to_mkldnn(), "is laid out as torch._mkldnn"),
    "nested": (lambda tensor: torch.nested.nested_tensor([tensor.float(), tensor.float()]), "is a nested tensor"),
    "jagged": (lambda tensor: torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged), "is a NestedTensor"),
    "meta": (lambda tensor: tensor.to("meta"), "on meta"),
    "freed": (without_memory, "was freed"),
}
"""Functions that convert a tensor to another kind, each with the text of the refusal."""


def replaced(tensors: list[Tensor], number: int, by: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [by(tensor) if index == number else tensor for index, tensor in enumerate(tensors)]


def right_result(subject: Subject, module: Any, inputs: list[Tensor], **more: Any) -> Tensor:
    """Calls the module, checks the result and returns it."""
    result = called(module, *inputs, **more)
    if not more:
        assert relative_error(result, subject.right(module, inputs)) <= subject.tolerance
    return result


def lazy_views(subject: Subject) -> None:
    with made(subject) as module:
        inputs = subject.inputs()
        right = right_result(subject, module, inputs)
        for number, tensor in enumerate(inputs):
            for view in (negated, imaginary) if tensor.dtype is F32 else (negated,):
                some = replaced(inputs, number, view)
                assert torch.equal(called(module, *some), right), (number, view)
                with torch.no_grad():
                    output = subject.by_operator(module, some[0], some[1:])
                assert torch.equal(first(output), right), (number, view)
        refused(lambda: called(module, *inputs, out=negated(subject.out())), "out is a view that torch negates")


def unwaited_results(subject: Subject) -> None:
    with made(subject) as module:
        inputs = subject.inputs()
        right = right_result(subject, module, inputs)
        for number in range(len(inputs)):
            for view in (unwaited, lambda tensor: negated(unwaited(tensor)), derived):
                if view is not derived or number == 0 or not subject.linear:
                    assert torch.equal(called(module, *replaced(inputs, number, view)), right), number
        refused(lambda: called(module, *inputs, out=unwaited(subject.out())), "out is an AsyncCollectiveTensor", "plain")
        assert torch.equal(called(module, *inputs, out=derived(subject.out())), right)


def tensors_of_other_kinds(subject: Subject) -> None:
    with made(subject) as module:
        inputs = subject.inputs()
        right = right_result(subject, module, inputs)
        for kind, what in OTHER_KINDS.values():
            for number, name in enumerate(subject.names):
                refused(lambda: called(module, *replaced(inputs, number, kind)), f"{name} ", what)  # noqa: B023
            refused(lambda: called(module, *inputs, out=kind(subject.out())), "out ", what)  # noqa: B023
        assert torch.equal(called(module, *inputs), right)


def laid_at(memory: Tensor, start: int, tensor: Tensor) -> Tensor:
    """A copy of a tensor at byte `start` of `memory`."""
    return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def out_that_shares_memory(subject: Subject) -> None:
    with made(subject) as module:
        inputs = subject.inputs()
        right, out = right_result(subject, module, inputs), subject.out()
        for number, name in enumerate(subject.names):
            tensor, size = inputs[number], inputs[number].nbytes
            for start, apart in ((0, False), (out.nbytes - 16, False), (out.nbytes, True), (-size + 16, False), (-size, True)):
                memory = torch.zeros(2 * max(0, -start) + out.nbytes + size, dtype=torch.uint8)
                written = laid_at(memory, max(0, -start), out)
                some = replaced(inputs, number, lambda tensor: laid_at(memory, max(0, -start) + start, tensor))  # noqa: B023
                if apart:
                    assert torch.equal(called(module, *some, out=written), right)
                    continue
                refused(lambda: called(module, *some, out=written), f"out shares memory with {name}")  # noqa: B023
                assert torch.equal(some[number].view(torch.uint8), tensor.view(torch.uint8))


# Of modules with a weight.


def weight_of_another_kind(subject: Subject) -> None:
    with made(subject) as module, torch.no_grad():
        (x,), weight = subject.inputs(), module.weight.detach()
        right = right_result(subject, module, [x])

        def with_weight(other: Tensor) -> Tensor:
            del module.weight
            if isinstance(other, nn.Parameter):
                module.register_parameter("weight", other)
            else:
                module.register_buffer("weight", other)
            return called(module, x)

        for view in (negated, imaginary, unwaited, derived, lambda tensor: Served(tensor, requires_grad=False)):
            assert torch.equal(with_weight(view(weight)), right)
            if view in (negated, imaginary, derived):
                assert torch.equal(with_weight(nn.Parameter(view(weight), requires_grad=False)), right)
            with made(subject, weight=view(weight)) as other:
                assert torch.equal(called(other, x), right)
        for kind, what in OTHER_KINDS.values():
            refused(lambda: with_weight(kind(weight)), "weight ", what)  # noqa: B023
            if "meta" not in what:
                refused(lambda: subject.make(weight=kind(weight)), "weight ", what)  # noqa: B023
        # The same object with other memory, at the same address even.
        assert torch.equal(with_weight(nn.Parameter(weight.clone(), requires_grad=False)), right)
        module.weight.data = module.weight.data._neg_view()
        assert torch.equal(called(module, x), -right)
        module.weight.data = negated(weight)
        assert torch.equal(called(module, x), right)
        other = nn.Parameter(weight * 2, requires_grad=False)
        torch.utils.swap_tensors(module.weight, other)
        assert torch.equal(called(module, x), right * 2)


def weight_that_was_freed(subject: Subject) -> None:
    with made(subject, bias=torch.zeros(N)) as module, torch.no_grad():
        (x,), weight = subject.inputs(), module.weight.detach().clone()
        right = right_result(subject, module, [x])
        flat = torch.cat([torch.zeros(64), weight.view(-1)])
        size = flat.untyped_storage().nbytes()
        module.weight.data = flat[64:].view(weight.shape)
        assert torch.equal(called(module, x), right)
        for _ in range(2):
            flat.untyped_storage().resize_(0)
            refused(lambda: called(module, x), "weight ", "was freed or resized", "bring it back")
            flat.untyped_storage().resize_(size)
            module.weight.copy_(weight)
            assert torch.equal(called(module, x), right)
        module.bias.untyped_storage().resize_(0)
        refused(lambda: called(module, x), "bias ", "was freed or resized")


def addends_of_another_kind(subject: Subject) -> None:
    bias, more = normal(N, seed=5, dtype=F32), {}
    with made(subject, bias=bias) as module, torch.no_grad():
        inputs = subject.inputs()
        if subject.linear != "gather":
            more["residual"] = normal(*subject.out().shape, seed=6, dtype=F32)
        right = called(module, *inputs, **more)
        plain = subject.right(module, inputs)
        assert relative_error(right, plain + more.get("residual", 0.0)) <= TOLERANCE["fp32"]
        for view in (negated, imaginary, unwaited, derived):
            module.bias = view(bias)
            assert torch.equal(called(module, *inputs, **more), right)
            for name, tensor in more.items():
                module.bias = bias
                assert torch.equal(called(module, *inputs, **{name: view(tensor)}), right)
        for kind, what in OTHER_KINDS.values():
            refused(lambda: module.run(*inputs, module.weight, None, kind(bias)), "bias ", what)  # noqa: B023
            for name, tensor in more.items():
                refused(lambda: called(module, *inputs, **{name: kind(tensor)}), f"{name} ", what)  # noqa: B023
        for name, tensor in {"bias": bias, **more}.items():
            memory = torch.zeros(subject.out().nbytes + tensor.nbytes, dtype=torch.uint8)
            shared, out = laid_at(memory, subject.out().nbytes - 16, tensor), laid_at(memory, 0, subject.out())
            module.bias = shared if name == "bias" else bias
            some = more | ({} if name == "bias" else {name: shared})
            refused(lambda: called(module, *inputs, out=out, **some), f"out shares memory with {name}")  # noqa: B023
        memory = torch.cat([subject.out().view(-1)[:-4], module.weight.detach().view(-1)])
        out, module.bias = memory[: subject.out().numel()].view(subject.out().shape), bias
        module.weight.data = memory[subject.out().numel() - 4 :].view(module.weight.shape)
        refused(lambda: called(module, *inputs, out=out, **more), "out shares memory with weight")


def weight_replaced(subject: Subject) -> None:
    with made(subject) as module:
        x, *_ = subject.inputs()
        right = called(module, x)
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(module, {"weight": module.weight * 2}, (x,)), right * 2)
        replica = module._replicate_for_data_parallel()
        replica._parameters["bias"] = None  # as torch.nn.parallel.replicate goes on
        replica.weight = module.weight.detach() * 2
        assert torch.equal(called(replica, x), right * 2)
        assert torch.equal(called(module, x), right)
        kept = module.weight
        del module.weight
        module.register_buffer("weight", kept.detach() * 2)
        assert torch.equal(called(module, x), right * 2)


def meta_device(subject: Subject) -> None:
    with torch.device("meta"):
        modules = [subject.make(weight=nn.Parameter(subject.laid_out(torch.empty(N, K)), requires_grad=False)) for _ in range(2)]
    refused(lambda: called(modules[0], *subject.inputs()), "meta device", "to_empty")
    weight = subject.laid_out(weight_of(subject.world))
    modules[0].to_empty(device="cpu").load_state_dict({"weight": weight})
    modules[1].load_state_dict({"weight": weight}, assign=True)
    for module in modules:
        subject.is_right(module)
        assert len(module.choices) > 0
        module.close()


def moved_before_the_first_call(subject: Subject) -> None:
    with made(subject) as module:
        module.half()
        x = subject.inputs()[0].half()
        result = called(module, x)
        assert result.dtype is torch.half
        assert relative_error(result, subject.right(module, [x])) <= TOLERANCE["fp16"]
        module.float()
        refused(lambda: called(module, *subject.inputs()), "torch.float16")
        module.prepare()
        subject.is_right(module)


def several_dimensions(subject: Subject) -> None:
    with made(subject) as module:
        x, *_ = subject.inputs()
        right = called(module, x)
        assert torch.equal(called(module, x.view(2, ROWS // 2, K)), right.view(-1, ROWS // 2, N))
        out = torch.zeros(subject.out_rows() // (ROWS // 2), ROWS // 2, N)
        assert called(module, x.view(2, ROWS // 2, K), out) is out
        assert torch.equal(out.view(right.shape), right)
        refused(lambda: called(module, x[0]), "x is torch.float32 [40]")


def bias(subject: Subject) -> None:
    given = nn.Parameter(normal(N, seed=5, dtype=F32), requires_grad=False)
    for value in (given, given.detach()):
        with made(subject, bias=value) as module:
            subject.is_right(module)
            x, *_ = subject.inputs()
            out = subject.out()
            assert torch.equal(called(module, x, out), called(module, x))
            assert "bias" in module.state_dict()
            with torch.no_grad():
                program = torch.export.export(module, (x,), strict=False)
                assert torch.equal(program.module()(x), out)
    with made(subject) as module:
        module.bias = given
        subject.is_right(module)
        module.bias = nn.Parameter(torch.zeros(N + 1), requires_grad=False)
        refused(lambda: called(module, *subject.inputs()), "bias is ")


def copies_of_layers_like_one_another(subject: Subject) -> None:
    with made(subject) as first:
        weight = nn.Parameter(subject.laid_out(weight_of(subject.world, 7)), requires_grad=False)
        second = subject.kind(weight, layout=subject.layout, like=first)
        twins = copy.deepcopy(nn.Sequential(first, second))
        assert twins[1]._like == (twins[0],)
        subject.is_right(twins[1])
        subject.is_right(twins[0])
        alone = copy.deepcopy(second)
        assert alone._like == (first,)
        subject.is_right(alone)
        loaded = pickle.loads(pickle.dumps(nn.Sequential(first, second)))
        assert loaded[1].handle == loaded[0].handle
        subject.is_right(loaded[1])
        for layer in (twins[0], loaded[0]):
            layer.close()


def results_that_are_normed(subject: Subject) -> None:
    """Both ways of `normed`, and the norm of a rank's own rows, against torch's norm."""
    if subject.linear == "gather":
        return
    for quant in ("none", "block"):
        (x,) = subject.inputs()
        n = 128 if quant == "block" else N
        weight, norm_weight = normal(n, K, seed=subject.world.rank, dtype=F32), normal(n, seed=8, dtype=F32)
        shape = Problem(MOST * subject.world.size, n, "fp32", subject.world.size, quant=quant)
        config = space_for(shape, detect("cpu")).default("one_shot") if subject.linear == "reduce" else None
        norm = AllReduceNorm(n, shape.m, dtype=F32, device="cpu", quant=quant, config=config)
        bias = normal(n, seed=5, dtype=F32)
        laid = nn.Parameter(subject.laid_out(weight), requires_grad=False)
        layer = subject.kind(laid, None, MOST * subject.world.size, bias=bias, layout=subject.layout, norm=norm)
        assert everyones(subject.world, tuple(layer._apart.items())) == [tuple(layer._apart.items())] * subject.world.size
        assert bool(layer._apart) is (subject.linear == "reduce")
        residual = normal(subject.out_rows(), n, seed=6, dtype=F32)
        total = subject.plain(x, weight, bias) + residual
        right = nn.functional.rms_norm(total, (n,), norm_weight, 1e-6)
        ways = (False, True) if subject.linear == "reduce" else (False,)
        with torch.no_grad():
            for apart in ways:
                layer._apart = {MOST * subject.world.size: apart}
                compiled = torch.compile(layer.normed, backend="aot_eager", fullgraph=True)
                for call in (layer.normed, compiled):
                    y, new_residual, *scales = call(x, norm_weight, residual)
                    torch.testing.assert_close(new_residual, total, rtol=1e-4, atol=1e-4)
                    output = y.float() * scales[0] if scales else y
                    torch.testing.assert_close(output, right, rtol=0.0701 if scales else 1e-4, atol=0.05 if scales else 1e-4)
            several, expected = x.view(2, ROWS // 2, K), (subject.out_rows() // (ROWS // 2), ROWS // 2, n)
            assert layer.normed(several, norm_weight, residual.view(expected))[0].shape == expected
            refused(lambda: layer.normed(x, norm_weight, residual.double()), "residual is ")  # noqa: B023
            with made(subject) as bare:
                refused(lambda: bare.normed(x, norm_weight, residual), "made without a norm")  # noqa: B023
        refused(lambda: layer.normed(x.requires_grad_(), norm_weight, residual), "there is no backward")  # noqa: B023
        x.requires_grad_(False)
        layer.close()
        norm.close()


# Of attention.


def inputs_that_differ(subject: Subject) -> None:
    with made(subject, check=True) as module:
        q, *rest = subject.inputs()
        refused(lambda: called(module, q + subject.world.rank, *rest), "differs between the ranks", "digest")
        subject.is_right(module)


def lengths_beyond_the_memory(subject: Subject) -> None:
    with made(subject, check=True) as module:
        inputs = subject.inputs()
        inputs[3] = torch.full_like(inputs[3], ROOM + 1)
        refused(lambda: called(module, *inputs), "kv_lens has [17, 17")
        if subject.page:
            inputs = subject.inputs()
            inputs[3].fill_(ROOM)
            inputs[4] = torch.full_like(inputs[4], 10**6)
            refused(lambda: called(module, *inputs), "block_table names pages")
        subject.is_right(module)


# Of merging.


def merged_log_sum_exps(subject: Subject) -> None:
    assert isinstance(subject, MergeSubject)
    with made(subject) as module, torch.no_grad():
        right, right_lse = subject.merged(1)
        out, lse = module(*subject.inputs(), return_lse=True)
        assert relative_error(out, right) <= TOLERANCE["fp32"]
        torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)
        given = subject.out(), torch.zeros_like(lse)
        again = module(*subject.inputs(), *given, return_lse=True)
        assert all(one is two for one, two in zip(again, given, strict=True))
        assert torch.equal(given[0], out) and torch.equal(given[1], lse)
        refused(lambda: module(*subject.inputs(), None, lse[:1]), "merged_lse is torch.float32 [1,")


def shards_that_are_empty(subject: Subject) -> None:
    assert isinstance(subject, MergeSubject)
    with made(subject) as module, torch.no_grad():
        for nothing in (-math.inf, math.inf, math.nan):
            o, lse = subject.inputs()
            lse[0], o[0] = nothing, math.nan
            if subject.world.rank:
                lse[1], o[1] = nothing, math.inf
            out, merged = module(o, lse, return_lse=True)
            assert not out[0].any() and (merged[0] == -math.inf).all()
            first = subject.of_rank(0, 1)
            heads = slice(subject.world.rank * out.shape[1] % HEADS, subject.world.rank * out.shape[1] % HEADS + out.shape[1])
            torch.testing.assert_close(out[1], first[0][1, heads], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(merged[1], first[1][1, heads], rtol=1e-5, atol=1e-6)


def log_sum_exps_with_any_strides(subject: Subject) -> None:
    assert isinstance(subject, MergeSubject)
    with made(subject) as module, torch.no_grad():
        o, lse = subject.inputs()
        right = module(o, lse, return_lse=True)
        wide = torch.zeros(HEADS + 1, 2 * ROWS + 1)[1:, 1::2].t().copy_(lse)
        assert not wide.is_contiguous()
        assert all(torch.equal(one, two) for one, two in zip(module(o, wide, return_lse=True), right, strict=True))
        several = module(o.view(2, ROWS // 2, HEADS, DIM), wide.reshape(2, ROWS // 2, HEADS), return_lse=True)
        assert all(torch.equal(one.flatten(0, 1), two) for one, two in zip(several, right, strict=True))
        refused(lambda: called(module, o, lse.double()), "lse is torch.float64")


def sequences_that_are_elsewhere(subject: Subject) -> None:
    assert isinstance(subject, MergeSubject)
    with made(subject, masked=True) as module, torch.no_grad():
        o, lse = subject.inputs()
        lens = torch.tensor([2, 1 - subject.world.rank], dtype=torch.int32)
        starts = torch.tensor([0, 1, ROWS - 1], dtype=torch.int32)
        masked_lse = lse.clone()
        masked_lse[ROWS - 1] = -math.inf
        if subject.world.rank:
            masked_lse[1:] = -math.inf
        right = module(o, masked_lse, return_lse=True)
        results = module(o, lse, return_lse=True, seq_lens=lens.long(), query_start_loc=starts)
        assert all(torch.equal(one, two) for one, two in zip(results, right, strict=True))
        refused(lambda: module(o, lse, seq_lens=lens), "query_start_loc is not given")
        refused(lambda: module(o, lse, seq_lens=lens, query_start_loc=lens), "query_start_loc is torch.int32 [2]")
    with made(subject) as module, torch.no_grad():
        refused(lambda: module(o, lse, seq_lens=lens, query_start_loc=starts), "masked=True")


# Of norms.


def every_result_of_a_norm(subject: Subject) -> None:
    """All quantisations, with and without a residual and given memory, against the functions of the declaration."""
    assert isinstance(subject, NormSubject)
    x, weight, residual = subject.inputs()
    for quant, scales in (("none", None), ("tensor", (1,)), ("row", (ROWS,)), ("block", (ROWS, HIDDEN // 128))):
        with made(subject, quant=quant, offset=1) as module, torch.no_grad():
            y, total = subject.both([x, weight + 1, residual])
            scale = torch.full((1,), 1 / 32) if quant == "tensor" else None
            results = module(x, weight, residual, scale)
            assert len(results) == 2 + (quant in ("row", "block"))
            torch.testing.assert_close(results[1], total)
            rows = results[0].float()
            if scale is not None:
                rows = rows * scale
            elif quant != "none":
                assert results[2].shape == scales
                rows = (rows.view(ROWS, results[2].numel() // ROWS, -1) * results[2].view(ROWS, -1, 1)).view(y.shape)
            torch.testing.assert_close(rows, y, rtol=1e-5 if quant == "none" else 0.0701, atol=1e-5 if quant == "none" else 0.05)
            given = [torch.empty_like(result) for result in results]
            names = dict(zip(("out", "residual_out", "scales_out"), given, strict=False))
            again = module(x.view(2, ROWS // 2, -1), weight, residual.view(2, ROWS // 2, -1), scale)
            assert [list(result.shape[:1]) for result in again[:2]] == [[2]] * 2
            assert all(one is two for one, two in zip(module(x, weight, residual, scale, **names), given, strict=True))
            for one, two, three in zip(given, results, again, strict=True):
                assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
                assert torch.equal(three.contiguous().view(-1).view(torch.uint8), two.view(-1).view(torch.uint8))
            compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
            for more in ({}, names):
                assert torch.equal(compiled(x, weight, residual, scale, **more)[0].view(torch.uint8), given[0].view(torch.uint8))
            refused(lambda: module(x, weight), "residual is not given")
            refused(lambda: module(x, weight, residual, scale, residual_out=residual), "residual_out shares memory with residual")  # noqa: B023
            wrong = torch.ones(1) if scale is None else None
            refused(lambda: module(x, weight, residual, wrong), f"scale is {'given' if scale is None else 'not given'}")  # noqa: B023
    with made(subject, residual=False) as module, torch.no_grad():
        torch.testing.assert_close(module(x, weight)[1], subject.both([x, weight, torch.zeros_like(x)])[1])
        refused(lambda: module(x, weight, residual), "residual is given")


CASES: tuple[Callable[[Subject], None], ...] = (
    out_that_requires_a_gradient, input_that_requires_a_gradient, operators_of_torch_ops_and_gradients, version_of_out,
    forward_mode, transforms, two_threads, threads_in_turn, device_guard, device_at_construction, deepcopy_of_a_parent,
    pickle_of_a_parent, group_of_a_copy, no_password_in_a_file, state_dict, representation, empty_batch, other_layouts,
    autocast, export, lazy_views, unwaited_results, tensors_of_other_kinds, out_that_shares_memory, rows_that_differ,
    call_that_one_rank_refuses, modules_in_another_order, check_by_the_environment,
)  # fmt: skip
OF_WEIGHTS = (
    weight_replaced, meta_device, moved_before_the_first_call, several_dimensions, bias, copies_of_layers_like_one_another,
    weight_of_another_kind, weight_that_was_freed, addends_of_another_kind, results_that_are_normed,
)  # fmt: skip
OF_ATTENTION = (inputs_that_differ, lengths_beyond_the_memory)
OF_OTHERS: tuple[tuple[type[Subject], tuple[Callable[[Subject], None], ...]], ...] = (
    (NormSubject, (every_result_of_a_norm,)),
    (MergeSubject, (merged_log_sum_exps, shards_that_are_empty, log_sum_exps_with_any_strides, sequences_that_are_elsewhere)),
    (GatherSubject, ()),
)


def cases_of(subject: Subject) -> dict[str, Callable[[Subject], None]]:
    own = OF_WEIGHTS if subject.linear else OF_ATTENTION
    own = next((cases for kind, cases in OF_OTHERS if isinstance(subject, kind)), own)
    return {case.__name__: case for case in (*CASES, *own)}


def run_all(world: World, subject: Subject) -> dict[str, str]:
    """The failure of each case on this rank; "" if it passed."""
    subject.world = world
    failures = {}
    for name, case in cases_of(subject).items():
        try:
            case(subject)
            failures[name] = ""
        except Exception:
            failures[name] = traceback.format_exc()
        if any(world.gather(failures[name], str)):
            # Ranks that left a case at different places may have called unequally often: what follows means nothing.
            failures |= {other: f"not run after {name}" for other in cases_of(subject) if other not in failures}
            break
    return failures
