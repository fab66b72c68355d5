"""An operator for smaller calls than it was made for: the same flags, epochs and memory, other sizes.

What has to hold is that a call signals every flag it shares with other calls, and that no peer still reads what it writes:

- flags of `push` and of Flash Decode count signals, so each call must raise all of them, and its LL words are told apart
  because each call writes all: `push` takes fewer rows only while they are as many chunks, Flash Decode no fewer sequences;
- flags of `push_specialized` hold the epoch, and each belongs to one source whatever the rows: any rows, of which those that
  a box of 64 lacks are zeros that nobody stores;
- words of `push_words` are taken and put back in the call that sends them: any rows;
- flags of `copy_engine` hold the epoch itself, and a rank writes only when all peers have finished the call before: any rows;
- flags of `decomposed` are one a rank, and its two slots begin where the host says: any rows;
- `push`, `push_specialized` and `pull` find their two slots side by side, so their border, not their beginning, stays where
  it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autotax.kernels import all_gather_gemm, flash_decode
from autotax.kernels.flash_decode.shapes import Shapes
from autotax.kernels.operator import Operator
from autotax.problem import AllGatherGemm, FlashDecode, Problem, ceil_div
from autotax.spaces.sides import GROUP_ROWS

VECTOR_BYTES = 16
"""What kernels and TMA descriptors rely on at the start of a tensor."""


def fitted(operator: Operator[Any], problem: Problem) -> Operator[Any] | None:
    """`operator` for calls of `problem`, which is not larger than its own; None if its flags or slots do not allow that.

    Calls of it and of the operator may be mixed, in the same order on all ranks.
    """
    if problem == operator.problem:
        return operator
    fit = _FITS.get(type(operator))
    changed = fit(operator, problem) if fit else None
    if changed is None:
        return None
    other = copy.copy(operator)
    vars(other).update(changed, problem=problem)
    return other


def _around_the_border(slots: Tensor, elements: int) -> Tensor | None:
    """Two neighbouring slots of `elements` elements, whose border is that of the two larger ones; None if misaligned.

    Slot 0 ends and slot 1 begins at the same place for every size, so slots of different parity never overlap.
    """
    border = slots.numel() // 2
    part = slots.view(-1)[border - elements : border + elements]
    return None if (border - elements) * slots.element_size() % VECTOR_BYTES else part


def _decomposed(made: Any, problem: AllGatherGemm) -> dict[str, Any]:
    world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
    return {"inbox": made.inbox.view(2, -1)[:, : world * rows * cols].view(2, world, rows, cols)}


def _copy_engine(made: Any, problem: AllGatherGemm) -> dict[str, Any]:
    world, rows, cols = problem.world_size, problem.shard_rows, problem.shard_cols
    heap, rank = made.context.heap, made.context.rank
    inbox = made.inbox.view(-1)[: world * rows * cols].view(world, rows, cols)
    flags = made.flags[: world * ceil_div(rows, made.config["chunk_rows"])]
    return {
        "inbox": inbox,
        "flags": flags,
        "landings": [heap.peer(inbox[rank], peer) for peer in made.peers],
        "arrivals": [heap.peer(flags.view(world, -1)[rank], peer) for peer in made.peers],
    }


def _pull(made: Any, problem: AllGatherGemm) -> dict[str, Any] | None:
    rows, cols = problem.shard_rows, problem.shard_cols
    published = _around_the_border(made.published, rows * cols)
    return None if published is None else {"published": published.view(2, rows, cols)}


def _push(made: Any, problem: AllGatherGemm) -> dict[str, Any] | None:
    chunk, world, rows, cols = made.config["chunk_rows"], problem.world_size, problem.shard_rows, problem.shard_cols
    if ceil_div(rows, chunk) != ceil_div(made.problem.shard_rows, chunk):
        return None
    inbox = _around_the_border(made.inbox, world * rows * cols)
    return None if inbox is None else {"inbox": inbox.view(2 * world * rows, cols)}


def _push_specialized(made: Any, problem: AllGatherGemm) -> dict[str, Any] | None:
    world, cols, block = problem.world_size, problem.shard_cols, made.config["block_m"]
    rows = ceil_div(problem.shard_rows, GROUP_ROWS) * GROUP_ROWS
    if (rows if made.constants["X_IS_B"] else world * rows) % block:
        return None
    inbox = _around_the_border(made.inbox, world * rows * cols)
    if inbox is None:
        return None
    # Across wherever it may be, so that there is one kernel for all of them.
    constants = made.constants | {"ACROSS": not made.constants["X_IS_B"] and block > GROUP_ROWS}
    return made.landing(inbox.view(2 * world * rows, cols), rows) | {"constants": constants}


def _push_words(made: Any, problem: AllGatherGemm) -> dict[str, Any]:
    return made.landed(made.landing[: problem.world_size * problem.shard_rows])


def _bsp_decode(made: Any, problem: FlashDecode) -> dict[str, Any]:
    shapes = Shapes.of(problem, made.config, made.context.target)
    rows, dim, splits = shapes.rows, problem.head_dim, made.config["splits"]
    partial, gathered = (
        whole.view(-1)[: len(whole) * shapes.part].view(-1, shapes.part) for whole in (made.partial, made.gathered)
    )
    o, lse = partial[0, : rows * dim], partial[0, rows * dim :]
    own = splits > 1 or shapes.scatter
    return {
        "shapes": shapes,
        "partial": partial,
        "gathered": gathered,
        "o": o,
        "lse": lse,
        "all_lse": gathered.view(-1)[shapes.arriving * dim :],
        "split_o": made.split_o.view(-1)[: splits * rows * dim].view(splits, rows, dim) if own else o,
        "split_lse": made.split_lse.view(-1)[: splits * rows].view(splits, rows) if own else lse,
    }


def _same_batch(made: Any, problem: FlashDecode) -> dict[str, Any] | None:
    """Only the room for tokens differs, which no workspace depends on."""
    return {} if problem.batch == made.problem.batch else None


_FITS: dict[type, Callable[[Any, Any], dict[str, Any] | None]] = {
    all_gather_gemm.VARIANTS["decomposed"]: _decomposed,
    all_gather_gemm.VARIANTS["copy_engine"]: _copy_engine,
    all_gather_gemm.VARIANTS["pull"]: _pull,
    all_gather_gemm.VARIANTS["push"]: _push,
    all_gather_gemm.VARIANTS["push_specialized"]: _push_specialized,
    all_gather_gemm.VARIANTS["push_words"]: _push_words,
    flash_decode.VARIANTS["bsp"]: _bsp_decode,
    flash_decode.VARIANTS["gather"]: _same_batch,
    flash_decode.VARIANTS["fine_grained"]: _same_batch,
    flash_decode.VARIANTS["fused"]: _same_batch,
    flash_decode.VARIANTS["single"]: _same_batch,
    flash_decode.VARIANTS["resident"]: _same_batch,
    flash_decode.VARIANTS["compact"]: _same_batch,
}
