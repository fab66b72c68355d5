"""How long calls take behind several kinds of work: NCCL's gather and ours in front of a product, and Flash Decode.

    PYTHONPATH=. python results/runtime/chains.py [--db winners.db] [--json chains.json]

Each graph has calls with 16 rows of 8192. Three ways take turns, and their results are compared: NCCL's gather and the product,
the product of rows that are there already, and `AllGatherLinear`. So NCCL less the product is what the gather costs. Then come
decode steps of 1 and 16 sequences over a cache of 32 K tokens, by the best BSP and by what the look-up says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llama import best_bsp, decode_problem
from stack import Cache, Sizes, all_gather, decoder, draw_cache, reduce_scatter
from torch import Tensor
from turns import main, timed

from autotax.hardware import detect
from autotax.heap import World
from autotax.nn import AllGatherLinear, FlashDecode

ROWS, HIDDEN, COLUMNS, CALLS = 16, 8192, (5120, 28672), 6
IDLE_CYCLES = 200_000
"""100 us."""
LLAMA = {"hidden": HIDDEN, "q_heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672, "layers": CALLS, "kv_len": 32768}
BATCHES = (1, 16)

Befores = dict[str, Callable[[], object]]


def befores(world: World) -> Befores:
    """The work before a call: none, 100 us of idling, a product that reads 32 MiB or 512 MiB of weights, one of 80 us that
    reads next to nothing, a collective of the library, and one with a norm behind it, as in a model; that also behind products.
    Attention has a gather of the queries before it.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=world.device, dtype=torch.bfloat16)

    few, weights, more, square = drawn(16, 4096), drawn(4096, 4096), drawn(65536, 4096), drawn(3072, 3072)
    partial_sums, own = drawn(ROWS, HIDDEN), drawn(ROWS // world.size, HIDDEN)
    queries = drawn(ROWS * world.size, 4096)
    norm = torch.nn.RMSNorm(HIDDEN, eps=1e-5, device=world.device, dtype=torch.bfloat16)

    def scatter() -> None:
        reduce_scatter(own, partial_sums)

    def scatter_and_norm() -> Tensor:
        scatter()
        return norm(own)

    return {
        "nothing": lambda: None,
        "idle": lambda: torch.cuda._sleep(IDLE_CYCLES),
        "32 MiB": lambda: torch.mm(few, weights.t()),
        "512 MiB": lambda: torch.mm(few, more.t()),
        "busy": lambda: torch.mm(square, square),
        "gather": lambda: all_gather(queries, few),
        "32 MiB, gather": lambda: (torch.mm(few, weights.t()), all_gather(queries, few)),
        "scatter": scatter,
        "scatter and norm": scatter_and_norm,
        "32 MiB, scatter, norm": lambda: (torch.mm(few, weights.t()), scatter_and_norm()),
        "96 MiB, scatter, norm": lambda: (torch.mm(few, more[: 3 * len(weights)].t()), scatter_and_norm()),
    }


def measure(world: World, db: str | None) -> list[dict[str, Any]]:
    """The microseconds of a call and of the work before it, on this rank."""
    records = []
    with torch.no_grad():
        before = befores(world)
        for n in COLUMNS:
            for name, us in ways_of(world, n, db, before).items():
                records.append({"n": n, "before": name, **us})
        for batch in BATCHES:
            for name, us in steps_of(world, batch, db, before).items():
                records.append({"batch": batch, "before": name, **us})
    return records


def ways_of(world: World, n: int, db: str | None, before: Befores) -> dict[str, dict[str, float]]:
    weights = [torch.randn(n, HIDDEN, device=world.device, dtype=torch.bfloat16) / HIDDEN**0.5 for _ in range(CALLS)]
    x = torch.randn(ROWS // world.size, HIDDEN, device=world.device, dtype=torch.bfloat16)
    whole, gathered = (x.new_empty(ROWS, HIDDEN) for _ in range(2))
    all_gather(whole, x)
    first = AllGatherLinear(weights[0], None, ROWS, sizes=[ROWS], db=db)
    layers = [first, *(AllGatherLinear(weight, like=first) for weight in weights[1:])]

    def nccl(number: int) -> Tensor:
        all_gather(gathered, x)
        return torch.mm(gathered, weights[number].t())

    def product(number: int) -> Tensor:
        return torch.mm(whole, weights[number].t())

    def ours(number: int) -> Tensor:
        return layers[number](x)

    us = behind(world, before, {"nccl": nccl, "product": product, "ours": ours})
    assert first.failure() is None
    first.close()
    return us


def steps_of(world: World, batch: int, db: str | None, before: Befores) -> dict[str, dict[str, float]]:
    sizes = Sizes(**LLAMA, world_size=world.size)
    caches = [draw_cache(sizes, world, batch, torch.bfloat16, seed) for seed in range(CALLS)]
    equal = torch.Generator(world.device).manual_seed(batch)
    q = torch.randn(batch, sizes.q_heads, sizes.head_dim, device=world.device, dtype=torch.bfloat16, generator=equal)
    bsp = best_bsp(decode_problem(sizes, batch, "bf16"), detect(), db)
    steps = {"bsp": decoder(sizes, batch, world, q.dtype, config=bsp), "ours": decoder(sizes, batch, world, q.dtype, db=db)}
    us = behind(world, before, {name: partial(attend, step, q, caches) for name, step in steps.items()})
    for step in steps.values():
        assert step.failure() is None
        step.close()
    return us


def attend(step: FlashDecode, q: Tensor, caches: list[Cache], number: int) -> Tensor:
    return step(q, *caches[number])  # type: ignore[no-any-return]


def behind(
    world: World, before: Befores, ways: dict[str, Callable[[int], Tensor]]
) -> dict[str, dict[str, float]]:
    """The microseconds of each way behind each work, that work among them."""

    def calls(come_first: Callable[[], object], call: Callable[[int], Tensor]) -> list[Tensor]:
        results = []
        for number in range(CALLS):
            come_first()
            results.append(call(number))
        return results

    return {
        name: timed(world, {way: partial(calls, come_first, call) for way, call in ways.items()}, CALLS)
        for name, come_first in before.items()
    }


def show(record: dict[str, Any]) -> str:
    if "batch" in record:
        return f"decode of {record['batch']} behind {record['before']}: ours saves {record['bsp'] - record['ours']:5.1f} us"
    nccl, product, ours = (record[way] for way in ("nccl", "product", "ours"))
    gather, saved = f"{nccl - product:5.1f} us", f"{nccl - ours:5.1f} us"
    return f"{ROWS} x {record['n']} x {HIDDEN} behind {record['before']}: the gather costs {gather}, ours saves {saved}"


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, show))
