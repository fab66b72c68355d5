"""Decode merge: merges the ranks' partial results, of any attention kernel, into the attention over the tokens of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from autotax.core.problem import Problem, choice, dtype, ranks, require_countable, require_divided, size
from autotax.hardware import Hardware, links_us
from autotax.operators.declaration import Operator, Rates

if TYPE_CHECKING:
    from torch import Tensor

    from autotax.operators.inputs import Call, Draw


@dataclass(frozen=True)
class DecodeMerge(Problem):
    """Each rank has attended to its own tokens: it has O [batch, heads, head_dim] and float32 log-sum-exps of the scores, LSE
    [batch, heads]. The merged O is the mean of the ranks' O, weighted by base^LSE. The merged LSE is the logarithm of the sum of
    the weights.

    `batch` counts query tokens: a sequence with several of them, as in speculative decoding, counts several times. A rank without
    tokens of a sequence marks this by an LSE of -inf (or +inf or NaN, as some kernels do); its O may then hold anything. A row
    that is empty on all ranks becomes 0, with LSE -inf.

    - `output="replicated"`: every rank gets the whole O [batch, heads, head_dim] and LSE [batch, heads].
    - `output="head_scatter"`: rank r gets heads r*H ... r*H + H - 1, H = heads / world_size.
    - `base`: the base of the logarithms of inputs and outputs, "e" or "2".
    """

    batch: int = size("query tokens", most=65535, varying=True)
    heads: int = size("query heads", most=4096)
    head_dim: int = size("elements of a head", most=512)
    dtype: str = dtype()
    world_size: int = ranks()
    output: str = choice(
        "replicated, or head_scatter: each rank its own heads", ("replicated", "head_scatter"), default="replicated"
    )
    base: str = choice("e or 2: the base of the log-sum-exps", ("e", "2"), default="e")

    op: ClassVar[str] = "decode-merge"

    def check(self) -> None:
        if self.output == "head_scatter":
            require_divided(self, "heads", scattered=True)
        require_countable(self)

    @property
    def nbytes(self) -> int:
        return self.batch * (self.heads + self.out_heads) * (self.head_dim * self.item_size + 4)

    @cached_property
    def out_heads(self) -> int:
        """Number of heads in a rank's output."""
        return self.heads if self.output == "replicated" else self.heads // self.world_size

    def brief(self) -> str:
        """`B 16, 128 heads of 512`"""
        return self.with_unusual(f"B {self.batch}, {self.heads} heads of {self.head_dim}", "output", "base", "dtype")


operator = Operator(DecodeMerge)
operator.example(
    on_gpu=DecodeMerge(16, 128, 512, output="head_scatter"), on_cpu=DecodeMerge(3, 12, 32, "fp32", output="head_scatter")
)


@operator.inputs
def draw(problem: DecodeMerge, draw: Draw) -> Call:
    """The rank's O and LSE, and a buffer for the merged LSE -> the merged O."""
    import torch

    from autotax.operators.inputs import Call

    o = draw.normal(problem.batch, problem.heads, problem.head_dim, tensor=8)
    lse = draw.normal(problem.batch, problem.heads, tensor=9).float() * 3
    if draw.extreme:
        _spread(problem, draw, o, lse)
    merged = torch.empty(problem.batch, problem.out_heads, dtype=torch.float32, device=draw.device)
    return Call((o, lse, merged), draw.empty(problem.batch, problem.out_heads, problem.head_dim))


FAR = {"bf16": 1000.0, "fp16": 300.0, "fp32": 8.0}
"""Standard deviation of log-sum-exps over the rows. A float32 near 1000, and so its weight, is accurate to 6e-5."""
APART = 200.0
"""Deviation of log-sum-exps over the ranks in some rows, so large that some weights vanish."""
EMPTY = (-math.inf, math.inf, math.nan)
"""LSE values by which kernels mark a shard without tokens."""


def _spread(problem: DecodeMerge, draw: Draw, o: Tensor, lse: Tensor) -> None:
    """Scales heads and channels and shifts log-sum-exps, equally on all ranks. Some rows are empty; two are not finite."""
    import torch

    from autotax.operators.inputs import SPREADS, powers, scale

    reach, seed, shape = SPREADS[problem.dtype], draw.seed, tuple(lse.shape)
    heads = powers((problem.heads, 1), reach.head, seed, 8)
    scale(o, heads * powers((problem.heads, problem.head_dim), reach.value, seed, 9))
    everywhere, here = torch.Generator().manual_seed(seed), draw.generator(3)
    moved = FAR[problem.dtype] * torch.randn(shape, generator=everywhere)
    apart = torch.rand(shape, generator=everywhere) < 1 / 8
    moved += torch.where(apart, APART * torch.randn(shape, generator=here), 0.0)
    lse += moved.to(lse.device)
    kind = torch.randint(0, len(EMPTY), shape, generator=here)
    empty = torch.rand(shape, generator=here) < 1 / 5
    nowhere = torch.rand(shape, generator=everywhere) < 1 / 16
    if empty.numel() > 2:  # with fewer rows, all might be empty
        empty |= nowhere
        nothing = empty.to(lse.device)
        lse[nothing] = torch.tensor(EMPTY)[kind[empty]].to(lse.device)
        o[nothing] = math.nan
    plain = (~(empty | apart)).nonzero()
    if draw.rank == seed // 2 % problem.world_size:
        for place, odd in zip(plain[:2].tolist(), (math.inf, math.nan), strict=False):
            o[(*place, seed % problem.head_dim)] = odd


LEAST_SPREAD = 2.0**-28
"""Smallest spread of an element over the largest of its row: `compact` sends columns with an error of 2^-39 of that."""


@operator.reference
def reference(problem: DecodeMerge, calls: Sequence[Call], rank: int) -> tuple[Tensor, Tensor]:
    """The weighted mean in float32, with weights computed in float64, and its spread."""
    import torch

    from autotax.operators.verification import together

    first = rank * problem.out_heads if problem.output == "head_scatter" else 0
    own = slice(first, first + problem.out_heads)
    sums, parts, spreads = [], [], []
    for call in calls:
        o, lse = call.tensors[0][:, own].float(), call.tensors[1][:, own].double()
        finite = lse.isfinite()
        sums.append(torch.where(finite, lse * (math.log(2.0) if problem.base == "2" else 1.0), -math.inf))
        parts.append(torch.where(finite[..., None], o, 0.0))
        size = parts[-1].abs()
        largest = size.masked_fill(~size.isfinite(), 0.0).amax(-1, keepdim=True)
        spreads.append(torch.maximum(size, LEAST_SPREAD * largest))
    weights = torch.softmax(torch.stack(sums), dim=0).nan_to_num_(0.0).float()[..., None]
    whole = torch.where(weights > 0, weights * torch.stack(parts), 0.0).sum(0)
    return whole, together(list(torch.where(weights > 0, weights * torch.stack(spreads), 0.0)))


@operator.bound(
    links="the links at full rate",
    memory="what comes in and goes out of a rank's memory once, as fast as a copy moves bytes here",
)
def bound(problem: DecodeMerge, hardware: Hardware, rates: Rates) -> dict[str, float]:
    """The time to receive the peers' results in the problem's type, and to read this rank's results and write the merged ones."""
    row, peers = problem.head_dim * problem.item_size + 4, problem.world_size - 1
    times = links_us(peers * problem.batch * problem.out_heads * row, peers, hardware)
    copy_gbps = rates.get("copy_gbps")
    if copy_gbps and hardware.on_gpu:
        times["memory"] = problem.nbytes / (min(copy_gbps) * 1e3)
    return times


_KERNELS, _SPACES = "autotax.kernels.decode_merge", "autotax.spaces.decode_merge"

operator.variant("bsp", f"{_KERNELS}.bsp:Bsp", f"{_SPACES}:bsp", role="baseline")
operator.variant("gather", f"{_KERNELS}.gather:Gather", f"{_SPACES}:gather")
operator.variant("fine_grained", f"{_KERNELS}.gather:FineGrained", f"{_SPACES}:fine_grained")
operator.variant("words", f"{_KERNELS}.words:Words", f"{_SPACES}:words")
operator.variant("compact", f"{_KERNELS}.words:Compact", f"{_SPACES}:compact")
operator.peer("gather_reduce", f"{_KERNELS}.bsp:GatherAndReduce")
