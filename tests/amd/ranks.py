"""Ranks on emulated AMD GPUs: operators as they are, their kernels compiled for gfx942, the listings executed."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotax.core.config import Config
from autotax.core.problem import Problem
from autotax.hardware import Hardware
from autotax.heap.base import Heap
from autotax.heap.world import World
from autotax.kernels import prepare
from autotax.kernels.context import Context
from autotax.kernels.offline import fix_cache_keys, known_hardware, pretend
from autotax.operators.verification import make_inputs, reference, relative_error
from tests.amd.listing import read
from tests.amd.machine import Machine, Program
from tests.amd.memory import Memory

CPU = torch.device("cpu")
PROCESSORS = 4
SLAB_BYTES = 4 << 20
POLL_LIMIT = 20000

Edit = Callable[[str], str]
"""A test's change of a listing, which should make the emulated kernel fail."""


def hardware(target: str, count: int) -> Hardware:
    """A small GPU, so that loops over tiles have several rounds."""
    return replace(known_hardware(target), device=f"emulated {target}", count=count, processors=PROCESSORS)


@dataclass(frozen=True)
class Outcome:
    """Result of several calls: the greatest relative error of each call over all ranks, and the note of a wait that gave up."""

    errors: tuple[float, ...]
    notes: tuple[str, ...]
    kernels: tuple[str, ...]
    instructions: int


class ThreadHeap(Heap):
    """Slabs of threads of one process."""

    def __init__(self, world: World, slabs: list[Tensor]) -> None:
        super().__init__(world)
        self.slab, self.slabs = slabs[world.rank], slabs
        self.bases = torch.tensor([slab.data_ptr() for slab in slabs], dtype=torch.int64)

    def peer_slab(self, rank: int) -> Tensor:
        return self.slabs[rank]

    def close(self) -> None:
        pass


class Emulated(Context):
    """A rank whose launches the machine executes. Copies and collectives act on memory at once, as between kernels."""

    machine: Machine
    programs: dict[str, Program]
    edit: Edit | None = None
    compiling: threading.Lock
    launched: list[str]

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        with self.compiling:
            binary = kernel.warmup(*args, TARGET=self.target, grid=grid, **options)
            if binary.hash not in self.programs:
                listing = binary.asm["amdgcn"]
                self.programs[binary.hash] = Program(read(self.edit(listing) if self.edit else listing))
            program = self.programs[binary.hash]
        assert all(size == 1 for size in grid[1:]), "grids have one dimension"
        given = dict(zip(kernel.arg_names, args, strict=False)) | options | {"TARGET": self.target}
        arguments = _packed(program, binary, kernel.arg_names, given, grid[0])
        memory = self.machine.memory
        for tensor in _tensors(given.values()):
            memory.admit(tensor)
        memory.admit_range(int(arguments.ctypes.data), arguments.nbytes, arguments)
        shared = max(binary.metadata.shared, program.listing.settings.get("group_segment_fixed_size", 0))
        self.launched.append(kernel.__name__)
        self.machine.launch(self.rank, program, grid[0], arguments, shared)

    def all_gather(self, gathered: Tensor, shard: Tensor) -> None:
        parts = self.machine.exchange(self.rank, shard.reshape(-1).view(torch.uint8).clone())
        gathered.view(-1).view(torch.uint8).copy_(torch.cat([part for part in parts if isinstance(part, Tensor)]))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        parts = self.machine.exchange(self.rank, sent.reshape(self.world.size, -1).view(torch.uint8).clone())
        mine = [part[self.rank] for part in parts if isinstance(part, Tensor)]
        received.view(-1).view(torch.uint8).copy_(torch.cat(mine))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


_FORMATS = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f"}
_HIDDEN = {f"hidden_{name}_{axis}": 1 for name in ("group_size", "block_count") for axis in "yz"} | {"hidden_grid_dims": 1}


def _packed(program: Program, binary: Any, names: list[str], given: dict[str, Any], grid: int) -> Any:
    """The kernel's argument block. Arguments that the compiler treated as constants are not in it."""
    values: list[bytes] = []

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for part, one in zip(kind, value, strict=True):
                add(part, one)
        elif kind.startswith("*"):
            values.append(struct.pack("<Q", value.data_ptr() if isinstance(value, Tensor) else 0))
        elif kind != "constexpr":
            values.append(struct.pack(_FORMATS[kind], value))

    for name in names:
        add(binary.src.signature[name], given.get(name))
    layout = program.listing.arguments
    hidden = _HIDDEN | {"hidden_block_count_x": grid, "hidden_group_size_x": 64 * program.listing.waves}
    block = bytearray(max([offset + size for offset, size, _ in layout] + [program.listing.settings["kernarg_size"]]))
    visible = [argument for argument in layout if not argument[2].startswith("hidden")]
    for (offset, size, _), value in zip(visible, values, strict=False):
        assert len(value) == size
        block[offset : offset + size] = value
    assert len(values) <= len(visible)
    for offset, size, kind in layout:
        if kind in hidden:
            block[offset : offset + size] = hidden[kind].to_bytes(size, "little")
    return np.frombuffer(bytes(block) + bytes(-len(block) % 64 + 64), np.uint8).copy()


def emulate(
    problem: Problem,
    config: Config,
    calls: int,
    seed: int = 0,
    *,
    target: str = "hip:gfx942",
    weak: bool = True,
    edit: Edit | None = None,
) -> Outcome:
    """Calls with the inputs of seeds 0, 1, ... on all ranks; odd ones are ragged."""
    fix_cache_keys()
    memory = Memory(seed, weak)
    machine = Machine(problem.world_size, memory, seed)
    kind: Any = type(
        "EmulatedHere", (Emulated,), {"machine": machine, "programs": {}, "compiling": threading.Lock(), "launched": []}
    )
    kind.edit = staticmethod(edit) if edit else None
    slabs = [torch.zeros(SLAB_BYTES, dtype=torch.uint8) for _ in range(problem.world_size)]
    errors: list[list[float]] = [[] for _ in range(calls)]
    notes: list[str] = []

    def run(rank: int) -> None:
        try:
            world = World(rank, problem.world_size, "rocm", CPU, None, None, None)  # type: ignore[arg-type]
            context = kind(world, ThreadHeap(world, slabs), hardware(target, problem.world_size), POLL_LIMIT)
            operator = prepare(problem, config, context)
            machine.exchange(rank, None)
            for slab in slabs:
                memory.admit(slab)
            drawn = [make_inputs(problem, number, rank, CPU) for number in range(calls)]
            for number, call in enumerate(drawn):
                call.poison()
                operator(*call.tensors, call.out)
                errors[number].append(relative_error(call.out, reference(problem, number, rank, CPU), call))
                if note := operator.failure():
                    notes.append(note)
                    break
            machine.exchange(rank, None)
        except BaseException as error:
            machine.leave(error)
        else:
            machine.leave()

    with pretend(target):
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(problem.world_size)]
        for thread in threads:
            thread.start()
        machine.run()
        for thread in threads:
            thread.join()
    machine.check()
    worst = tuple(max(row, default=float("inf")) for row in errors)
    return Outcome(worst, tuple(notes), tuple(kind.launched), machine.executed)
