"""Checks of the backward of the linear layers: functions that run on all ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.heap.world import World
from autotax.nn import AllGatherLinear, LinearAllReduce, LinearReduceScatter
from autotax.nn.linear import adding_behind
from autotax.operators.verification import relative_error
from tests.nn.checks import K, N, everyones, normal, weight_of

LAYERS: dict[str, Any] = {"gather": AllGatherLinear, "scatter": LinearReduceScatter, "reduce": LinearAllReduce}
MOST = 16
ROWS = (8, 4, 8, 2)
"""Rows of x from call to call."""


@dataclass(frozen=True)
class Trained:
    """A layer to train: a key of LAYERS, and the options of its construction."""

    kind: str
    layout: str = "nk"
    dtype: torch.dtype = torch.float32
    config: Config | None = None
    backward: Config | None = None
    keep: bool = True
    bias: bool = True
    residual: bool = False

    def make(self, world: World, **more: Any) -> Any:
        weight = weight_of(world, dtype=self.dtype)
        weight = nn.Parameter(weight if self.layout == "nk" else weight.t().contiguous())
        usual: dict[str, Any] = {"layout": self.layout, "config": self.config, "backward_config": self.backward}
        if self.bias:  # of a row-parallel layer the same on all ranks
            usual["bias"] = nn.Parameter(normal(N, seed=3 + (world.rank if self.kind == "gather" else 0), dtype=self.dtype))
        usual |= {} if self.keep else {"keep_gathered": False}
        return LAYERS[self.kind](weight, None, MOST, **(usual | more))


def plainly(kind: str, inputs: list[dict[str, Tensor]], rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The result of a rank and the gradients of its inputs, by torch's autograd over the inputs of all ranks in float32.

    `inputs` of each rank: x, weight [n, k], bias, residual, dy. The loss is the sum over the ranks of y * dy; for "reduce", where
    all ranks compute the same, that of one.
    """
    leaves = [{name: tensor.float().requires_grad_(name != "dy") for name, tensor in tensors.items()} for tensors in inputs]
    ranks = len(leaves)
    if kind == "gather":
        whole = torch.cat([tensors["x"] for tensors in leaves])
        ys = [whole @ tensors["weight"].t() for tensors in leaves]
    else:
        total = torch.stack([tensors["x"] @ tensors["weight"].t() for tensors in leaves]).sum(0)
        ys = list(total.chunk(ranks)) if kind == "scatter" else [total] * ranks
    ys = [y + tensors["bias"] if "bias" in tensors else y for y, tensors in zip(ys, leaves, strict=True)]
    ys = [y + tensors["residual"] if "residual" in tensors else y for y, tensors in zip(ys, leaves, strict=True)]
    losses = [(y * tensors["dy"]).sum() for y, tensors in zip(ys, leaves, strict=True)]
    (losses[rank] if kind == "reduce" else torch.stack(losses).sum()).backward()
    grads = {name: tensor.grad for name, tensor in leaves[rank].items() if tensor.grad is not None}
    if kind == "scatter" and "bias" in grads:  # one bias of all ranks
        grads["bias"] = torch.stack([tensors["bias"].grad for tensors in leaves]).sum(0)  # type: ignore[misc]
    return ys[rank].detach(), grads


def gradient_errors(world: World, case: Trained) -> tuple[float, str]:
    """The greatest relative error of results and gradients over calls of several sizes, and what ran forward and backward."""
    layer, worst = case.make(world), 0.0
    for call, rows in enumerate(ROWS):
        layer.zero_grad()
        x = normal(rows, K, seed=10 * call + world.rank, dtype=case.dtype).requires_grad_()
        more: dict[str, Tensor] = {}
        out_rows = {"gather": rows * world.size, "scatter": rows // world.size}.get(case.kind, rows)
        if case.residual:
            own = world.rank if case.kind == "scatter" else 9
            more["residual"] = normal(out_rows, N, seed=77 + 10 * call + own, dtype=case.dtype).requires_grad_()
        dy = normal(out_rows, N, seed=500 + 10 * call + (9 if case.kind == "reduce" else world.rank), dtype=case.dtype)
        y = layer(x, **more)
        y.backward(dy)
        weight, turned = layer.weight, case.layout == "kn"
        mine = {"x": x.detach(), "weight": (weight.t() if turned else weight).detach().contiguous(), "dy": dy}
        mine |= {"bias": layer.bias.detach()} if case.bias else {}
        mine |= {name: tensor.detach() for name, tensor in more.items()}
        right, grads = plainly(case.kind, everyones(world, mine), world.rank)  # type: ignore[arg-type]
        gradients = {"x": x.grad, "weight": (weight.grad.t() if turned else weight.grad).contiguous()}
        gradients |= {"bias": layer.bias.grad} if case.bias else {}
        gradients |= {name: tensor.grad for name, tensor in more.items()}
        assert gradients.keys() == grads.keys()
        errors = [relative_error(y, right), *(relative_error(gradients[name], grads[name]) for name in grads)]
        worst = max(worst, *errors)
    assert layer.failure() is None
    ran = [part.choices[-1].config for part in (layer, layer.gradient)]
    layer.close()
    return worst, ", ".join(config.variant if config else "bsp" for config in ran)


class Same(torch.autograd.Function):
    """A tensor that all ranks share: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class Everyones(torch.autograd.Function):
    """Concatenates the results of all ranks; each rank differentiates only its part."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.rows, ctx.rank = len(y), dist.get_rank()
        parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, y.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0][ctx.rank * ctx.rows :][: ctx.rows]


def numerically(world: World, case: Trained) -> bool:
    """torch.autograd.gradcheck of all ranks' inputs and weights at once: every rank calls the same function of them.

    Layers take float32. They are linear in each argument, so a step as large as the numbers costs no accuracy.
    """
    rows, k = 2, 6
    shape = (4, k) if case.layout == "nk" else (k, 4)
    layer = LAYERS[case.kind](torch.zeros(shape), None, 4, layout=case.layout)

    def call(xs: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        x, weight = (Same.apply(every)[world.rank].contiguous() for every in (xs, weights))
        # All ranks share the bias of LinearReduceScatter. The bias of AllGatherLinear belongs to the columns of this rank.
        y = layer.run(x, weight, None, Same.apply(bias) if case.kind == "gather" else bias)
        return Everyones.apply(y) if case.kind != "reduce" else y

    shapes = (world.size, rows, k), (world.size, *shape), (4,)
    given = [normal(*size, seed=i, dtype=torch.float32).requires_grad_() for i, size in enumerate(shapes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that float32 is rough
        right = torch.autograd.gradcheck(call, given, eps=0.5, atol=1e-3, rtol=1e-3)
    layer.close()
    return right


def refused(call: Any) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def what_is_asked_for(world: World, kind: str) -> dict[str, Any]:
    """Results and errors of calls for which only some gradients are wanted."""
    case = Trained(kind, bias=False)
    layer = case.make(world)
    x = normal(4, K, seed=world.rank, dtype=torch.float32)
    report: dict[str, Any] = {}
    wanted = x.clone().requires_grad_()
    right = torch.autograd.grad(layer(wanted).sum(), (wanted, layer.weight))
    y = layer(x)
    y.sum().backward()
    report["weight alone"] = torch.equal(layer.weight.grad, right[1])
    layer.weight.requires_grad_(False)
    report["nothing"] = layer(x).requires_grad
    report["frozen"] = torch.equal(torch.autograd.grad(layer(wanted).sum(), wanted)[0], right[0])
    layer.weight.requires_grad_()
    report["second"] = refused(lambda: torch.autograd.grad(layer(wanted).sum(), wanted, create_graph=True))
    again = layer(wanted).sum()
    first = torch.autograd.grad(again, wanted, retain_graph=True)[0]
    report["twice"] = torch.equal(torch.autograd.grad(again, wanted)[0], first)
    half = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(half)
        loss = y.square().sum()
        inside = torch.autograd.grad(loss, (half, layer.weight), retain_graph=True)
    outside = torch.autograd.grad(loss, (half, layer.weight))
    report["autocast"] = y.dtype, outside[0].dtype, outside[1].dtype
    report["autocast alike"] = all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    like = LAYERS[kind](nn.Parameter(layer.weight.detach() * 2), like=layer)
    report["like"] = torch.equal(torch.autograd.grad(like(wanted).sum(), wanted)[0], 2 * right[0])
    empty = x[:0].clone().requires_grad_()
    layer(empty).sum().backward()
    report["empty"] = tuple(empty.grad.shape)  # type: ignore[union-attr]
    three = wanted.detach().view(2, 2, K).requires_grad_()
    report["dimensions"] = torch.equal(torch.autograd.grad(layer(three).sum(), three)[0].view(4, K), right[0])
    layer.close()
    return report


def compiled(world: World, kind: str, keep: bool = True) -> tuple[str, float]:
    """The error of compiled training before the backward is ready, and its greatest difference from eager training afterwards."""
    layer = Trained(kind, keep=keep or kind != "gather").make(world)
    torch.compiler.reset()
    fast = torch.compile(lambda x: layer(x).square().sum(), backend="aot_eager", fullgraph=True)
    x = normal(4, K, seed=world.rank, dtype=torch.float32).requires_grad_()
    early = ""
    try:
        fast(x)
    except Exception as error:
        early = str(error)
    layer.prepare_backward()
    torch.compiler.reset()
    leaves = [x, layer.weight, layer.bias]
    ours, theirs = torch.autograd.grad(fast(x), leaves), torch.autograd.grad(layer(x).square().sum(), leaves)
    layer.close()
    return early, max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def several(world: World, config: Config | None, layout: str) -> tuple[float, float, bool]:
    """Errors of three layers in one with the gathered input, and of its gradients; and whether all are views of one tensor."""
    sizes, side = (8, 4, 12), 1 if layout == "kn" else 0
    parts = [normal(size, K, seed=world.rank * 7 + i, dtype=torch.float32) for i, size in enumerate(sizes)]
    laid = [nn.Parameter(part.t().contiguous() if side else part) for part in parts]
    biases = [nn.Parameter(normal(size, seed=i, dtype=torch.float32)) for i, size in enumerate(sizes)]
    layer = AllGatherLinear(laid, None, MOST, bias=biases, layout=layout, config=config)
    errors, views = [], [*layer.weights]
    for call, rows in enumerate((8, 3, 8)):
        x = normal(rows, K, seed=10 * call + world.rank, dtype=torch.float32)
        whole = torch.cat([tensors[0] for tensors in everyones(world, (x,))])
        right = [whole @ part.t() + bias for part, bias in zip(parts, biases, strict=True)]
        with torch.no_grad():
            ys, gathered = layer(x, gathered=True)
            plain = layer(x)
        assert torch.equal(gathered, whole)
        errors += [relative_error(y, r) for y, r in zip([*ys, *plain], [*right, *right], strict=True)]
    wanted = x.clone().requires_grad_()
    ys, gathered = layer(wanted, gathered=True)
    (ys[0].sum() + 2 * ys[1].sum() + 3 * ys[2].sum() + 5 * gathered.sum()).backward()
    mine = sum(scale * part.sum(0) for scale, part in zip((1, 2, 3), parts, strict=True))
    grad = torch.stack([tensors[0] for tensors in everyones(world, (mine,))]).sum(0) + 5 * world.size  # type: ignore[arg-type]
    shared = len({y.untyped_storage().data_ptr() for y in ys}) == 1
    one = (layer.weight.grad if layout == "nk" else layer.weight.grad.t()).contiguous()
    deep = torch.cat([scale * whole.sum(0).expand(size, K) for scale, size in zip((1, 2, 3), sizes, strict=True)])
    deviation = max(relative_error(wanted.grad, grad.expand(len(x), K)), relative_error(one, deep))
    shared = shared and all(view.data_ptr() >= layer.weight.data_ptr() for view in views)
    layer.close()
    return max(errors), deviation, shared


def what_a_residual_may_be(world: World, kind: str, config: Config | None) -> dict[str, Any]:
    """Calls with residuals of several layouts, without a gradient, compiled and by a kernel that adds nothing itself."""
    case = Trained(kind, config=config)
    layer = case.make(world)
    x = normal(2, 4, K, seed=world.rank, dtype=torch.float32)
    report: dict[str, Any] = {}
    with torch.no_grad():
        plain = layer(x)
        wide = normal(*plain.shape[:-1], N + 1, seed=5, dtype=torch.float32)
        residual = wide[..., 1:]
        right = plain + residual

        def near(y: Tensor) -> bool:
            return relative_error(y, right) <= 1e-5

        report["strided and misaligned"] = near(layer(x, residual=residual))
        out = torch.empty_like(plain)
        report["into out"] = layer(x, out, residual.contiguous()) is out and near(out)
        fast = torch.compile(lambda x, residual: layer(x, residual=residual), backend="aot_eager", fullgraph=True)
        report["compiled"] = near(fast(x, residual.contiguous()))
        with torch.autocast("cpu", torch.bfloat16):
            report["autocast"] = near(layer(x, residual=residual))
            half = layer(x, residual=residual.bfloat16())
        report["another type under autocast"] = relative_error(half, plain + residual.bfloat16()) <= 1e-5
        report["shape"] = refused(lambda: layer(x, residual=residual[..., :1]))
        report["type"] = refused(lambda: layer(x, residual=residual.double()))
        report["out itself"] = refused(lambda: layer(x, out, out))
        first = next(iter(layer._made.values()), None)
        if first is not None:
            with_plugin = adding_behind(lambda x, weight, out: first.fitted(layer._problem(8))(x, weight, out))
            with_plugin(x.view(8, K), layer.weight.detach(), out.view(-1, N), layer.bias.detach(), residual.reshape(-1, N))
            report["by a kernel that does not add"] = near(out)
    report["ran"] = (first.config.variant if first else "bsp", layer.failure())
    layer.close()
    return report
