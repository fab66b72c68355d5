"""Several modules at once, compiled modules, and a small tensor-parallel decoder: functions that run on all ranks."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotax.core.config import Config
from autotax.heap.world import World
from autotax.nn import AllGatherLinear, FlashDecode
from autotax.operators.verification import relative_error
from tests.nn.checks import (
    DIM,
    HEADS,
    KV_HEADS,
    attention,
    cache_of,
    everyones,
    linear_errors,
    normal,
    rows_of,
    weight_of,
)

F32 = torch.float32


def interleaved(world: World, first: Config, second: Config) -> list[float]:
    """Errors of two layers of different configs, a third made like the first, and attention, called in turn."""
    layers = [
        AllGatherLinear(weight_of(world, 1), None, 40, config=first),
        AllGatherLinear(weight_of(world, 2, n=8), None, 24, config=second),
    ]
    layers.append(AllGatherLinear(weight_of(world, 3), like=layers[0]))
    attend = FlashDecode(KV_HEADS, HEADS, DIM, 2, 64, dtype=F32, device="cpu")
    errors = []
    for turn in range(4):
        for layer in layers:
            errors += linear_errors(layer, world, [7 + turn, 3])
        q, mine = normal(2, HEADS, DIM, seed=turn, dtype=F32), cache_of(world, 2, 16, turn, F32)
        errors.append(relative_error(attend(q, *mine), attention(q, everyones(world, mine))))
    layers[1].close()
    errors += linear_errors(layers[2], world, [5])
    layers[0].close()
    attend.close()
    return errors


def overlapping_groups(world: World, config: Config) -> list[float]:
    """Errors of layers of the groups {0, 1} and {1, 2}, and of all three ranks, made and called in turn."""
    pairs = [[0, 1], [1, 2]]
    groups = [dist.new_group(ranks) for ranks in pairs]
    layers: list[tuple[AllGatherLinear, World]] = []
    for ranks, group in zip(pairs, groups, strict=True):
        if world.rank in ranks:
            layers.append((AllGatherLinear(weight_of(world, 1), group, 16, config=config), World.of(group, world.device)))
    layers.append((AllGatherLinear(weight_of(world, 2), None, 24, config=config), world))
    errors = []
    for turn in range(4):
        for layer, members in layers:
            errors += linear_errors(layer, members, [5 + turn % 2, 8])
    for layer, _ in layers:
        layer.close()
    return errors


def let_go(world: World, config: Config) -> list[float]:
    """Errors of layers that are dropped without being closed, one after the other."""
    errors = []
    for seed in range(3):
        layer = AllGatherLinear(weight_of(world, seed), None, 16, config=config)
        errors += linear_errors(layer, world, [8, 5])
        del layer
        gc.collect()
    return errors


def compiled(world: World, config: Config, backend: str) -> list[float]:
    """Differences between compiled and eager calls, for a layer, one like it, and attention, with and without `out`."""
    first = AllGatherLinear(nn.Parameter(weight_of(world, 1)), None, 24, config=config)
    second = AllGatherLinear(weight_of(world, 2), like=first)
    attend = FlashDecode(KV_HEADS, HEADS, DIM, 2, 32, dtype=F32, device="cpu")
    mine = cache_of(world, 2, 16, 1, F32)

    def step(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty_like(q)
        attend(q, *mine, out=out)
        return first(x) * 2, second(x) + 1, attend(q * 2, *mine) + out

    torch.compiler.reset()
    fast = torch.compile(step, backend=backend, fullgraph=True)
    differences = []
    with torch.no_grad():
        for call, rows in enumerate((4, 9, 4, 12)):
            _, x = rows_of(world, rows, call, F32)
            q = normal(2, HEADS, DIM, seed=call, dtype=F32)
            for ours, theirs in zip(fast(x, q), step(x, q), strict=True):
                assert ours.shape == theirs.shape
                differences.append(float((ours - theirs).abs().max()))
    first.close()
    attend.close()
    return differences


def faked(world: World) -> list[tuple[Any, ...]]:
    """Shapes, types and strides that the operators of torch.ops promise, without being run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = AllGatherLinear(weight_of(world, dtype=torch.bfloat16), None, 16)
    attend = FlashDecode(KV_HEADS, HEADS, DIM, 2, 32, device="cpu")
    own_heads = FlashDecode(KV_HEADS, HEADS, DIM, 2, 32, device="cpu", output="head_scatter", page=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(5, layer.weight.shape[1], dtype=torch.bfloat16)
        q, cache = torch.empty(2, HEADS, DIM, dtype=torch.bfloat16), torch.empty(2, KV_HEADS, 16, DIM, dtype=torch.bfloat16)
        pool, counts = cache.view(2, 16, KV_HEADS, DIM), torch.empty(2, dtype=torch.int32)
        outs = (
            torch.ops.autotax.all_gather_linear(x, layer.weight, layer.handle),
            torch.ops.autotax.flash_decode(q, cache, cache, counts, attend.handle),
            torch.ops.autotax.flash_decode(q, pool, pool, counts, own_heads.handle, counts[:, None]),
        )
    return [(tuple(out.shape), out.dtype, out.stride()) for out in outs]


class Block(nn.Module):
    """A decoder block: attention with heads on all ranks and tokens spread, then a layer whose columns are spread."""

    def __init__(self, world: World, seed: int, attend: FlashDecode, like: AllGatherLinear | None) -> None:
        super().__init__()
        self.world = world
        weight = normal(HEADS * DIM, HEADS * DIM, seed=seed, dtype=F32) / (HEADS * DIM) ** 0.5
        self.whole = weight
        own = weight.chunk(world.size)[world.rank].clone()
        self.up = AllGatherLinear(nn.Parameter(own), None, 16, like=like)
        self.attend = attend

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """x [batch, HEADS * DIM] on all ranks: attention, then this rank's part of the batch through all columns."""
        y = x + self.attend(x.view(-1, HEADS, DIM), *cache).reshape(x.shape)
        own = y.chunk(self.world.size)[self.world.rank].contiguous()
        columns = self.up(own)
        parts = [torch.empty_like(columns) for _ in range(self.world.size)]
        dist.all_gather(parts, columns)
        return x + torch.relu(torch.cat(parts, dim=1))


def decoder_stack(world: World, depth: int, steps: int, batch: int, eager: bool) -> float:
    """The greatest relative error of a stack of blocks against plain torch on everything, over some steps."""
    attend = FlashDecode(KV_HEADS, HEADS, DIM, batch, 64, dtype=F32, device="cpu")
    blocks: list[Block] = []
    for index in range(depth):
        blocks.append(Block(world, index, attend, blocks[0].up if blocks else None))
    run = [block if eager else torch.compile(block, backend="eager") for block in blocks]
    worst = 0.0
    for step in range(steps):
        x = right = normal(batch, HEADS * DIM, seed=100 + step, dtype=F32)
        with torch.no_grad():
            for index, block in enumerate(run):
                mine = cache_of(world, batch, 16, 10 * step + index, F32)
                x = block(x, mine)
                y = right + attention(right.view(-1, HEADS, DIM), everyones(world, mine)).reshape(right.shape)
                right = right + torch.relu(y @ blocks[index].whole.t())
        worst = max(worst, relative_error(x, right))
    return worst


def hampered(world: World, config: Config, what: str) -> tuple[list[float], list[bool], list[str]]:
    """Errors of a layer, whether each size has a config, and the warnings, where one rank lacks something."""
    fails = mock.Mock(side_effect=RuntimeError("no compiler here"))
    patches = {
        "hosts": mock.patch("socket.gethostname", return_value=f"host-{world.rank}"),
        "compiler": mock.patch("autotax.kernels.kernel.Kernel.fitted", fails) if world.rank == 1 else nullcontext(),
    }
    with warnings.catch_warnings(record=True) as caught, patches[what]:
        warnings.simplefilter("always")
        layer = AllGatherLinear(weight_of(world), None, 16, config=config)
    errors = linear_errors(layer, world, [8, 3])
    layer.close()
    return errors, [choice.config is not None for choice in layer.choices], [str(one.message) for one in caught]


def attention_error(world: World) -> float:
    """Error of attention for which nothing is tuned."""
    attend = FlashDecode(KV_HEADS, HEADS, DIM, 2, 32, dtype=F32, device="cpu")
    q, mine = normal(2, HEADS, DIM, seed=1, dtype=F32), cache_of(world, 2, 16, 1, F32)
    return relative_error(attend(q, *mine), attention(q, everyones(world, mine)))
