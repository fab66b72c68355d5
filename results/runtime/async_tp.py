"""An unchanged Llama-style stack through parallelize_module and torch.compile: NCCL, torch's async tensor parallelism, ours.

    python results/runtime/async_tp.py --world-size 4 --layers 4 --tokens 2048 8192 --db winners.db --json async-tp.json

Three editions of the same weights. `NCCL`: torch.compile as it is. `torch async TP`: with Inductor's micro-pipeline pass.
`autotax`: the same graphs, whose fused operators are ours. Each is captured in a CUDA graph on GPUs. Outputs, and with --train
gradients of the input and all weights, are compared with NCCL's; replays are timed in turn. A round's time is the maximum over
the ranks.

With --fp8 the layers hold weights in e4m3 with scales of rows, and quantise their inputs by rows, in a program on torch alone.
The gathers carry codes and scales. Outputs are then compared with the same stack whose inputs are never quantised: no edition may
be farther from it than NCCL's, but for a twentieth.

Two CPU ranks run it too, to try the script: eagerly, with small sizes, and torch's fused operators as plain collectives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu
from work import Runnable, timed

import autotax.torch
from autotax.core.errors import UsageError
from autotax.core.problem import Problem
from autotax.db.lookup import lookup
from autotax.hardware import check_world_size, detect
from autotax.heap import World
from autotax.nn import AllGatherLinear, LinearReduceScatter
from autotax.operators.problems import AllGatherGemm, GemmReduceScatter
from autotax.runner.ranks import RankFailure, run_ranks
from autotax.software import environment
from autotax.spaces import space_for
from autotax.torch import plans, scaled, symm_mem
from autotax.torch.registration import OPERATORS
from autotax.torch.symm_mem import GATHER, SCATTER
from autotax.tuner.finalists import speedup

NCCL, TORCH, OURS = EDITIONS = ("NCCL", "torch async TP", "autotax")
MODULES = "autotax.nn"
"""With --fp8 a fourth edition: the same layers as modules of ours. Problems without a winner run the first seed."""
REFERENCE = "inputs in bf16"
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4, "fp8": 0.2}
"""Greatest ||theirs - NCCL's|| / ||NCCL's||: bf16 and float32, rounded elsewhere. With --fp8 of NCCL's from the reference."""
FALLBACKS = scaled.OPERATORS | {GATHER: symm_mem.torch_all_gather_matmul, SCATTER: symm_mem.torch_matmul_reduce_scatter}
"""Torch's own on CPU ranks. Ours of e4m3 are torch's as long as there is no winner."""
LARGEST = 448.0


@dataclass(frozen=True)
class Plan:
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    tokens: tuple[int, ...]
    train: bool
    rounds: int
    db: str | None
    fp8: bool = False


class Block(nn.Module):
    """RMSNorm, causal attention, RMSNorm, SwiGLU; x [tokens, hidden] is sharded along the tokens."""

    def __init__(self, plan: Plan, made: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim = plan.head_dim
        q, kv = plan.q_heads * plan.head_dim, plan.kv_heads * plan.head_dim
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(plan.hidden, elementwise_affine=False) for _ in range(2))
        self.wq, self.wk, self.wv = (nn.Linear(plan.hidden, width, bias=False, **made) for width in (q, kv, kv))
        self.wo = nn.Linear(q, plan.hidden, bias=False, **made)
        self.w1, self.w3 = (nn.Linear(plan.hidden, plan.ffn, bias=False, **made) for _ in range(2))
        self.w2 = nn.Linear(plan.ffn, plan.hidden, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (layer(normed).unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None] for layer in (self.wq, self.wk, self.wv))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + self.wo(mixed)
        normed = self.ffn_norm(x)
        return x + self.w2(silu(self.w1(normed)) * self.w3(normed))


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3, and the scales of its rows."""
    scales = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(1e-12)
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


class Fp8Linear(nn.Module):
    """This rank's part of a layer: its weight [n, k] in e4m3."""

    def __init__(self, n: int, k: int, made: dict[str, Any]) -> None:
        super().__init__()
        codes, scales = by_rows(torch.randn(n, k, **made) / k**0.5)
        self.weight, self.scales = (nn.Parameter(tensor, False) for tensor in (codes, scales.t().contiguous()))

    def forward(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:  # an input that was not quantised
            return nn.functional.linear(codes, (self.weight.float() * self.scales.t()).to(codes.dtype))
        return torch._scaled_mm(codes, self.weight.t(), scales, self.scales, out_dtype=torch.bfloat16)


class Fp8Block(Block):
    """The same with weights in e4m3, and collectives of torch in its code."""

    quantised = staticmethod(by_rows)

    def __init__(self, plan: Plan, made: dict[str, Any], group: Any) -> None:
        nn.Module.__init__(self)
        self.head_dim, self.group, ranks = plan.head_dim, group, group.size()
        q, kv = (heads * plan.head_dim // ranks for heads in (plan.q_heads, plan.kv_heads))
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(plan.hidden, elementwise_affine=False) for _ in range(2))
        self.wq, self.wk, self.wv = (Fp8Linear(width, plan.hidden, made) for width in (q, kv, kv))
        self.wo = Fp8Linear(plan.hidden, q, made)
        self.w1, self.w3 = (Fp8Linear(plan.ffn // ranks, plan.hidden, made) for _ in range(2))
        self.w2 = Fp8Linear(plan.hidden, plan.ffn // ranks, made)

    def gathered(self, x: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(tensor if tensor is None else all_gather_tensor(tensor, 0, self.group) for tensor in self.quantised(x))

    def scattered(self, layer: nn.Module, x: Tensor) -> Tensor:
        return reduce_scatter_tensor(layer(*self.quantised(x)), "sum", 0, self.group)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.gathered(self.attention_norm(x))
        q, k, v = (layer(*whole).unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None] for layer in (self.wq, self.wk, self.wv))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + self.scattered(self.wo, mixed)
        whole = self.gathered(self.ffn_norm(x))
        return x + self.scattered(self.w2, silu(self.w1(*whole)) * self.w3(*whole))


class ReferenceBlock(Fp8Block):
    """The same weights with inputs in bf16."""

    quantised = staticmethod(lambda x: (x, None))


class ModuleBlock(Fp8Block):
    """The layers of an Fp8Block on modules of ours, for so many tokens of all ranks."""

    def __init__(self, plan: Plan, made: dict[str, Any], world: World, tokens: int) -> None:
        super().__init__(plan, made, world.data)
        here = detect(world.backend)

        def module(kind: Any, *layers: Fp8Linear) -> Any:
            n, k = sum(len(layer.weight) for layer in layers), layers[0].weight.shape[1]
            more = "nk", "row", "bf16", "row"
            problem: Problem = (
                AllGatherGemm(tokens, n, k, "e4m3", "m", world.size, *more)
                if kind is AllGatherLinear
                else GemmReduceScatter(tokens, n, k, "e4m3", "scattered", world.size, *more)
            )
            tuned = lookup(problem, hardware=here, db=plan.db).match != "fallback"
            config = None if tuned else space_for(problem, here).default("scaled_decomposed")
            weights, scales = [layer.weight for layer in layers], [layer.scales for layer in layers]
            several = len(layers) > 1
            options = {"scales": scales if several else scales[0], "quantize": "row", "config": config, "db": plan.db}
            return kind(weights if several else weights[0], None, tokens, sizes=[tokens], **options)

        self.qkv = module(AllGatherLinear, self.wq, self.wk, self.wv)
        self.gate_up = module(AllGatherLinear, self.w1, self.w3)
        self.out, self.down = module(LinearReduceScatter, self.wo), module(LinearReduceScatter, self.w2)
        self.wq = self.wk = self.wv = self.w1 = self.w3 = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None] for part in self.qkv(self.attention_norm(x)))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = self.out(mixed, residual=x)
        gate, up = self.gate_up(self.ffn_norm(x))
        return self.down(silu(gate) * up, residual=x)


def stack_of(plan: Plan, world: World, name: str, tokens: int) -> nn.Module:
    """The same weights in every edition, sharded by torch's own styles."""
    if plan.fp8:
        torch.manual_seed(7 + world.rank)
        made = {"device": world.device, "dtype": torch.bfloat16}
        of_group = (world, tokens) if name == MODULES else (world.data,)
        block = {MODULES: ModuleBlock, REFERENCE: ReferenceBlock}.get(name, Fp8Block)
        return nn.Sequential(*(block(plan, made, *of_group) for _ in range(plan.layers)))
    torch.manual_seed(7)
    made = {"device": world.device, "dtype": torch.bfloat16 if world.device.type == "cuda" else torch.float32}
    stack = nn.Sequential(*(Block(plan, made) for _ in range(plan.layers)))
    columns, rows = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    styles = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), columns) | dict.fromkeys(("wo", "w2"), rows)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    for block in stack:
        parallelize_module(block, mesh, styles)
    return stack


@contextlib.contextmanager
def edition(name: str, world: World) -> Iterator[None]:
    """Compiled and called inside of this, a stack is of an edition. Graphs that were captured inside stay so."""
    on_gpu = world.device.type == "cuda"
    with contextlib.ExitStack() as held:
        held.enter_context(inductor.patch({"_micro_pipeline_tp": name != NCCL, "fx_graph_cache": False}))
        library = torch.library.Library("symm_mem", "IMPL")
        held.callback(library._destroy)
        runs = OPERATORS if name == OURS else {} if on_gpu else FALLBACKS
        for operator, run in runs.items():
            library.impl(operator, run, "CUDA" if on_gpu else "CPU", allow_override=True)
        if not on_gpu:  # the pass wants NCCL, and gloo gathers no e4m3
            functional = torch.library.Library("_c10d_functional", "IMPL")
            held.callback(functional._destroy)
            functional.impl("all_gather_into_tensor", gathered_bytes, "CPU", allow_override=True)
            held.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
            held.enter_context(torch_symm_mem._test_mode())
        yield


def gathered_bytes(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """The rows of all ranks, whatever their type."""
    whole = x.new_empty(ranks * len(x), *x.shape[1:])
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    dist.all_gather_into_tensor(whole.view(torch.uint8), x.contiguous().view(torch.uint8), group)
    return whole


def step_of(stack: nn.Module, train: bool, dy: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Forward; and with `train` backward too, to the gradients of the input and of all weights."""
    compiled = torch.compile(stack)
    weights = list(stack.parameters())

    def local(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def step(x: Tensor) -> tuple[Tensor, ...]:
        if not train:
            with torch.no_grad():
                return (compiled(x),)
        x = x.detach().requires_grad_()
        y = compiled(x)
        return (y.detach(), *(local(tensor) for tensor in torch.autograd.grad(y, [x, *weights], dy)))

    return step


def work(world: World, plan: Plan) -> dict[str, Any]:
    """One rank: each number of tokens in all editions."""
    on_gpu = world.device.type == "cuda"
    if on_gpu and hasattr(torch_symm_mem, "enable_symm_mem_for_group"):  # torch 2.13 wants it
        torch_symm_mem.enable_symm_mem_for_group(str(world.data.group_name))  # type: ignore[union-attr]
    plans.use(plans.Deployment(plan.db))
    scenarios = [scenario(world, plan, tokens) for tokens in plan.tokens]
    if failures := plans.failures():
        raise RuntimeError("; ".join(failures))
    ran = str(autotax.torch.status())
    dist.barrier()
    plans.use(plans.Deployment())
    return {"scenarios": scenarios, "ran": ran}


def scenario(world: World, plan: Plan, tokens: int) -> dict[str, Any]:
    on_gpu, own = world.device.type == "cuda", (tokens // world.size, plan.hidden)
    generator = torch.Generator(world.device).manual_seed(1 + world.rank)
    x, dy = (torch.randn(own, generator=generator, device=world.device) for _ in range(2))
    dtype = torch.bfloat16 if on_gpu or plan.fp8 else torch.float32
    x, dy = x.to(dtype), dy.to(dtype)
    runs: dict[str, Runnable] = {}
    editions = (*EDITIONS, MODULES) if plan.fp8 else EDITIONS
    for name in editions:
        torch._dynamo.reset()
        step = step_of(stack_of(plan, world, name, tokens), plan.train, dy)
        with edition(name, world):
            runs[name] = Runnable(lambda step=step: step(x), on_gpu)  # type: ignore[misc]
    right = [result.float() for result in runs[NCCL].out]
    if plan.fp8:
        with torch.no_grad(), edition(NCCL, world):
            right = [stack_of(plan, world, REFERENCE, tokens)(x).float()]
    errors = {name: max(map(_difference, runs[name].out, right)) for name in editions}
    times: dict[str, list[float]] = {name: [] for name in editions}
    for number in range(plan.rounds):
        for name in editions if number % 2 else editions[::-1]:
            with contextlib.nullcontext() if on_gpu else edition(name, world):
                times[name].append(timed(world, runs[name]))
    after = {name: max(map(_difference, runs[name].out, right)) for name in editions}
    return {"tokens": tokens, "errors": [errors, after], "times": times}


def _difference(result: Tensor, right: Tensor) -> float:
    error = float((result.float() - right).norm() / right.norm())
    return error if math.isfinite(error) else math.inf


def reduce(ranks: list[dict[str, Any]], backend: str) -> dict[str, Any]:
    """One number of tokens of all ranks."""
    times = {name: [max(at) for at in zip(*(rank["times"][name] for rank in ranks), strict=True)] for name in ranks[0]["times"]}
    record: dict[str, Any] = {"tokens": ranks[0]["tokens"], "us": {name: statistics.median(of) for name, of in times.items()}}
    for base in (NCCL, TORCH):
        ratio, ends = speedup(times[base], times[OURS])
        record[f"autotax over {base}"] = [ratio, *ends]
        if MODULES in times:
            ratio, ends = speedup(times[base], times[MODULES])
            record[f"{MODULES} over {base}"] = [ratio, *ends]
    worst = {name: max(errors[name] for rank in ranks for errors in rank["errors"]) for name in times}
    most = TOLERANCE[backend] if backend != "fp8" else min(TOLERANCE[backend], 1.05 * worst[NCCL])
    equal = all(error <= most for error in worst.values())
    return record | {"relative_error": {name: min(error, 1e9) for name, error in worst.items()}, "equal": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description="an unchanged Llama-style stack: NCCL, torch's async tensor parallelism, ours")
    numbers = {"hidden": 8192, "q-heads": 64, "kv-heads": 8, "head-dim": 128, "ffn": 28672, "layers": 4, "rounds": 60}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of a sequence, over all ranks")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--train", action="store_true", help="forward and backward")
    kind.add_argument("--fp8", action="store_true", help="weights in e4m3")
    parser.add_argument("--world-size", type=int, help="default: the GPUs present, or 2 CPU ranks")
    parser.add_argument("--backend", choices=("cuda", "cpu"))
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds after which all ranks are killed")
    options = parser.parse_args()
    try:
        hardware = detect(options.backend)
        count = options.world_size or hardware.default_world_size
        check_world_size(hardware, count)
        for value in (*options.tokens, options.q_heads, options.kv_heads, options.ffn):
            if value < 1 or value % count:
                raise UsageError(f"a size is {value}; {count} ranks share it: give multiples of these")
        sizes = (options.hidden, options.q_heads, options.kv_heads, options.head_dim, options.ffn, options.layers)
        plan = Plan(*sizes, tuple(options.tokens), options.train, options.rounds, options.db, options.fp8)
        ranks = run_ranks(work, count, hardware.backend, plan, timeout=options.timeout)
    except UsageError as error:
        print(f"async_tp.py: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"async_tp.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    judged = "fp8" if options.fp8 else "cuda" if hardware.on_gpu else "cpu"
    scenarios = [reduce([rank["scenarios"][i] for rank in ranks], judged) for i in range(len(plan.tokens))]
    print(f"{'forward and backward' if plan.train else 'forward'}, {plan.layers} layers, {count} ranks, {hardware}")
    if not hardware.on_gpu:
        print("CPU ranks: these figures say nothing about GPUs")
    for row in scenarios:
        us = ", ".join(f"{name} {value:.0f} us" for name, value in row["us"].items())
        gains = ", ".join(f"{ratio[0]:.2f}x {name}" for name, ratio in row.items() if " over " in name)
        print(f"{row['tokens']} tokens: {us}; {gains}; outputs {'equal' if row['equal'] else 'DIFFER'}")
        print(f"  differences from {REFERENCE if plan.fp8 else NCCL}: {row['relative_error']}")
    print(ranks[0]["ran"])
    document = {"place": str(hardware), "software": environment(hardware.backend).to_dict(), "plan": asdict(plan)}
    if options.json:
        document |= {"captured": hardware.on_gpu, "scenarios": scenarios, "ran": ranks[0]["ran"]}
        options.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(row["equal"] for row in scenarios) else 1


if __name__ == "__main__":
    sys.exit(main())
