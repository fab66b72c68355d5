"""GEMM + Reduce-Scatter, and GEMM + All-Reduce: the row-parallel linear layer. Its product is summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from autotax.core.config import Config
from autotax.core.problem import ITEM_SIZES, Problem, ceil_div, choice, ranks, size
from autotax.hardware import Hardware, has_iris, links_us
from autotax.operators import scaled
from autotax.operators.declaration import Operator, Rates

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw


@dataclass(frozen=True)
class GemmReduceScatter(Problem):
    """C = the sum over `world_size` ranks of A @ B.T, where each rank has its own A [m, k] and B.

    - `output="scattered"`: rank r gets rows r*R ... r*R + R - 1 of C, R = ceil(m / world_size), as [R, n]. Rows past m are
      padding; they are zero.
    - `output="replicated"`: every rank gets C [m, n].
    - `weight="nk"`: B is [n, k], as torch's linear layers store it. `weight="kn"`: B is [k, n], as the input gradient of a
      column-parallel layer needs it.

    `k` is the part of the inner dimension that one rank holds. With dtype `e4m3` A and B have `scales` and C has the type
    `result`: see `operators/scaled.py`. With `quantize` the caller's A has the type `result`, and each rank quantises it: `row`
    and `block` make its scales, `static` takes one, that of scales `tensor`. `accumulate="fast"` permits what torch calls
    `use_fast_accum`.
    """

    m: int = size("rows of A and C", varying=True)
    n: int = size("columns of C")
    k: int = size("the inner dimension on each rank")
    dtype: str = scaled.scaled_dtype()
    output: str = choice(
        "scattered: each rank its own rows; replicated: every rank all rows", ("scattered", "replicated"), default="scattered"
    )
    world_size: int = ranks()
    weight: str = choice("nk or kn: how B is stored", ("nk", "kn"), default="nk", unnamed=True)
    scales: str = scaled.scaled_field("scales")
    result: str = scaled.scaled_field("result")
    quantize: str = scaled.scaled_field("quantize")
    operand: str = scaled.scaled_field("operand")
    accumulate: str = scaled.scaled_field("accumulate")

    op: ClassVar[str] = "gemm-reduce-scatter"

    def check(self) -> None:
        scaled.check(self)

    @property
    def nbytes(self) -> int:
        return (self.m * self.k + self.n * self.k) * self.item_size + self.out_rows * self.n * ITEM_SIZES[self.out_dtype]

    @property
    def out_dtype(self) -> str:
        return self.result if self.dtype == "e4m3" else self.dtype

    @property
    def addends(self) -> int:
        return self.world_size

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @cached_property
    def shard_rows(self) -> int:
        """Rows of C that one rank adds up, padding included."""
        return ceil_div(self.m, self.world_size)

    @cached_property
    def out_rows(self) -> int:
        """Rows of C that one rank gets."""
        return self.m if self.output == "replicated" else self.shard_rows

    def brief(self) -> str:
        """`m 512 x 8192 x 7168`"""
        return self.with_unusual(f"m {self.m} x {self.n} x {self.k}", "output", "weight", "dtype", *scaled.USUAL)


FEWEST_ROWS = 8
"""Fewest rows of a C in which some rows may be infinite or NaN."""

operator = Operator(GemmReduceScatter)
operator.example(on_gpu=GemmReduceScatter(512, 8192, 7168), on_cpu=GemmReduceScatter(64, 96, 64, "fp32"))


@operator.inputs
def draw(problem: GemmReduceScatter, draw: Draw) -> Call:
    """The rank's A [m, k] and its B, [n, k] or [k, n], with e4m3 their scales -> its part of C."""
    from autotax.operators.inputs import Call

    if problem.dtype == "e4m3":
        return scaled.draw_call(problem, draw, problem.m, problem.out_rows, 6, shared=False)
    a = draw.normal(problem.m, problem.k, tensor=6)
    shape = (problem.n, problem.k) if problem.weight == "nk" else (problem.k, problem.n)
    b = draw.normal(*shape, tensor=7)
    if draw.extreme:
        _spread(problem, a, b if problem.weight == "nk" else b.t(), draw)
    return Call((a, b), draw.empty(problem.out_rows, problem.n))


def _spread(problem: GemmReduceScatter, a: Tensor, b: Tensor, draw: Draw) -> None:
    """Scales rows and columns of C on all ranks alike, and channels of A against those of B; one row is infinite, one NaN."""
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

    from autotax.operators.verification import product_and_spread, together

    first = 0 if problem.output == "replicated" else rank * problem.shard_rows
    parts, spreads = [], []
    for call in calls:
        a, b = call.tensors[:2]
        if problem.dtype == "e4m3":
            a = scaled.numbers_of_a(problem, call.tensors)
            b = scaled.dequantised(b, call.tensors[-1], problem.scales, weight=True)
        a = a[first : first + problem.out_rows].float()
        b = (b if problem.weight == "nk" else b.t()).float()
        part, spread = product_and_spread(a, b)
        parts.append(part)
        spreads.append(spread)
    missing = (0, 0, 0, problem.out_rows - len(parts[0]))
    right, spread = torch.stack(parts).sum(0), together(spreads)
    return torch.nn.functional.pad(right, missing), torch.nn.functional.pad(spread, missing)


@operator.bound(links="the links at full rate")
def bound(problem: GemmReduceScatter, hardware: Hardware, _: Rates) -> dict[str, float]:
    """The time to receive the partial sums of the peers, and for a replicated output also the sums of the peers' rows."""
    rounds, peers = 2 if problem.output == "replicated" else 1, problem.world_size - 1
    return links_us(rounds * peers * problem.shard_rows * problem.n * ITEM_SIZES[problem.out_dtype], peers, hardware)


_KERNELS, _SPACES = "autotax.kernels.gemm_reduce_scatter", "autotax.spaces.gemm_reduce_scatter"

operator.stricter = scaled.exact
operator.roofline = f"{_SPACES}:base_us"
operator.traits = _SPACES


def _uncut(_: GemmReduceScatter, config: Config) -> bool:
    """Whether every tile is computed by one program. The number of rows decides how many tiles there are and which are cut."""
    return config.values.get("splits", 1) == 1


operator.variant("bsp", f"{_KERNELS}.bsp:bsp", f"{_SPACES}:bsp", role="baseline")
operator.variant("decomposed", f"{_KERNELS}.decomposed:Decomposed", f"{_SPACES}:decomposed")
operator.variant("two_kernel", f"{_KERNELS}.two_kernel:TwoKernel", f"{_SPACES}:two_kernel")
operator.variant("two_kernel_words", f"{_KERNELS}.two_kernel_words:TwoKernelWords", f"{_SPACES}:two_kernel_words")
operator.variant("push", f"{_KERNELS}.push:Push", f"{_SPACES}:push", invariant=_uncut)
operator.variant("pull_reduce", f"{_KERNELS}.push:PullReduce", f"{_SPACES}:pull_reduce", invariant=_uncut)
operator.variant(
    "push_specialized", f"{_KERNELS}.push_specialized:PushSpecialized", f"{_SPACES}_roles:push_specialized", invariant=_uncut
)
operator.variant("push_one_shot", f"{_KERNELS}.push_one_shot:PushOneShot", f"{_SPACES}_roles:push_one_shot", invariant=_uncut)
operator.variant("specialized_words", f"{_KERNELS}.specialized_words:SpecializedWords", f"{_SPACES}:specialized_words")
operator.variant("words", f"{_KERNELS}.words:Words", f"{_SPACES}:words")
operator.variant("scaled_decomposed", f"{_KERNELS}.decomposed:ScaledDecomposed", f"{_SPACES}:scaled_decomposed")
operator.variant("scaled_two_kernel", f"{_KERNELS}.two_kernel:ScaledTwoKernel", f"{_SPACES}:scaled_two_kernel")
operator.variant(
    "scaled_two_kernel_words", f"{_KERNELS}.two_kernel_words:ScaledTwoKernelWords", f"{_SPACES}:scaled_two_kernel_words"
)
operator.variant("scaled_specialized", f"{_KERNELS}.push_specialized:ScaledSpecialized", f"{_SPACES}_roles:scaled_specialized")
operator.variant("scaled_push_one_shot", f"{_KERNELS}.push_one_shot:ScaledPushOneShot", f"{_SPACES}_roles:scaled_push_one_shot")
operator.variant(
    "scaled_specialized_words", f"{_KERNELS}.specialized_words:ScaledSpecializedWords", f"{_SPACES}:scaled_specialized_words"
)
operator.variant("scaled_words", f"{_KERNELS}.words:ScaledWords", f"{_SPACES}:scaled_words")


def _even(problem: GemmReduceScatter) -> bool:
    """Whether the ranks divide the rows of a scattered output."""
    return problem.output == "replicated" or problem.m % problem.world_size == 0


def _with_torch(output: str, of_codes: bool = False) -> Callable[[GemmReduceScatter, Hardware], bool]:
    """Whether torch's symmetric-memory kernels apply: sums support bf16 and float32, in words of 16 bytes. `of_codes`: behind the
    library's product of e4m3.
    """

    def serves(problem: GemmReduceScatter, hardware: Hardware) -> bool:
        words = problem.out_dtype != "fp16" and problem.n * problem.item_size % 16 == 0
        fits = hardware.backend == "cuda" and problem.output == output and (problem.dtype == "e4m3") == of_codes
        return fits and words and _even(problem) and (not of_codes or scaled.has_library_product(problem, hardware))

    return serves


def _with_nccl(problem: GemmReduceScatter, hardware: Hardware) -> bool:
    """Whether NCCL's protocols are a choice."""
    return hardware.backend == "cuda" and problem.dtype != "e4m3" and _even(problem)


_PEERS = f"{_KERNELS}.peers"
operator.peer("torch", f"{_PEERS}:TorchFused", where=_with_torch("scattered"))
operator.peer("torch_pipeline", f"{_PEERS}:TorchPipeline", where=_with_torch("scattered"), modes=("graph",), served=True)
for _name, _kernel, _output in (
    ("torch_reduce_scatter", "TorchReduceScatter", "scattered"),
    ("torch_one_shot", "TorchOneShot", "replicated"),
    ("torch_two_shot", "TorchTwoShot", "replicated"),
):
    operator.peer(_name, f"{_PEERS}:{_kernel}", where=_with_torch(_output), served=True)
    operator.peer(f"{_name}_scaled", f"{_PEERS}:{_kernel}Scaled", where=_with_torch(_output, of_codes=True), served=True)
operator.peer(
    "all_to_all", f"{_PEERS}:AllToAll", where=lambda problem, _: problem.dtype != "e4m3" and _even(problem), served=True
)
operator.peer("nccl_ll", f"{_PEERS}:NcclLL", where=_with_nccl, modes=("graph",), served=True)
operator.peer("nccl_ll128", f"{_PEERS}:NcclLL128", where=_with_nccl, modes=("graph",), served=True)


def _with_scales(problem: GemmReduceScatter, hardware: Hardware) -> bool:
    """Whether torch's fused operator applies. It does not take scales of blocks."""
    return problem.scales in ("tensor", "row") and _with_torch("scattered", of_codes=True)(problem, hardware)


operator.peer("torch_scaled", f"{_PEERS}:TorchScaled", where=_with_scales)
operator.peer("torch_fast", f"{_PEERS}:TorchScaledFast", where=_with_scales)
operator.peer("nccl_fast", f"{_PEERS}:NcclFast", where=scaled.has_another_fast_product)
operator.peer("nccl_deep_gemm", f"{_PEERS}:NcclDeepGemm", where=scaled.has_deep_gemm)
operator.peer(
    "product",
    f"{_PEERS}:product",
    modes=(),
    part="the product alone",
    row="cublas",
    where=lambda problem, hardware: hardware.on_gpu and problem.quantize == "none",
)


def _with_iris(output: str) -> Callable[[GemmReduceScatter, Hardware], bool]:
    """Whether the operators of Iris with this output are installed and apply."""
    return lambda problem, hardware: (
        hardware.on_gpu and problem.output == output and problem.dtype in ("bf16", "fp16") and has_iris()
    )


for _name, _kernel, _output in (
    ("matmul_reduce_scatter", "MatmulReduceScatter", "scattered"),
    ("matmul_all_reduce", "MatmulAllReduce", "replicated"),
    ("all_reduce", "AllReduce", "replicated"),
):
    operator.peer_and_tuned(f"iris_{_name}", f"{_PEERS}:{_kernel}", where=_with_iris(_output), modes=("graph",))
