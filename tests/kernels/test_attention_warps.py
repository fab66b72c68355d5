"""Attention by warps with roles. Its kernels run on Hopper alone; `tests.models.warps` runs their source here."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotax.kernels.gather_attention.push_specialized import ALL, CopyEngine, attend_by_roles
from autotax.operators.gather_attention import GatherAttention
from tests.models import warps
from tests.models.warps import Pointer, View, plain, programs_of, together
from tests.volume import volume

HEADS, KV_HEADS, DIM, EXTRA, BLOCK, STAGES, PROGRAMS, EPOCH = 2, 1, 64, 16, 128, 2, 2, 5


def place(problem: GatherAttention, rank: int) -> torch.Tensor:
    """The positions of a rank's tokens."""
    length = problem.chunk_len
    return torch.cat([torch.arange(chunk * length, (chunk + 1) * length) for chunk in problem.chunks_of(rank)])


def inbox_of(problem: GatherAttention, rank: int, whole: torch.Tensor) -> np.ndarray:
    """One inbox [source, batch, tokens, columns] as copy engines fill it. Tokens that no copy brings are NaN."""
    shards = []
    for source in range(problem.world_size):
        shard = torch.full((problem.batch, problem.shard_len, whole.shape[2]), math.nan, dtype=whole.dtype)
        engine = object.__new__(CopyEngine)  # of that rank
        vars(engine).update(problem=problem, context=SimpleNamespace(rank=source), constants={"BLOCK_N": BLOCK})
        for first, end in engine.sent_to(rank) if source != rank else ():
            shard[:, first:end] = whole[:, place(problem, source)][:, first:end]
        shards.append(shard)
    return torch.stack(shards).flatten(0, 2).numpy()


def attended(problem: GatherAttention, rank: int, stages: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """O and LSE of a rank by the kernel's source, whose keys arrive late; and the right ones, float32."""
    world, tokens, batch, dim = problem.world_size, problem.shard_len, problem.batch, problem.value_dim
    extra = problem.head_dim - dim
    draw = torch.Generator().manual_seed(tokens + problem.window)

    def drawn(heads: int, of_head: int) -> torch.Tensor:
        return torch.randn(batch, problem.seq_len, heads, of_head, generator=draw).half()

    q, k, v = drawn(HEADS, dim + extra), drawn(KV_HEADS, dim + extra), drawn(KV_HEADS, dim)
    mine = place(problem, rank)
    own_q, own_k, own_v = (tensor[:, mine].reshape(batch * tokens, -1).numpy() for tensor in (q, k, v))
    of_k, of_v = (inbox_of(problem, rank, tensor.flatten(2)) for tensor in (k, v))
    out, lse = np.full((batch * tokens, HEADS * dim), np.nan, np.float16), np.full((batch, HEADS, tokens), np.nan, np.float32)
    flags = [np.zeros(world, np.int32) for _ in range(world)]

    def boxes(tensor: np.ndarray, rows: int, columns: int = dim) -> View:
        return View(tensor, (rows, columns))

    if extra:
        inboxes = boxes(of_k, BLOCK), boxes(of_v, BLOCK)
        wider = tuple(boxes(tensor, rows, extra) for tensor, rows in ((own_q, 64), (own_k, BLOCK), (of_k, BLOCK)))
    else:  # a source's values lie behind its keys
        both = np.stack([tensor.reshape(world, batch * tokens, -1) for tensor in (of_k, of_v)], 1).reshape(-1, of_k.shape[1])
        inboxes, wider = (boxes(both, BLOCK),) * 2, (None, None, None)

    def arrive() -> None:
        for source in range(world):
            time.sleep(0.01)
            flags[rank][source] = EPOCH

    late = threading.Thread(target=arrive)
    late.start()
    args = (
        boxes(own_q, 64), boxes(own_k, BLOCK), boxes(own_v, BLOCK), *inboxes, wider, None,
        Pointer(out.reshape(-1)), Pointer(lse.reshape(-1)), flags, None, EPOCH, 0, rank, tokens, batch, HEADS, KV_HEADS, 1,
        math.log2(math.e) / math.sqrt(dim + extra),
        world, problem.mask == "causal", problem.chunks, problem.window, False, ALL.value, 0, stages, BLOCK, dim, extra, "cuda",
    )  # fmt: skip
    warps.stopped.clear()
    together(programs_of(rank, PROGRAMS, plain(attend_by_roles), args))
    late.join()
    before = mine[:, None] - torch.arange(problem.seq_len)
    seen = (before >= 0) & (before < (problem.window or problem.seq_len)) | (problem.mask == "none")
    scores = torch.einsum("bqhd,bkd->bhqk", q[:, mine].float(), k[:, :, 0].float()) / math.sqrt(dim + extra)
    scores = scores.masked_fill(~seen, -math.inf)
    right = torch.einsum("bhqk,bkd->bqhd", scores.softmax(3), v[:, :, 0].float())
    output = torch.from_numpy(out).view(batch, tokens, HEADS, dim).float()
    return output, torch.from_numpy(lse), right, scores.logsumexp(3)


@pytest.mark.parametrize(
    ("world", "layout", "tokens", "window", "extra"),
    [
        (2, "zigzag", 512, 0, 0),
        (2, "zigzag", 512, 200, 0),
        (3, "contiguous", 256, 130, 16),
        *volume(
            (2, "contiguous", 256, 1, 0),
            (2, "contiguous", 384, 129, 0),
            (3, "zigzag", 256, 100, 0),
            (3, "zigzag", 512, 400, 0),
            (3, "zigzag", 256, 700, 16),
            (3, "contiguous", 256, 700, 0),
            (2, "zigzag", 256, 2, 0),
            (4, "zigzag", 256, 385, 0),
        ),
    ],
)
def test_the_warps_attend_to_what_windows_reach(world: int, layout: str, tokens: int, window: int, extra: int) -> None:
    dims = (DIM + extra, DIM if extra else 0)
    problem = GatherAttention(1, HEADS, KV_HEADS, dims[0], world * tokens, "fp16", world, "causal", layout, window, dims[1])
    for rank in range(world):
        o, lse, right, right_lse = attended(problem, rank, STAGES)
        torch.testing.assert_close(o, right, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, right_lse, rtol=1e-3, atol=1e-3)
