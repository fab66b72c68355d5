"""The error of each Flash Decode variant by channel, where V has outlier channels, tiny or large numbers, infinities, NaNs.

    PYTHONPATH=. python -m results.precision.outliers            # two CPU ranks, a minute or two
    PYTHONPATH=. python -m results.precision.outliers --gpu      # two ranks that share one GPU; without bsp (no library)

One table: a row a distribution, a column a variant. A figure is the root mean square over the rows of (out - right), over that
of right, of the worst channel; behind a slash that of the channel that differs from the others. "ok" is a channel that is
infinite or NaN as it must be, "not finite" one that must not be.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.hardware import Hardware, detect
from autotax.heap.world import World
from autotax.operators.problems import FlashDecode
from autotax.operators.verification import make_inputs
from autotax.spaces import space_for

ODD = 5
"""The channel that differs."""
Caches = list[tuple[Tensor, ...]]


def _times(factor: float) -> Callable[[Tensor], None]:
    def scaled(v: Tensor) -> None:
        v.mul_(factor)

    return scaled


def _column(factor: float) -> Callable[[Tensor], None]:
    def scaled(v: Tensor) -> None:
        v[..., ODD] *= factor

    return scaled


def _first(number: float) -> Callable[[Tensor], None]:
    def placed(v: Tensor) -> None:
        v[:, :, 0, ODD] = number

    return placed


def _log_uniform(v: Tensor) -> None:
    v.mul_(torch.exp2(torch.linspace(-20, 10, v.shape[-1], device=v.device).round()).to(v.dtype))


DISTRIBUTIONS: dict[str, Callable[[Tensor], None]] = {
    "normal": _times(1.0),
    "one channel x 1,000": _column(1000.0),
    "one channel x 30,000": _column(30000.0),
    "one infinite channel": _first(math.inf),
    "one NaN channel": _first(math.nan),
    "all x 1e-31": _times(1e-31),
    "all x 1e30": _times(1e30),
    "channels from 2^-20 to 2^10": _log_uniform,
}
PACKED = {"protocol": "ll", "payload": "packed"}
CASES: list[tuple[str, dict[str, str]]] = [
    *((variant, {}) for variant in ("bsp", "gather", "fused", "single", "resident", "compact")), ("single", PACKED)
]  # fmt: skip


def config_of(problem: FlashDecode, hardware: Hardware, variant: str, ways: dict[str, str]) -> Config:
    """The variant's default with these parameters, a split cache and both phases of an exchange."""
    space = space_for(problem, hardware)
    wanted = space.default(variant).values | {"splits": 4} | ways
    config = Config.of(variant, wanted)
    return config if config in space else Config.of(variant, space.default(variant).values | ways)


def drawn(problem: FlashDecode, rank: int, device: torch.device, name: str) -> tuple[Tensor, ...]:
    """q, k, v, lengths of one rank."""
    tensors = make_inputs(problem, 0, rank, device).tensors
    DISTRIBUTIONS[name](tensors[2])
    return tensors


def right(problem: FlashDecode, device: torch.device, name: str) -> Tensor:
    """The output in float64, over the tokens of all ranks."""
    every = [drawn(problem, rank, device, name) for rank in range(problem.world_size)]
    q = every[0][0].double().view(problem.batch, problem.kv_heads, problem.group, problem.head_dim)
    k, v = (torch.cat([tensors[i] for tensors in every], 2)[:, :, : problem.kv_len].double() for i in (1, 2))
    shares = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(problem.head_dim), -1)
    return (shares @ v).view(-1, problem.head_dim)


def errors_of(out: Tensor, wanted: Tensor) -> str:
    """The errors of an output, as the docstring of this module has them."""
    out, errors = out.double().view(wanted.shape), []
    for channel in range(wanted.shape[1]):
        mine, its = out[:, channel], wanted[:, channel]
        if its.isfinite().all():
            errors.append(float((mine - its).norm() / its.norm()))
        else:
            same = torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0))
            errors.append(0.0 if same else math.inf)
    others = max(error if error == error else math.inf for channel, error in enumerate(errors) if channel != ODD)
    own = ("ok" if errors[ODD] == 0.0 else "wrong") if not wanted[:, ODD].isfinite().all() else f"{errors[ODD]:.1e}"
    return f"{others:.1e} / {own}" if math.isfinite(others) else f"not finite / {own}"


def on_cpu(world: World, problem: FlashDecode, config: Config) -> dict[str, Tensor]:
    """The outputs of one rank by distribution."""
    from autotax.kernels import prepare
    from autotax.runner.rank_worker import open_context

    context = open_context(world, detect("cpu"), 64 << 20)
    operator = prepare(problem, config, context)
    outputs = {}
    for name in DISTRIBUTIONS:
        out = make_inputs(problem, 0, world.rank, world.device).out
        operator(*drawn(problem, world.rank, world.device, name), out)
        world.synchronize()
        assert operator.failure() is None, operator.failure()
        outputs[name] = out
    context.heap.close()
    return outputs


def on_one_gpu(problem: FlashDecode, config: Config) -> dict[str, Tensor]:
    """The outputs of rank 0 by distribution."""
    from tests.gpu.ranks_of_one_gpu import HEAP_BYTES, Rank, share_of

    slabs = [torch.zeros(HEAP_BYTES, dtype=torch.uint8, device="cuda") for _ in range(problem.world_size)]
    ranks = [Rank(problem, config, rank, slabs, share_of(problem.world_size)) for rank in range(problem.world_size)]
    first = next(iter(DISTRIBUTIONS))
    for rank in ranks:  # all kernels are compiled before one waits for another
        with rank.context.rehearsal():
            rank.operator(*drawn(problem, 0, slabs[0].device, first), rank.calls[0].out)
    outputs = {}
    for name in DISTRIBUTIONS:
        every = [drawn(problem, rank, slabs[0].device, name) for rank in range(problem.world_size)]
        torch.cuda.synchronize()
        for rank, tensors in zip(ranks, every, strict=True):
            with torch.cuda.stream(rank.stream):
                rank.operator(*tensors, rank.calls[0].out)
        torch.cuda.synchronize()
        failures = [failure for rank in ranks if (failure := rank.operator.failure())]
        assert not failures, f"{config}: {failures}"
        outputs[name] = ranks[0].calls[0].out.clone()
    return outputs


def main(gpu: bool) -> None:
    """Prints the table."""
    from autotax.runner.ranks import Ranks
    from results.precision import outliers  # by its name, which ranks can import
    from tests.gpu.ranks_of_one_gpu import share_of

    problem = FlashDecode(8, 64, 8, 128, 32768, "bf16", 2) if gpu else FlashDecode(2, 8, 2, 64, 512, "bf16", 2)
    # Two ranks share the GPU: only kernels whose programs all run at once can wait for each other there.
    cases = [case for case in CASES if not gpu or case[0] in ("single", "resident", "compact")]
    hardware = share_of(2) if gpu else detect("cpu")
    device = torch.device("cuda" if gpu else "cpu")
    wanted = {name: right(problem, device, name) for name in DISTRIBUTIONS}
    columns = []
    with Ranks(2) if not gpu else torch.no_grad() as ranks:
        for variant, ways in cases:
            config = config_of(problem, hardware, variant, ways)
            outputs = on_one_gpu(problem, config) if gpu else ranks.run(outliers.on_cpu, problem, config)[0]
            columns.append([errors_of(outputs[name], wanted[name]) for name in DISTRIBUTIONS])
    print(f"{problem.key}, {'one ' + hardware.device if gpu else 'CPU ranks'}\n")
    print("| V | " + " | ".join(f"`{variant}`" + (" packed" if ways else "") for variant, ways in cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for name, cells in zip(DISTRIBUTIONS, zip(*columns, strict=True), strict=True):
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main("--gpu" in sys.argv[1:])
