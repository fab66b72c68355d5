"""GEMM + Reduce-Scatter, and GEMM + All-Reduce: the row-parallel linear layer. Its product is summed over the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autotax.core.problem import Problem, ceil_div, choice, dtype, ranks, size
from autotax.operators.declaration import Operator, Rates
from autotax.operators.links import links_us

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from autotax.core.config import Config
    from autotax.hardware import Hardware
    from autotax.operators.inputs import Call, Draw


@dataclass(frozen=True)
class GemmReduceScatter(Problem):
    """C = the sum over `world_size` ranks of A @ B.T, where each rank has its own A [m, k] and B.

    - `output="scattered"`: rank r gets rows r*R ... r*R + R - 1 of C, R = ceil(m / world_size), as [R, n]. Rows past m are
      padding; they are zero.
    - `output="replicated"`: every rank gets C [m, n].
    - `weight="nk"`: B is [n, k], as torch's linear layers store it. `weight="kn"`: B is [k, n], as the input gradient of a
      column-parallel layer needs it.

    `k` is the part of the inner dimension that one rank holds.
    """

    m: int = size("rows of A and C", varying=True)
    n: int = size("columns of C")
    k: int = size("the inner dimension on each rank")
    dtype: str = dtype()
    output: str = choice(
        "scattered: each rank its own rows; replicated: every rank all rows", ("scattered", "replicated"), default="scattered"
    )
    world_size: int = ranks()
    weight: str = choice("nk or kn: how B is stored", ("nk", "kn"), default="nk", unnamed=True)

    op: ClassVar[str] = "gemm-reduce-scatter"

    @property
    def nbytes(self) -> int:
        """See Problem.nbytes."""
        return (self.m * self.k + self.n * self.k + self.out_rows * self.n) * self.item_size

    @property
    def shard_rows(self) -> int:
        """Rows of C that one rank adds up, padding included."""
        return ceil_div(self.m, self.world_size)

    @property
    def out_rows(self) -> int:
        """Rows of C that one rank gets."""
        return self.m if self.output == "replicated" else self.shard_rows

    def brief(self) -> str:
        """`m 512 x 8192 x 7168`"""
        unusual = {"output": self.output} if self.output != "scattered" else {}
        unusual |= {"weight": self.weight} if self.weight != "nk" else {}
        unusual |= {"dtype": self.dtype} if self.dtype != "bf16" else {}
        return f"m {self.m} x {self.n} x {self.k}" + "".join(f", {name} {value}" for name, value in unusual.items())


FEWEST_ROWS = 8
"""Fewest rows of a C in which some rows may be infinite or NaN."""

operator = Operator(GemmReduceScatter)
operator.example(on_gpu=GemmReduceScatter(512, 8192, 7168), on_cpu=GemmReduceScatter(64, 96, 64, "fp32"))


@operator.inputs
def draw(problem: GemmReduceScatter, draw: Draw) -> Call:
    """The rank's A [m, k] and its B, [n, k] or [k, n] -> its part of C."""
    from autotax.operators.inputs import Call

    a = draw.normal(problem.m, problem.k, tensor=6)
    shape = (problem.n, problem.k) if problem.weight == "nk" else (problem.k, problem.n)
    b = draw.normal(*shape, tensor=7)
    if draw.extreme:
        _spread(problem, a, b if problem.weight == "nk" else b.t(), draw)
    return Call((a, b), draw.empty(problem.out_rows, problem.n))


def _spread(problem: GemmReduceScatter, a: Tensor, b: Tensor, draw: Draw) -> None:
    """Scales rows and columns of C, equally on all ranks, and channels of A, with the inverse for B; one row is infinite, one
    NaN.
    """
    from autotax.operators.inputs import SPREADS, powers, scale

    seed, reach = draw.seed, SPREADS[problem.dtype]
    channels = powers((problem.k,), reach.channel, seed, 2, draw.rank)
    scale(a, powers((problem.m,), reach.row, seed, 1)[:, None] * channels)
    scale(b, powers((problem.n,), reach.column, seed, 3)[:, None] / channels)
    if problem.m >= FEWEST_ROWS and draw.rank == 0:
        a[seed % problem.m, seed % problem.k] = math.inf
        a[(seed + problem.m // 2) % problem.m, seed % problem.k] = math.nan


@operator.reference
def reference(problem: GemmReduceScatter, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor]:
    """The rank's part of C, float32, added up rank after rank; and its spread."""
    import torch

    from autotax.operators.verification import together, unit

    first = 0 if problem.output == "replicated" else rank * problem.shard_rows
    parts, spreads = [], []
    for call in calls:
        a = call.tensors[0][first : first + problem.out_rows].float()
        b = (call.tensors[1] if problem.weight == "nk" else call.tensors[1].t()).float()
        parts.append(a @ b.t())
        b = b.contiguous()
        most_a, most_b = (unit(matrix, 1) for matrix in (a, b))
        spreads.append((a.square_() @ b.square_().t()).sqrt_() * most_a * most_b.t())
    missing = (0, 0, 0, problem.out_rows - len(parts[0]))
    right, spread = torch.stack(parts).sum(0), together(spreads)
    return torch.nn.functional.pad(right, missing), torch.nn.functional.pad(spread, missing)


@operator.bound(links="the links at full rate")
def bound(problem: GemmReduceScatter, hardware: Hardware, _: Rates) -> dict[str, float]:
    """The time to receive the partial sums of the peers, and for a replicated output also the sums of the peers' rows."""
    rounds, peers = 2 if problem.output == "replicated" else 1, problem.world_size - 1
    return links_us(rounds * peers * problem.shard_rows * problem.n * problem.item_size, peers, hardware)


_KERNELS, _SPACES = "autotax.kernels.gemm_reduce_scatter", "autotax.spaces.gemm_reduce_scatter"

operator.roofline = f"{_SPACES}:base_us"


def _uncut(_: GemmReduceScatter, config: Config) -> bool:
    """Whether every tile is computed by one program. Which tiles are cut depends on their number, and so on the rows."""
    return config.values.get("splits", 1) == 1


operator.variant("bsp", f"{_KERNELS}.bsp:Bsp", role="baseline")
operator.variant("decomposed", f"{_KERNELS}.decomposed:Decomposed", f"{_SPACES}:decomposed")
operator.variant("two_kernel", f"{_KERNELS}.two_kernel:TwoKernel", f"{_SPACES}:two_kernel")
operator.variant("push", f"{_KERNELS}.push:Push", f"{_SPACES}:push", invariant=_uncut)
operator.variant("pull_reduce", f"{_KERNELS}.pull_reduce:PullReduce", f"{_SPACES}:pull_reduce", invariant=_uncut)
operator.variant(
    "push_specialized", f"{_KERNELS}.push_specialized:PushSpecialized", f"{_SPACES}:push_specialized", invariant=_uncut
)
operator.variant("words", f"{_KERNELS}.words:Words", f"{_SPACES}:words")


def _even(problem: GemmReduceScatter) -> bool:
    """Whether the ranks divide the rows of a scattered output."""
    return problem.output == "replicated" or problem.m % problem.world_size == 0


def _with_torch(output: str) -> Callable[[GemmReduceScatter, Hardware], bool]:
    """Whether torch's symmetric-memory kernels apply: sums support bf16 and float32, in words of 16 bytes."""

    def serves(problem: GemmReduceScatter, hardware: Hardware) -> bool:
        words = problem.dtype != "fp16" and problem.n * problem.item_size % 16 == 0
        return hardware.backend == "cuda" and problem.output == output and words and _even(problem)

    return serves


def _with_nccl(problem: GemmReduceScatter, hardware: Hardware) -> bool:
    """Whether NCCL's protocols are a choice."""
    return hardware.backend == "cuda" and _even(problem)


_PEERS = f"{_KERNELS}.peers"
operator.peer("torch", f"{_PEERS}:TorchFused", where=_with_torch("scattered"))
operator.peer(
    "torch_pipeline", f"{_PEERS}:TorchPipeline", where=_with_torch("scattered"), modes=("graph",), served=True
)
operator.peer("torch_reduce_scatter", f"{_PEERS}:TorchReduceScatter", where=_with_torch("scattered"), served=True)
operator.peer("torch_one_shot", f"{_PEERS}:TorchOneShot", where=_with_torch("replicated"), served=True)
operator.peer("torch_two_shot", f"{_PEERS}:TorchTwoShot", where=_with_torch("replicated"), served=True)
operator.peer("all_to_all", f"{_PEERS}:AllToAll", where=lambda problem, _: _even(problem), served=True)
operator.peer("nccl_ll", f"{_PEERS}:NcclLL", where=_with_nccl, modes=("graph",), served=True)
operator.peer("nccl_ll128", f"{_PEERS}:NcclLL128", where=_with_nccl, modes=("graph",), served=True)
operator.peer("product", f"{_PEERS}:Product", modes=(), part="the product alone", row="cublas")
