"""Which module of the Llama-style stack gains what: the stack on NCCL, with one kind of module on autotax.nn, and with all.

    PYTHONPATH=. python results/runtime/parts.py [--db winners.db] [--json parts.json]

Four layers with the sizes of Llama 70B: prefill of 2048 tokens, decode steps of 1 and 16 sequences over a cache of 32 K. The
stacks take turns, replay by replay, and the result of each is compared with that of NCCL before it is timed. `promised` is what a
winner saves over BSP by the figure that it was proven with. The stack on NCCL takes part twice: what it gains over itself is the
error of the other figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llama import Plan, arguments, planned, promises
from stack import Cache, Layer, Sizes, Stack, Weights, draw_cache, nccl_stack, tuned_stack
from torch import Tensor
from turns import main, timed
from work import DTYPES, decoding, draw

from autotax.hardware import detect
from autotax.heap import World

PREFILL, DECODE, LAYERS = 2048, (1, 16), 4
MODULES = {"qkv": "QKV", "gate_up": "gate and up", "o": "output projection", "down": "down", "attention": "attention"}
"""The attributes of a layer, and the names of `llama.problems`."""


def mixed(sizes: Sizes, weights: list[Weights], ours: Stack, theirs: Stack, names: tuple[str, ...]) -> Stack:
    """The stack on NCCL, with the modules of these names from ours."""
    layers = []
    for w, *both in zip(weights, ours.layers, theirs.layers, strict=True):
        qkv, gate_up, o, down = (getattr(both[name not in names], name) for name in ("qkv", "gate_up", "o", "down"))
        layers.append(Layer(sizes, w, qkv, list(gate_up), [o, down]))
    decoders = (ours if "attention" in names else theirs).decoders
    return Stack(sizes, layers, {int(batch): decoder for batch, decoder in decoders.items()})


def editions(world: World, db: str | None) -> tuple[Plan, list[Weights], Stack, Stack]:
    """Returns the plan, the weights of each layer, our stack and the stack on NCCL."""
    options = ["--layers", str(LAYERS), "--gate-up", "one", "--prefill", str(PREFILL), "--decode", *map(str, DECODE)]
    plan = planned(arguments().parse_args(options + ["--db", db] * bool(db)), detect())
    weights = [Weights.draw(plan.sizes, world, DTYPES[plan.dtype], seed) for seed in range(LAYERS)]
    ours = tuned_stack(plan.sizes, world, weights, plan.gathered, plan.decode, db, plan.halves, plan.row_parallel)
    return plan, weights, ours, nccl_stack(plan.sizes, world, weights, plan.gathered, plan.bsp)


def caches_of(world: World, plan: Plan, batch: int) -> list[Cache]:
    return [draw_cache(plan.sizes, world, batch, DTYPES[plan.dtype], seed) for seed in range(LAYERS)]


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    """The microseconds of a layer with each choice of modules, for each number of rows."""
    records = []
    with torch.no_grad():
        plan, weights, ours, theirs = editions(world, db)
        for rows in (PREFILL, *DECODE):
            names = [name for name in MODULES if name != "attention" or rows in DECODE]
            choices = {"nccl": (), "nccl again": (), **{name: (name,) for name in names}, "all": tuple(names)}
            x = draw(world, plan, rows, 0)
            caches = caches_of(world, plan, rows) if rows in DECODE else []
            stacks = {name: mixed(plan.sizes, weights, ours, theirs, chosen) for name, chosen in choices.items()}
            runs = {name: decoding(stack, caches) if caches else stack.prefill for name, stack in stacks.items()}
            us = timed(world, {name: partial(results, run, x) for name, run in runs.items()}, LAYERS)
            promised = promises(plan, rows, rows in DECODE, detect())
            records.append({"rows": rows, "us": us, "promised": {name: promised[MODULES[name]] for name in names}})
    return records


def results(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    return [run(x)]


def show(record: dict[str, Any]) -> str:
    nccl, promised = record["us"]["nccl"], record["promised"] | {"all": sum(record["promised"].values()), "nccl again": 0}
    gains = [f"{name} {nccl - us:.1f} of {promised[name]:.1f}" for name, us in record["us"].items() if name != "nccl"]
    return f"{record['rows']} rows: nccl {nccl:.1f} us a layer; gained of promised: {', '.join(gains)}"


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
