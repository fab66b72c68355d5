"""Whether all launches of the library's product of gate and up take the same time. One GPU.

    PYTHONPATH=. python results/runtime/product.py [FILE]

A graph has the products of four layers of Llama 70B on one of two ranks: one row, and weights of their own. The work before the
product of gate and up, the place of its input and its columns differ from case to case. Its results are compared with those of
float32. A trace times each launch. FILE gets the figures as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernels import replayed
from torch import Tensor

LAYERS, HIDDEN, REPLAYS = 4, 8192, 60
COLUMNS = 28672
"""Of gate and up, on one of two ranks. The library's tiles have 128 columns."""
PLACES, STEP = 8, 3 * 2**20 + 512
"""Where the input may lie, and the bytes between two places."""
ALLOWED = 2**-7
"""Largest error of an element, as a share of itself or of the root mean square of all: a rounding to bf16 and the sums' order."""


class Case(NamedTuple):
    """`products`: whether a layer's other products run; `cache`: whether 64 MiB are read, as by attention, before the output
    projection; `kernels`: small ones before the product; `place`: where its input lies.
    """

    columns: int = COLUMNS
    products: bool = True
    cache: bool = False
    kernels: int = 0
    place: int = 0


CASES = [
    *(Case(columns) for columns in (132 * 128, COLUMNS, 256 * 128)),
    *(Case(columns, cache=True) for columns in (132 * 128, COLUMNS, 256 * 128)),
    Case(products=False),
    *(Case(cache=True, kernels=kernels) for kernels in range(1, 5)),
    *(Case(cache=True, place=place) for place in range(1, PLACES)),
]


class Work:
    def __init__(self) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5

        widest = max(case.columns for case in CASES)
        self.before = [(drawn(5120, HIDDEN), drawn(HIDDEN, 4096), drawn(16384, 2048)) for _ in range(LAYERS)]
        self.tested = [drawn(widest, HIDDEN) for _ in range(LAYERS)]
        self.down = [drawn(HIDDEN, 14336) for _ in range(LAYERS)]
        self.memory = torch.empty(PLACES * STEP, device="cuda", dtype=torch.uint8)
        self.x, self.wide, self.weight = drawn(1, HIDDEN), drawn(1, 14336), drawn(HIDDEN)
        self.small = torch.zeros(64, device="cuda")

    def step(self, case: Case) -> list[Tensor]:
        start = case.place * STEP
        x = self.memory[start : start + 2 * HIDDEN].view(torch.bfloat16).view(1, HIDDEN)
        results = []
        for (qkv, output, cache), tested, down in zip(self.before, self.tested, self.down, strict=True):
            if case.products:
                torch.mm(self.x, qkv.t())
            if case.cache:
                torch.sum(cache, 0)
            if case.products:
                torch.mm(self.x[:, :4096], output.t())
            torch.mul(self.x, self.weight, out=x)
            for _ in range(case.kernels):
                self.small.add_(1)
            results.append(torch.mm(x, tested[: case.columns].t()))
            if case.products:
                torch.mm(self.wide, down.t())
        return results

    def launches(self, case: Case) -> tuple[str, list[float]]:
        """The name of the product's kernel, which is the longest of a layer, and the microseconds of each launch."""
        self.step(case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.step(case)
        spans = replayed(graph, REPLAYS, torch.cuda.synchronize)
        x = (self.x * self.weight).float()
        for result, tested in zip(results, self.tested, strict=True):
            expected = x @ tested[: case.columns].float().t()
            scale = expected.square().mean().sqrt()
            assert ((result - expected).abs() <= ALLOWED * expected.abs().clamp(min=scale)).all(), case
        times: dict[str, list[float]] = {}
        for _, lasted, name in spans:
            times.setdefault(name, []).append(lasted / 1e3)
        once_a_layer = [name for name, us in times.items() if len(us) == LAYERS * REPLAYS]
        name = max(once_a_layer, key=lambda name: statistics.median(times[name]))
        return name, times[name]


def show(record: dict[str, Any]) -> str:
    twentieths = statistics.quantiles(record["us"], n=20)
    us = ", ".join(f"{value:.1f}" for value in (twentieths[0], statistics.median(record["us"]), twentieths[-1]))
    return f"{Case(**record['case'])}: {us} us (5 %, median, 95 % of launches), {record['kernel']}"


if __name__ == "__main__":
    torch.manual_seed(0)
    work, records = Work(), []
    for case in CASES:
        name, us = work.launches(case)
        records.append({"case": case._asdict(), "kernel": name, "us": us})
        print(show(records[-1]))
    for path in sys.argv[1:]:
        Path(path).write_text(json.dumps(records) + "\n")
