"""All-Gather + GEMM: the column-parallel linear layer. Its input is gathered while it is multiplied."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from autotax.core.config import Config
from autotax.core.errors import UsageError
from autotax.core.problem import ITEM_SIZES, Problem, ceil_div, choice, ranks, size
from autotax.hardware import Hardware, has_iris, links_us
from autotax.operators import scaled
from autotax.operators.declaration import Operator, Rates

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw


@dataclass(frozen=True)
class AllGatherGemm(Problem):
    """C = gather(A) @ B.T over `world_size` ranks; every rank computes C [m, n] from its own B.

    - `shard="m"`: rank r holds rows r*R ... of A, R = ceil(m / world_size), as [R, k] (rows past m are padding that no
      rank reads into C), and its own B [n, k]: the column-parallel linear layer with sequence parallelism.
    - `shard="k"`: rank r holds columns r*k/world_size ... of A as [m, k/world_size], and B [n, k].

    B is contiguous with `weight="nk"`. With `weight="kn"` it is the transposed view of a contiguous [k, n], as the input gradient
    of a row-parallel layer needs it. Only variants that call the vendor's GEMM accept such a view.

    With dtype `e4m3` A and B have `scales`, C has the type `result`, and A is sharded along m: see `operators/scaled.py`. With
    `quantize` the caller's A has the type `result`; each rank quantises its rows on the way: `row` and `block` make their scales,
    `static` takes one, that of scales `tensor`. `accumulate="fast"` permits what torch calls `use_fast_accum`.

    `n` is the number of columns of C on each rank.
    """

    m: int = size("rows of A over all ranks", varying=True)
    n: int = size("columns of B on each rank")
    k: int = size("the dimension that is summed over")
    dtype: str = scaled.scaled_dtype()
    shard: str = choice("m or k: how A is sharded", ("m", "k"), default="m")
    world_size: int = ranks()
    weight: str = choice("nk or kn: how B is stored", ("nk", "kn"), default="nk", unnamed=True)
    scales: str = scaled.scaled_field("scales")
    result: str = scaled.scaled_field("result")
    quantize: str = scaled.scaled_field("quantize")
    operand: str = scaled.scaled_field("operand")
    accumulate: str = scaled.scaled_field("accumulate")

    op: ClassVar[str] = "all-gather-gemm"

    def check(self) -> None:
        scaled.check(self)
        if self.dtype == "e4m3" and self.shard == "k":
            raise UsageError("shard is 'k' with dtype e4m3; allowed is m: shard A along its rows")
        if self.shard == "k" and self.k % self.world_size:
            raise UsageError(
                f"k is {self.k} on {self.world_size} ranks; with --shard k it must be a multiple of the world size: "
                f"pad k to {ceil_div(self.k, self.world_size) * self.world_size}"
            )

    @property
    def nbytes(self) -> int:
        read = (self.shard_rows * self.shard_cols + self.n * self.k) * self.item_size
        return read + self.m * self.n * ITEM_SIZES[self.out_dtype]

    @property
    def out_dtype(self) -> str:
        return self.result if self.dtype == "e4m3" else self.dtype

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @cached_property
    def shard_rows(self) -> int:
        """Rows of A that one rank holds."""
        return ceil_div(self.m, self.world_size) if self.shard == "m" else self.m

    @cached_property
    def shard_cols(self) -> int:
        """Columns of A that one rank holds."""
        return self.k if self.shard == "m" else self.k // self.world_size

    def brief(self) -> str:
        """`m 512 x 7168 x 8192`"""
        return self.with_unusual(f"m {self.m} x {self.n} x {self.k}", "shard", "weight", "dtype", *scaled.USUAL)


FEWEST_ROWS, FEWEST_COLUMNS = 8, 16
"""Fewest rows and columns of a C in which some rows and columns may be infinite or NaN."""

operator = Operator(AllGatherGemm)
operator.example(on_gpu=AllGatherGemm(512, 7168, 8192), on_cpu=AllGatherGemm(64, 96, 64, "fp32"))


@operator.inputs
def draw(problem: AllGatherGemm, draw: Draw) -> Call:
    """This rank's shard of A [shard_rows, shard_cols] and its B [n, k], with e4m3 their scales -> C [m, n]."""
    from autotax.operators.inputs import Call

    if problem.dtype == "e4m3":
        return scaled.draw_call(problem, draw, problem.shard_rows, problem.m, 1, shared=True)
    a = draw.normal(problem.shard_rows, problem.shard_cols, tensor=1)
    b = draw.normal(problem.n, problem.k, tensor=2) if problem.weight == "nk" else draw.normal(problem.k, problem.n, tensor=2).t()
    if draw.extreme:
        _spread_a(problem, a, draw)
        _spread_b(problem, b, draw)
    return Call((a, b), draw.empty(problem.m, problem.n))


def _spread_a(problem: AllGatherGemm, a: Tensor, draw: Draw) -> None:
    """Scales rows and channels of a shard of A; makes one of its rows infinite and one NaN."""
    from autotax.operators.inputs import SPREADS, powers, scale

    seed, rank = draw.seed, draw.rank
    first_row, first_column = (rank * problem.shard_rows, 0) if problem.shard == "m" else (0, rank * problem.shard_cols)
    reach = SPREADS[problem.dtype]
    rows = powers((problem.shard_rows * problem.world_size,), reach.row, seed, 1)[first_row : first_row + len(a)]
    channels = powers((problem.k,), reach.channel, seed, 2)[first_column : first_column + a.shape[1]]
    scale(a, rows[:, None] * channels)
    if problem.m >= FEWEST_ROWS:
        for row, odd in ((seed % problem.m, math.inf), ((seed + problem.m // 2) % problem.m, math.nan)):
            if first_row <= row < first_row + len(a):
                a[row - first_row, seed % a.shape[1]] = odd


def _spread_b(problem: AllGatherGemm, b: Tensor, draw: Draw) -> None:
    """Scales columns of C, and channels by the inverse of A's factors; makes one column of C infinite and one NaN."""
    from autotax.operators.inputs import SPREADS, powers, scale

    seed, reach = draw.seed, SPREADS[problem.dtype]
    columns = powers((problem.n,), reach.column, seed, 3, draw.rank)[:, None]
    scale(b, columns / powers((problem.k,), reach.channel, seed, 2))
    if problem.n >= FEWEST_COLUMNS:
        b[seed % problem.n, 0], b[(seed + problem.n // 2) % problem.n, problem.k - 1] = -math.inf, math.nan


@operator.reference
def reference(problem: AllGatherGemm, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor]:
    """The right C of a rank, float32 [m, n], and its spread."""
    import torch

    from autotax.operators.verification import product_and_spread

    shards = [scaled.numbers_of_a(problem, call.tensors) for call in calls]
    a = torch.cat(shards, dim=0 if problem.shard == "m" else 1)[: problem.m]
    b = calls[rank].tensors[1].float()
    if problem.dtype == "e4m3":
        b = scaled.dequantised(calls[rank].tensors[1], calls[rank].tensors[-1], problem.scales, weight=True)
    return product_and_spread(a, b)


@operator.bound(links="the links at full rate")
def bound(problem: AllGatherGemm, hardware: Hardware, _: Rates) -> dict[str, float]:
    """The time to receive the peers' shards of A."""
    peers = problem.world_size - 1
    shard = problem.shard_rows * problem.shard_cols * problem.item_size + scaled.scales_bytes(problem, problem.shard_rows)
    return links_us(peers * shard, peers, hardware)


_KERNELS, _SPACES = "autotax.kernels.all_gather_gemm", "autotax.spaces.all_gather_gemm"
_ROLES = f"{_SPACES}_roles"
operator.behind = "norm"
operator.traits = "autotax.spaces.gemm_traits"
operator.stricter = scaled.exact
operator.roofline = f"{operator.traits}:base_us"


def _uncut(problem: AllGatherGemm, config: Config) -> bool:
    """Whether every tile is computed by one program, and one kernel serves all numbers of rows."""
    aligned = problem.shard_cols * problem.item_size % 16 == 0
    one_chunk = config.variant == "copy_engine" or int(config["chunk_rows"]) >= problem.shard_rows
    return problem.shard == "m" and aligned and one_chunk and config.values.get("splits", 1) == 1


# `leaves` names where a call leaves the gathered A (see kernels/all_gather_gemm/gathered.py). `whole` and `landing` hold A
# itself. `inbox` has two slots of shards. `inboxes` is a list of them; with K sharded a slot holds all of A. Variants without
# `leaves` keep no copy that is safe to read.
operator.variant("bsp", f"{_KERNELS}.bsp:bsp", f"{_SPACES}:bsp", role="baseline", leaves="whole")
operator.variant("decomposed", f"{_KERNELS}.decomposed:Decomposed", f"{_SPACES}:decomposed", leaves="inboxes")
operator.variant("scaled_decomposed", f"{_KERNELS}.decomposed:ScaledDecomposed", f"{_SPACES}:scaled_decomposed")
operator.variant("scaled_packets", f"{_KERNELS}.push_packets:ScaledPackets", f"{_SPACES}:scaled_packets")
operator.variant(
    "scaled_specialized", f"{_KERNELS}.scaled_specialized:ScaledSpecialized", f"{_ROLES}:scaled_specialized", leaves="inbox"
)
operator.variant(
    "scaled_push_words", f"{_KERNELS}.scaled_specialized:ScaledPushWords", f"{_ROLES}:scaled_push_words", leaves="landing"
)
operator.variant("copy_engine", f"{_KERNELS}.copy_engine:CopyEngine", f"{_SPACES}:copy_engine", invariant=_uncut)
operator.variant("pull", f"{_KERNELS}.pull:Pull", f"{_SPACES}:pull", role="ladder")
operator.variant("push", f"{_KERNELS}.push:Push", f"{_SPACES}:push", leaves="inbox", invariant=_uncut)
operator.variant(
    "push_specialized", f"{_KERNELS}.push_specialized:PushSpecialized", f"{_ROLES}:push_specialized", leaves="inbox"
)
operator.variant("push_words", f"{_KERNELS}.push_words:PushWords", f"{_ROLES}:push_words", leaves="landing")
operator.variant("push_packets", f"{_KERNELS}.push_packets:PushPackets", f"{_SPACES}:push_packets", leaves="whole")
operator.variant(
    "push_two_kernel",
    f"{_KERNELS}.push:PushTwoKernel",
    f"{_SPACES}:push_two_kernel",
    role="ladder",
    leaves="inbox",
)

_PEERS = f"{_KERNELS}.peers"


def _on_nvidia(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether torch's pipeline and NCCL's protocols apply: to rows that the ranks divide."""
    return hardware.backend == "cuda" and problem.dtype != "e4m3" and problem.shard == "m" and problem.m % problem.world_size == 0


def _torch_multiplies(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether torch's operator for e4m3 applies. With the scales of rows it fails for a shard of one row (torch 2.11)."""
    return scaled.has_fast_product(problem, hardware) and (problem.shard_rows > 1 or problem.scales != "row")


def _with_flashinfer(problem: AllGatherGemm, hardware: Hardware) -> bool:
    """Whether FlashInfer is installed and multiplies: whole tiles, in NVSHMEM's memory, which torch takes where TORCH_SYMMMEM
    names it.
    """
    whole = not any(side % 128 for side in (problem.shard_rows, problem.n, problem.k)) and problem.dtype in ("bf16", "fp16")
    served = _on_nvidia(problem, hardware) and whole and os.environ.get("TORCH_SYMMMEM") == "NVSHMEM"
    return served and find_spec("flashinfer") is not None


operator.peer("torch", f"{_PEERS}:TorchFused", where=_on_nvidia)
operator.peer("flashinfer", f"{_PEERS}:FlashInfer", where=_with_flashinfer, modes=("eager",))
operator.peer("torch_pipeline", f"{_PEERS}:TorchPipeline", where=_on_nvidia, modes=("graph",), served=True, leaves="whole")
operator.peer("nccl_ll", f"{_PEERS}:NcclLL", where=_on_nvidia, modes=("graph",), served=True, leaves="whole")
operator.peer("nccl_ll128", f"{_PEERS}:NcclLL128", where=_on_nvidia, modes=("graph",), served=True, leaves="whole")
operator.peer("torch_scaled", f"{_PEERS}:TorchScaled", where=_torch_multiplies)
operator.peer("torch_fast", f"{_PEERS}:TorchScaledFast", where=_torch_multiplies)
operator.peer("nccl_fast", f"{_PEERS}:NcclFast", where=scaled.has_another_fast_product)
operator.peer("nccl_deep_gemm", f"{_PEERS}:NcclDeepGemm", where=scaled.has_deep_gemm)
operator.peer("product", f"{_PEERS}:product", modes=(), part="the product alone", row="cublas")


def _with_iris(shard: str) -> Callable[[AllGatherGemm, Hardware], bool]:
    """Whether the operators of Iris for A sharded like this are installed and apply."""
    return lambda problem, hardware: (
        hardware.on_gpu and problem.shard == shard and problem.dtype in ("bf16", "fp16") and has_iris()
    )


for _name, _kernel, _shard in (
    ("all_gather_matmul", "AllGatherMatmul", "k"),
    ("all_gather_matmul_hbm_buffer", "HbmBuffer", "k"),
    ("all_gather", "AllGather", "m"),
):
    operator.peer_and_tuned(f"iris_{_name}", f"{_PEERS}:{_kernel}", where=_with_iris(_shard), modes=("graph",))
