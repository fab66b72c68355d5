"""Times the kernel that quantises a bf16 A [rows, k] to e4m3, on one GPU:

    PYTHONPATH=. python results/quantising.py [--rows 8 256 1024] [--k 5120 8192]

A figure is the difference of two graphs in microseconds a call: products of 256 x 2048 x 2048 with the kernel behind each, and
without it. Four As take turns. Beside it, the time that reading A and writing its codes takes at the rate of a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from autotax.hardware import detect
from autotax.kernels.quantising import quantised_by_kernel
from autotax.operators.scaled import SCALES_OF, quantised, scales_of

CALLS, REPLAYS = 20, 30
QUANTIZE = ("row", "block")


def replay_us(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """The median time of a call in each graph, whose replays take turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(REPLAYS):
        for of_graph, graph in zip(times, graphs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            of_graph.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return [median(of_graph) for of_graph in times]


def captured(call: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    return graph


class Times:
    """The times of one size; products stand in front of every call."""

    def __init__(self, rows: int, k: int) -> None:
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.weights = [drawn(2048, 2048) for _ in range(8)]
        self.x, self.out = drawn(256, 2048), drawn(256, 2048)
        self.inputs = [drawn(rows, k) for _ in range(4)]
        self.copies = [drawn(rows * k * 3 // 4) for _ in range(8)]
        self.nowhere, self.hardware = torch.zeros(2, dtype=torch.int64, device="cuda"), detect()

    def product(self, number: int) -> None:
        torch.mm(self.x, self.weights[number % 8], out=self.out)

    def copy(self, number: int) -> None:
        self.product(number)
        self.copies[number % 4].copy_(self.copies[4 + number % 4])

    def quantise(self, number: int, quantize: str) -> tuple[torch.Tensor, torch.Tensor]:
        self.product(number)
        return quantised_by_kernel(self.inputs[number % 4], None, SCALES_OF[quantize], self.nowhere, self.hardware)

    def check(self, quantize: str) -> None:
        """Compares codes and scales with torch's."""
        codes, scales = self.quantise(0, quantize)
        right = scales_of(self.inputs[0], quantize)
        assert torch.equal(scales.reshape(-1), right.reshape(-1))
        assert torch.equal(codes.view(torch.uint8), quantised(self.inputs[0], right, quantize).view(torch.uint8))

    def measured(self) -> list[float]:
        quantisers = [partial(self.quantise, quantize=quantize) for quantize in QUANTIZE]
        ways: list[Callable[[int], object]] = [self.product, *quantisers, self.copy]
        without, *times = replay_us([captured(way) for way in ways])
        return [time - without for time in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--k", type=int, nargs="+", default=[5120, 8192])
    options = parser.parse_args()
    print("| rows | k | " + " | ".join(QUANTIZE) + " | copy |\n|---|---|---|---|---|")
    for rows in options.rows:
        for k in options.k:
            times = Times(rows, k)
            for quantize in QUANTIZE:
                times.check(quantize)
            print(f"| {rows} | {k} | " + " | ".join(f"{us:.2f}" for us in times.measured()) + " |", flush=True)


if __name__ == "__main__":
    main()
