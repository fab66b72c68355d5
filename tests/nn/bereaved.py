"""One of two ranks: `python -m tests.nn.bereaved MEETING RANK`. Rank 1 dies between two calls; rank 0 prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from autotax.core.errors import MachineError
from autotax.heap.world import World, meet
from autotax.nn import AllGatherLinear, AllReduceNorm, FlashDecode, Tuned
from autotax.operators.all_gather_gemm import AllGatherGemm
from tests.nn.checks import DIM, HEADS, HIDDEN, KV_HEADS, K, N
from tests.nn.test_conformance import ONE_SHOT, SINGLE
from tests.nn.test_modules import linear

ROOM = 8


def seen(module: Any, call: Callable[[], Any]) -> dict[str, Any]:
    """Seconds, failures and errors of the first calls after the peer has gone."""
    started = time.monotonic()
    call()
    report = {"seconds": time.monotonic() - started, "failure": module.failure()}
    for name in ("next", "after"):
        try:
            call()
        except MachineError as error:
            report[name] = str(error)
    return report


def main(meeting: str, rank: int) -> None:
    World.join(meet(meeting), rank, 2, "cpu")
    f32 = torch.float32
    layer = AllGatherLinear(torch.ones(N, K), None, 8, config=linear("pull"))
    tuned = Tuned(AllGatherGemm(8, N, K, "fp32", "m", 2), device="cpu", config=linear("pull"))
    attend = FlashDecode(KV_HEADS, HEADS, DIM, 4, 2 * ROOM, None, f32, device="cpu", config=SINGLE)
    norm, rows = AllReduceNorm(HIDDEN, 4, None, f32, device="cpu", config=ONE_SHOT), torch.ones(4, HIDDEN)
    x, q = torch.ones(4, K), torch.ones(4, HEADS, DIM)
    cache, lengths = torch.ones(4, KV_HEADS, ROOM, DIM), torch.full((4,), ROOM, dtype=torch.int32)
    calls: dict[str, tuple[Any, Callable[[], Any]]] = {
        "AllGatherLinear": (layer, lambda: layer(x)),
        "FlashDecode": (attend, lambda: attend(q, cache, cache, lengths)),
        "AllReduceNorm": (norm, lambda: norm(rows, rows[0], rows)),
        "Tuned": (tuned, lambda: tuned(x, torch.ones(N, K))),
    }
    with torch.no_grad():
        for module, call in calls.values():
            call()
            assert module.failure() is None
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps({name: seen(*pair) for name, pair in calls.items()}), flush=True)
    os._exit(0)  # the group of ranks cannot be torn down in order


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
