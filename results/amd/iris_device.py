"""Our device functions beside those of Iris, compiled for AMD: what a release, an acquire, a store and a load to a peer become.

    PYTHONPATH=. python results/amd/iris_device.py > results/amd/iris-TRITON.txt

$AUTOTAX_IRIS names a folder with Iris and tritonblas; without it pip downloads them. The second table executes pairs of gfx942
in the emulator of `make test-amd`, with several seeds: a wrong word means that a flag overtook its data.
"""
# ruff: noqa: ARG001 - all kernels have the same arguments

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from autotax.heap.world import World
from autotax.kernels.offline import pretend
from autotax.kernels.primitives import flag_address, signal, translate, wait
from tests.amd.machine import Machine
from tests.amd.memory import Memory
from tests.amd.ranks import Emulated, ThreadHeap, hardware
from tests.heap import fake_gpus
from tests.kernels.releases import faults, instructions

FOLDER = os.environ.get("AUTOTAX_IRIS") or fake_gpus.downloaded()
fake_gpus.install(fake_gpus.build(Path(tempfile.mkdtemp()), "rocm"))
sys.path.insert(0, FOLDER)
iris = importlib.import_module("iris")
gluon: Any = importlib.import_module("triton.experimental.gluon")
gl: Any = importlib.import_module("triton.experimental.gluon.language")
Device: Any = importlib.import_module("iris.gluon").IrisDeviceCtx

LANES = tl.constexpr(1024)
SEEDS = 12
LIMIT = 3000
"""Polls of an emulated wait before it gives up."""
KINDS = ("s_waitcnt", "buffer_wbl2", "buffer_inv", "s_barrier")


# A sender stores LANES words, publishes them, and waits for an answer. A receiver waits, and copies them.


@triton.jit
def ours_send(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(translate(inbox, bases, rank, peer) + lanes, lanes + 7)
    signal(flag_address(flags, 0, bases, rank, peer), 1, TARGET, "sys")
    if ANSWERED:
        wait(flags + 1, 1, peer, 1, control, TARGET)


@triton.jit
def ours_receive(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    wait(flags, 1, peer, 0, control, TARGET)
    tl.store(out + lanes, tl.load(inbox + lanes))
    if ANSWERED:
        signal(flag_address(flags, 1, bases, rank, peer), 1, TARGET, "sys")


@triton.jit
def iris_send(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    """As examples of Iris do."""
    lanes = tl.arange(0, LANES)
    iris.store(inbox + lanes, lanes + 7, rank, peer, bases)
    iris.atomic_add(flags, 1, rank, peer, bases, sem="release", scope="sys")
    if ANSWERED:
        wait(flags + 1, 1, peer, 1, control, TARGET)


@triton.jit
def iris_receive(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    while iris.atomic_cas(flags, 1, 1, rank, rank, bases, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + lanes, tl.load(inbox + lanes))
    if ANSWERED:
        signal(flag_address(flags, 1, bases, rank, peer), 1, TARGET, "sys")


@triton.jit
def iris_ops_send(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    """As iris.ops.matmul_all_reduce does, with the data and the flag on the sender, where the receiver reads them."""
    lanes = tl.arange(0, LANES)
    tl.store(inbox + lanes, lanes + 7, cache_modifier=".wt")
    tl.debug_barrier()
    tl.atomic_xchg(flags, 1, sem="release", scope="sys")
    if ANSWERED:
        wait(flags + 1, 1, peer, 1, control, TARGET)


@triton.jit
def iris_ops_send_gpu(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    """As iris.ops.matmul_reduce_scatter does: the peer reads what is released to this GPU alone."""
    lanes = tl.arange(0, LANES)
    tl.store(inbox + lanes, lanes + 7, cache_modifier=".wt")
    tl.debug_barrier()
    tl.atomic_xchg(flags, 1, sem="release", scope="gpu")
    if ANSWERED:
        wait(flags + 1, 1, peer, 1, control, TARGET)


@triton.jit
def iris_ops_receive(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    while iris.atomic_add(flags, 0, rank, peer, bases, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + lanes, iris.load(inbox + lanes, rank, peer, bases))
    if ANSWERED:
        signal(flag_address(flags, 1, bases, rank, peer), 1, TARGET, "sys")


@triton.jit
def iris_ops_receive_gpu(inbox, flags, bases, control, out, rank, peer, ANSWERED: tl.constexpr, TARGET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    while iris.atomic_add(flags, 0, rank, peer, bases, sem="acquire", scope="gpu") != 1:
        pass
    tl.store(out + lanes, iris.load(inbox + lanes, rank, peer, bases))
    if ANSWERED:
        signal(flag_address(flags, 1, bases, rank, peer), 1, TARGET, "sys")


@gluon.jit
def iris_gluon_send(inbox, flags, context, peer, DEVICE: gl.constexpr):
    """The device context of Gluon; it has no wait of ours, so it is compiled and not executed."""
    lanes = gl.arange(0, 1024, layout=gl.BlockedLayout([4], [64], [4], [0]))
    device = DEVICE.initialize(context)
    device.store(inbox + lanes, lanes + 7, peer)
    device.atomic_add(flags, 1, peer, sem="release", scope="sys")


PAIRS = (
    (ours_send, ours_receive),
    (iris_send, iris_receive),
    (iris_ops_send, iris_ops_receive),
    (iris_ops_send_gpu, iris_ops_receive_gpu),
)


def listing(kernel: Any, target: str) -> str:
    """The assembly of a kernel of this file."""
    words = [torch.empty(1024, dtype=torch.int32, device="meta") for _ in range(4)]
    bases = torch.empty(2, dtype=torch.int64, device="meta")
    with pretend(target):
        if kernel is iris_gluon_send:
            compiled = kernel.warmup(words[0], words[1], bases, 1, Device, grid=(1,), num_warps=4)
        else:
            arguments = words[0], words[1], bases, words[2], words[3], 0, 1
            compiled = kernel.warmup(*arguments, ANSWERED=False, TARGET="hip", grid=(1,), num_warps=4)
    return str(compiled.asm["amdgcn"])


def publishing(code: list[str], sends: bool) -> list[str]:
    """The instructions from the first store of the data to the atomic that publishes it, or from the first poll to the load after
    the invalidation. Where the listing has that load in an earlier block, they end at the invalidation.
    """
    if sends:
        first, last = "(global|flat|buffer)_store", "(global|flat)_atomic"
        start = end = next(at for at, line in enumerate(code) if re.match(first, line))
    else:
        first, last = "(global|flat)_(load|atomic).*sc[01]", "(global|flat|buffer)_load"
        start = next(at for at, line in enumerate(code) if re.match(first, line))
        end = next(at for at, line in enumerate(code) if line.startswith("buffer_inv"))
    return code[start : next((at for at in range(end + 1, len(code)) if re.match(last, code[at])), end) + 1]


def row(kernel: Any, target: str) -> str:
    """A line of the first table, and the faults of a sender."""
    text, name = listing(kernel, target), kernel.__name__
    part, sends = publishing(instructions(text), "send" in name), "send" in name
    counts = " ".join(f"{sum(line.startswith(kind) for line in part):>11d}" for kind in KINDS)
    kept = "(global|flat|buffer)_(store|atomic)|buffer_wbl2" if sends else "(global|flat|buffer)_(load|atomic_[ac])|buffer_inv"
    kinds = dict.fromkeys(_kind(line) for line in part if re.match(kept, line))
    lines = [f"{target:11s} {name:21s} {len(part):>12d} {counts}  {', '.join(kinds)}"]
    return "\n".join(lines + [f"{'':33s} {fault}" for fault in dict.fromkeys(faults(text) if sends else ())])


def _kind(line: str) -> str:
    """The mnemonic and the bits of an instruction."""
    mnemonic, *rest = line.replace(",", " ").split()
    return " ".join([mnemonic, *(word for word in rest if word in ("sc0", "sc1", "nt"))])


def executed(pair: tuple[Any, Any], seed: int, target: str = "hip:gfx942") -> str:
    """Rank 0 sends, rank 1 receives: `right`, `wrong`, or why the emulator stopped."""
    memory = Memory(seed)
    machine = Machine(2, memory, seed)
    shared = {"machine": machine, "programs": {}, "compiling": threading.Lock(), "launched": [], "edit": None}
    kind: Any = type("EmulatedHere", (Emulated,), shared)
    slabs = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
    out = torch.zeros(1024, dtype=torch.int32)

    def run(rank: int) -> None:
        try:
            world = World(rank, 2, "rocm", torch.device("cpu"), None, None, None)  # type: ignore[arg-type]
            heap = ThreadHeap(world, slabs)
            context = kind(world, heap, hardware(target, 2), LIMIT)
            inbox, flags, control = heap.zeros((1024,), torch.int32), context.flags(16), context.control()
            machine.exchange(rank, None)
            for slab in slabs:
                memory.admit(slab)
            context.launch(pair[rank], (1,), inbox, flags, heap.bases, control, out, rank, 1 - rank, ANSWERED=True, num_warps=4)
            machine.exchange(rank, None)
        except BaseException as error:
            machine.leave(error)
        else:
            machine.leave()

    with pretend(target):
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        machine.run()
    try:
        machine.check()
    except Exception as error:
        return f"stopped: {' '.join(str(error).split())[:60]}"
    return "right" if out.tolist() == [lane + 7 for lane in range(1024)] else "wrong"


def main() -> None:
    versions = [path.stem for path in Path(FOLDER).glob("*iris*.dist-info")]
    print(f"Triton {triton.__version__}, {versions[0] if versions else 'Iris'}")
    print("\nFrom the first store of the data to the atomic that publishes it, or from the first poll to the load of the data;")
    print("below a sender, the faults of its release\n")
    print(f"{'target':11s} {'kernel':21s} {'instructions':>12s}", *(f"{kind:>11s}" for kind in KINDS), " kinds, with their bits")
    kernels = [kernel for pair in PAIRS for kernel in pair]
    for target in ("hip:gfx942", "hip:gfx950"):
        for kernel in [*kernels, iris_gluon_send]:
            try:
                print(row(kernel, target), flush=True)
            except Exception as error:
                print(f"{target:11s} {kernel.__name__:21s} does not compile: {' '.join(str(error).split())[:160]}")
    print(f"\nExecuted in the emulator of gfx942, {SEEDS} seeds")
    for pair in PAIRS:
        outcomes = [executed(pair, seed) for seed in range(SEEDS)]
        counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
        print(f"{pair[0].__name__:21s} {pair[1].__name__:21s} {counts}", flush=True)


if __name__ == "__main__":
    main()
