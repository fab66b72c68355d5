"""Decode steps of a Llama-style stack with the norms fused, in bf16 and with FP8 weights, in editions of the same weights:

    PYTHONPATH=. python results/runtime/decode.py --batches 1 4 16 --json decode.json

- `NCCL`: torch's products, NCCL's sum, and torch's add and RMSNorm; with FP8 weights a kernel quantises in front of each product.
- `NCCL, norm fused`: one kernel of ours adds, norms and quantises behind NCCL's sum.
- `autotax`: layers with `norm=`. They take the winners that look-ups answer; in bf16 they take the fastest of three ways.
- `one operator`: what our pass puts into compiled graphs of vLLM, at both boundaries. It takes the fastest of three ways, and its
  norm quantises as the next product needs it. Queries and attention are those of `autotax`.
- `no exchange`: the products, our attention and the norm of each rank's own addends. Its results are wrong; no other edition on
  these products can be faster.

Every rank has all rows. Attention over the KV cache is FlashDecode, in NCCL's editions with the best bulk-synchronous config.
Tune first: `autotax tune --shapes results/runtime/decode.toml --db DB`. Each edition is captured in a CUDA graph, its outputs
are compared with the first edition's, and replays are timed in turn. CPU ranks run it too, with small sizes, to try it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from llama import best_bsp, decode_problem
from stack import Cache, Sizes, Weights, all_gather, decoder, draw_cache
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from work import Runnable, timed

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.engines import norm_pass
from autotax.hardware import detect
from autotax.heap import World
from autotax.kernels.scaled_product import quantise
from autotax.nn import AllReduceNorm, FlashDecode, LinearAllReduce, Tuned
from autotax.operators.problems import AllReduceNorm as NormProblem
from autotax.operators.problems import HeadGather
from autotax.operators.scaled import library_product, quantised, scales_of
from autotax.runner.ranks import RankFailure, run_ranks
from autotax.spaces import space_for
from autotax.torch import scaled
from autotax.torch.normed import RmsNorm
from autotax.tuner.finalists import speedup

NCCL, FUSED, OURS, OPERATOR, BOUND = EDITIONS = ("NCCL", "NCCL, norm fused", "autotax", "one operator", "no exchange")
EPS = 1e-5
TOLERANCE = {"bf16": 2e-2, "e4m3": 6e-2}
"""Greatest ||theirs - NCCL's|| / ||NCCL's||. A value that bf16 rounds in another place may get the next e4m3, 6 % away."""


@triton.jit
def quantise_rows(x, codes, scales, k, BLOCK: tl.constexpr, TARGET: tl.constexpr):
    """Quantises a row by its largest magnitude."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * k + columns, mask=columns < k, other=0.0).to(tl.float32)
    bits, scale = quantise(values[None, :], 1.0, float("inf"), "row", TARGET)
    tl.store(codes + row * k + columns[None, :], bits, mask=(columns < k)[None, :])
    tl.store(scales + row + tl.arange(0, 1), scale)


def in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [m, k] in e4m3, and the scales of its rows."""
    if not x.is_cuda:
        scales = scales_of(x, "row")
        return quantised(x, scales, "row"), scales
    codes, scales = torch.empty_like(x, dtype=torch.uint8), x.new_empty(len(x), 1, dtype=torch.float32)
    quantise_rows[(len(x),)](x, codes, scales, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), TARGET="cuda", num_warps=8)
    return codes.view(torch.float8_e4m3fn), scales


@dataclass(frozen=True)
class Weight:
    """[n, k], and with FP8 its scales [1, n]."""

    values: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, dtype: str) -> Weight:
        if dtype == "bf16":
            return cls(values)
        scales = scales_of(values, "row")
        return cls(quantised(values, scales, "row"), scales.view(1, -1))

    def times(self, h: Any) -> Tensor:
        """h @ W.T; with FP8 h is codes and scales, or bf16 that is quantised first."""
        if self.scales is None:
            return torch.mm(h, self.values.t())
        codes, scales = in_e4m3(h) if isinstance(h, Tensor) else h
        out = codes.new_empty(len(codes), len(self.values), dtype=torch.bfloat16)
        library_product(codes, scales, self.values, self.scales, "row", out)
        return out


@dataclass(frozen=True)
class Plan:
    sizes: Sizes
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    bsp: dict[int, Config]
    db: str | None
    rounds: int


class Step:
    """A decode step of an edition: x [batch, hidden], the same on all ranks, to the normed result of the last layer."""

    def __init__(
        self, plan: Plan, world: World, layers: Sequence[Sequence[Weight]], norm: Tensor, caches: Sequence[Cache]
    ) -> None:
        self.plan, self.world, self.layers, self.norm, self.caches = plan, world, layers, norm, caches
        self.batch, self.fp8 = len(caches[0][2]), layers[0][0].scales is not None
        self.made: list[Any] = []

    def first(self, x: Tensor) -> Any:
        return rms_norm(x, self.norm.shape, self.norm, EPS)

    def gather(self, own: Tensor) -> Tensor:
        """The queries [batch, heads, head_dim] of all ranks."""
        sizes = self.plan.sizes
        gathered = own.new_empty(sizes.world_size * len(own), sizes.q_columns)
        all_gather(gathered, own)
        return gathered.view(sizes.world_size, len(own), -1, sizes.head_dim).transpose(0, 1).reshape(len(own), -1, sizes.head_dim)

    def boundary(self, layer: int, which: int, a: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        """The normed sum of a row-parallel product and the residual, as the next product takes it; and the new residual."""
        total = self.layers[layer][which].times(a)
        dist.all_reduce(total)
        x = x + total
        return rms_norm(x, self.norm.shape, self.norm, EPS), x

    def attend(self, qkv: Tensor, cache: Cache, decode: FlashDecode) -> Tensor:
        sizes = self.plan.sizes
        o = decode(self.gather(qkv[:, : sizes.q_columns].contiguous()), *cache).view(self.batch, -1)
        return o[:, self.world.rank * sizes.q_columns :][:, : sizes.q_columns].contiguous()

    def run(self, x: Tensor, decode: FlashDecode) -> Tensor:
        h = self.first(x)
        for number, (qkv, _, gate_up, _) in enumerate(self.layers):
            a = self.attend(qkv.times(h), self.caches[number], decode)
            h, x = self.boundary(number, 1, a, x)
            gate, up = gate_up.times(h).chunk(2, dim=-1)
            h, x = self.boundary(number, 3, silu(gate) * up, x)
        return x

    def chosen(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        for module in self.made:
            if failure := module.failure():
                raise RuntimeError(failure)
            module.close()


class FusedNorm(Step):
    """NCCL's sum, then one kernel."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fused = self.norm_of("bsp")

    def norm_of(self, variant: str) -> AllReduceNorm:
        sizes, quant = self.plan.sizes, "row" if self.fp8 else "none"
        problem = NormProblem(self.batch, sizes.hidden, "bf16", sizes.world_size, "added", quant)
        config = space_for(problem, detect(self.world.backend)).default(variant)
        where = {"device": self.world.device, "config": config, "quant": quant, "eps": EPS}
        norm = AllReduceNorm(sizes.hidden, self.batch, None, torch.bfloat16, **where)
        self.made.append(norm)
        return norm

    def normed(self, outputs: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
        y, x, *scales = outputs
        return ((y, scales[0].view(-1, 1)) if self.fp8 else y), x

    def boundary(self, layer: int, which: int, a: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        return self.normed(self.fused(self.layers[layer][which].times(a), self.norm, x))


class OurQueries(FusedNorm):
    """The queries by our kernel."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        sizes = self.plan.sizes
        heads: Problem = HeadGather(self.batch, sizes.q_heads, sizes.head_dim, "bf16", sizes.world_size)
        self.queries = Tuned(heads, device=self.world.device, db=self.plan.db)
        self.made.append(self.queries)

    def gather(self, own: Tensor) -> Tensor:
        return self.queries(own.view(len(own), -1, self.plan.sizes.head_dim))


class Ours(OurQueries):
    """Our layers, with what look-ups answer for the sum and the norm."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        sizes, db = self.plan.sizes, self.plan.db
        quant, prepared = "row" if self.fp8 else "none", [self.batch]
        norm = AllReduceNorm(
            sizes.hidden, self.batch, device=self.world.device, db=db, quant=quant, eps=EPS, sizes=prepared
        )
        self.rows: dict[tuple[int, int], Any] = {}
        for number, layer in enumerate(self.layers):
            for which in (1, 3):
                more: Any = {"scales": layer[which].scales, "quantize": "row"} if self.fp8 else {}
                options = {"db": db, "norm": norm, "sizes": prepared, **more}
                self.rows[number, which] = LinearAllReduce(layer[which].values, None, self.batch, **options)
        self.made += [*self.rows.values(), norm]

    def boundary(self, layer: int, which: int, a: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        return self.normed(self.rows[layer, which].normed(a, self.norm, x))

    def chosen(self) -> dict[str, str]:
        return {name: self.way(self.rows[0, which]) for which, name in ((1, "output projection"), (3, "down"))}

    def way(self, layer: Any) -> str:
        """The way that a layer's `normed` runs. Layers with a weight in e4m3 know one way."""
        if getattr(layer, "_whole", None):
            return "one kernel"
        apart = getattr(layer, "_apart", {}).get(self.batch, False)
        return "product; sum and norm" if apart else f"{layer.choices[0].config or 'NCCL'}; norm"


@torch.compile(dynamic=False)
def added_and_normed(total: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of an engine, for sums."""
    residual = residual + total
    return rms_norm(residual, weight.shape, weight, eps), residual


class OneOperator(OurQueries):
    """The operator that our pass puts into compiled graphs of vLLM."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.group = dist.group.WORLD
        self.quant = "row" if self.fp8 else "none"
        norm_pass.use({"engine": norm_pass.Norm(self.quant, self.alone, (), (), ())})
        if self.fp8:
            for layer in self.layers:
                for weight in (layer[1], layer[3]):
                    scaled.run_by(weight.values, scaled.Layer(partial(self.summed, weight), weight.times))

    def alone(self, total: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, ...]:
        if not self.fp8:
            return added_and_normed(total, residual, norm.weight, norm.eps)
        return self.fused.of_sums(residual + total, norm.weight)

    def summed(self, weight: Weight, h: Tensor) -> Tensor:
        """The engine's product and sum."""
        total = weight.times(h)
        dist.all_reduce(total)
        return total

    def boundary(self, layer: int, which: int, a: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        weight, quantize = self.layers[layer][which], "row" if self.fp8 else ""
        of_b = weight.values.t(), None, weight.scales, quantize
        of_y = self.norm, EPS, self.quant, None, self.group.group_name
        return self.normed(tuple(torch.ops.autotax.fused_matmul_all_reduce_norm(a, *of_b, x, *of_y)))

    def chosen(self) -> dict[str, str]:
        return {f"product {k} x {n}": way for (_, (k, n), *_), way in norm_pass.chosen.items()}


class NoExchange(FusedNorm):
    """A step without its exchanges: a bound."""

    def gather(self, own: Tensor) -> Tensor:
        if not hasattr(self, "queries"):
            self.queries = own.new_ones(self.batch, self.plan.sizes.q_heads, self.plan.sizes.head_dim)
        return self.queries

    def boundary(self, layer: int, which: int, a: Tensor, x: Tensor) -> tuple[Any, Tensor]:  # noqa: ARG002
        return self.normed(self.fused.of_sums(self.layers[layer][which].times(a), self.norm))


def work(world: World, plan: Plan) -> list[dict[str, Any]]:
    """One rank: each dtype and batch in all editions."""
    sizes, records = plan.sizes, []
    with torch.no_grad():
        drawn = [Weights.draw(sizes, world, torch.bfloat16, seed) for seed in range(sizes.layers)]
        norm = torch.ones(sizes.hidden, device=world.device, dtype=torch.bfloat16)
        for batch in plan.batches:
            caches = [draw_cache(sizes, world, batch, torch.bfloat16, seed) for seed in range(sizes.layers)]
            theirs = decoder(sizes, batch, world, torch.bfloat16, config=plan.bsp[batch])
            ours = decoder(sizes, batch, world, torch.bfloat16, db=plan.db)
            for dtype in plan.dtypes:
                layers = [[Weight.of(weight.detach(), dtype) for weight in weights] for weights in drawn]
                kinds = zip(EDITIONS, (Step, FusedNorm, Ours, OneOperator, NoExchange), strict=True)
                steps = {name: kind(plan, world, layers, norm, caches) for name, kind in kinds}
                x = residual(world, plan, batch, 0)
                runs = {name: runnable(step, x, theirs if name in (NCCL, FUSED) else ours) for name, step in steps.items()}
                before = [check(world, plan, x, runs, batch, seed) for seed in (1, 2)]
                times: dict[str, list[float]] = {name: [] for name in EDITIONS}
                for number in range(plan.rounds):
                    for name in EDITIONS if number % 2 else EDITIONS[::-1]:
                        times[name].append(timed(world, runs[name]))
                errors = [*before, check(world, plan, x, runs, batch, 3)]
                worst = {name: max(error[name] for error in errors) for name in errors[0]}
                chosen = {name: steps[name].chosen() for name in (OURS, OPERATOR)}
                records.append({"dtype": dtype, "batch": batch, "times": times, "errors": worst, "chosen": chosen})
                world.synchronize()
                del runs
                for step in steps.values():
                    step.close()
            for decode in (theirs, ours):
                decode.close()
    return records


def runnable(step: Step, x: Tensor, decode: FlashDecode) -> Runnable:
    return Runnable(lambda: (step.run(x, decode),), x.is_cuda)


def residual(world: World, plan: Plan, batch: int, seed: int) -> Tensor:
    """The same on all ranks."""
    generator = torch.Generator(world.device).manual_seed(100 + seed)
    return torch.randn(batch, plan.sizes.hidden, generator=generator, device=world.device).bfloat16()


def check(world: World, plan: Plan, x: Tensor, runs: dict[str, Runnable], batch: int, seed: int) -> dict[str, float]:
    """The relative difference of each edition from the first, for another input; infinite if one is not finite."""
    x.copy_(residual(world, plan, batch, seed))
    for run in runs.values():
        run()
    right = runs[NCCL].out[0].float()
    errors = {name: float((runs[name].out[0].float() - right).norm() / right.norm()) for name in EDITIONS[:-1]}
    return {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="decode steps of a Llama-style stack with the norms fused")
    numbers = {"hidden": 8192, "q-heads": 64, "kv-heads": 8, "head-dim": 128, "ffn": 28672, "layers": 4, "kv-len": 32768}
    for name, default in (numbers | {"rounds": 60}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--dtypes", choices=tuple(TOLERANCE), nargs="+", default=list(TOLERANCE))
    parser.add_argument("--world-size", type=int, default=2, help="default 2")
    parser.add_argument("--backend", choices=("cuda", "cpu"))
    parser.add_argument("--db", help="database of winners, a path or a URL; default: yours")
    parser.add_argument("--json", type=Path, help="file for the document")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which all ranks are killed")
    options = parser.parse_args()
    if options.db:
        os.environ["AUTOTAX_DB"] = options.db  # operators of torch have no other way to be given one
    hardware = detect(options.backend)
    heads = (options.q_heads, options.kv_heads, options.head_dim)
    sizes = Sizes(options.hidden, *heads, options.ffn, options.layers, options.kv_len, options.world_size)
    bsp = {batch: best_bsp(decode_problem(sizes, batch, "bf16"), hardware, options.db) for batch in options.batches}
    plan = Plan(sizes, tuple(options.batches), tuple(options.dtypes), bsp, options.db, options.rounds)
    try:
        ranks = run_ranks(work, options.world_size, hardware.backend, plan, timeout=options.timeout)
    except RankFailure as failure:
        print(f"decode.py: the ranks failed\n{failure}", file=sys.stderr)
        return 1
    print(f"{options.layers} layers, KV {options.kv_len}, {options.world_size} ranks, {hardware}; microseconds of a step")
    right, document = True, []
    for of_ranks in zip(*ranks, strict=True):
        mine = of_ranks[0]
        times = {name: [max(at) for at in zip(*(rank["times"][name] for rank in of_ranks), strict=True)] for name in EDITIONS}
        us = {name: statistics.median(of) for name, of in times.items()}
        ratios = {name: speedup(times[name], times[OURS]) for name in (NCCL, FUSED, OPERATOR)}
        errors = {name: max(rank["errors"][name] for rank in of_ranks) for name in EDITIONS[1:-1]}
        right = right and max(errors.values()) <= TOLERANCE[mine["dtype"]]
        gains = ", ".join(f"{ratio:.2f}x [{low:.2f}, {high:.2f}] over {name}" for name, (ratio, (low, high)) in ratios.items())
        shown = ", ".join(f"{name} {value:.1f}" for name, value in us.items())
        print(f"{mine['dtype']}, batch {mine['batch']}: {shown}; autotax {gains}", flush=True)
        print(f"  without any exchange NCCL's edition would be {us[NCCL] / us[BOUND]:.2f}x as fast")
        print(f"  differences from NCCL {errors}; {mine['chosen']}")
        document.append(mine | {"us": us, "ratios": {name: [ratio, *ends] for name, (ratio, ends) in ratios.items()}})
    if options.json:
        options.json.write_text(json.dumps({"place": str(hardware), "found": document}) + "\n", encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
