"""Runs the source of kernels whose warps have roles on the CPU: a thread for each partition of warps, NumPy for tensors.

Asynchronous work of the GPU happens here as late as possible. A product is computed when the source waits for it. A TMA store
reads shared memory at `wait_group.read` and reaches memory at `wait_group 0`. A value used too early is then wrong or NaN.
Barriers have the phases of mbarriers, whose waits see only the parity of a phase. Threads are delayed at random.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime.jit import JITFunction

PATIENCE_S = 500.0
"""Seconds after which a wait counts as endless."""
here = threading.local()
"""The thread's program, its running products and its stores."""
stopped = threading.Event()
"""Set when a thread has failed, so that the others stop waiting."""


class Array(np.ndarray):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if bitcast:
            return self.view(dtype).view(Array)
        if isinstance(dtype, np.ndarray):  # an address in this memory
            return Pointer(dtype, self // dtype.itemsize)
        return self.astype(dtype).view(Array)

    def permute(self, sides: tuple[int, ...]) -> Any:
        return self.transpose(sides)

    def split(self) -> tuple[Any, Any]:
        return self[..., 0], self[..., 1]


class Pointer:
    """An element of a tensor, or a block of elements."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def to(self, _: Any) -> Any:
        return np.asarray(self.at * self.memory.itemsize).view(Array)


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all bytes that are expected have come."""

    def __init__(self) -> None:
        self.condition, self.phase, self.count, self.arrived, self.bytes = threading.Condition(), 0, 0, 0, 0

    def come(self, arrivals: int, more: int) -> None:
        with self.condition:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + more
            assert self.arrived <= self.count, "more arrivals than a phase takes"
            if (self.arrived, self.bytes) == (self.count, 0):
                self.phase, self.arrived = self.phase + 1, 0
                self.condition.notify_all()

    def wait(self, parity: int) -> None:
        _dawdle()
        end = time.monotonic() + PATIENCE_S
        with self.condition:
            while not self.condition.wait_for(lambda: self.phase & 1 != parity, 0.1):
                assert not stopped.is_set(), "another partition has failed"
                assert time.monotonic() < end, "a wait that never ends"


class Shared:
    """A block of shared memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.dtype, self.shape = memory, memory.dtype, memory.shape

    def index(self, at: int) -> Shared:
        return Shared(self.memory[at])

    def permute(self, sides: tuple[int, ...]) -> Shared:
        return Shared(self.memory.transpose(sides))

    def slice(self, first: int, count: int, _: int) -> Shared:
        return Shared(self.memory[first : first + count])

    def store(self, block: np.ndarray) -> None:
        self.memory[...] = block

    def load(self, _: Any) -> Array:
        return self.memory.copy().view(Array)


class Codes(Shared):
    """A block of words of 16 bits as twice as many codes of e4m3."""

    NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()

    def __init__(self, words: np.ndarray) -> None:
        self.words, self.shape = words, (len(words), 2 * words.shape[1])

    @property
    def memory(self) -> np.ndarray:  # type: ignore[override]
        return self.NUMBERS[self.words.view(np.uint8)]

    def permute(self, sides: tuple[int, ...]) -> Any:
        return SimpleNamespace(of=self, sides=sides)


class View:
    """A TMA descriptor of boxes of a tensor: zeros come from outside of it, and nothing is stored there."""

    def __init__(self, tensor: np.ndarray, box: tuple[int, ...]) -> None:
        self.tensor, self.box, self.dtype = tensor, box, tensor.dtype
        self.layout = SimpleNamespace(swizzle_byte_width=128, element_bitwidth=16)
        self.block_shape = box

    def inside(self, at: Iterable[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The slices of a box that lie inside the tensor: in the tensor and in the box."""
        bounds = [
            (first, max(first, min(first + size, end))) for first, size, end in zip(at, self.box, self.tensor.shape, strict=True)
        ]
        return tuple(slice(a, b) for a, b in bounds), tuple(slice(0, b - a) for a, b in bounds)


def _dawdle() -> None:
    if random.random() < 0.1:
        time.sleep(random.random() * 5e-4)


def _load_block(view: View, at: list[int], barrier: Barrier, block: Shared) -> None:
    there, here_ = view.inside(at)
    assert block.shape == view.box
    block.memory[...] = 0
    block.memory[here_] = view.tensor[there]
    barrier.come(0, -block.memory.nbytes)


def _store_block(view: View, at: list[int], block: Shared) -> None:
    assert block.shape == view.box
    here.unread.append((view, at, block))


def _store_wait(_: int) -> None:
    """Lets all stores read their source. They read it no earlier."""
    _dawdle()
    while here.unread:
        view, at, block = here.unread.popleft()
        here.unwritten.append((view, at, block.memory.copy()))


def _assembly(text: str, _: str = "", operands: Any = (), *__: Any, **___: Any) -> Any:
    if text.startswith("mul.f32"):
        return operands[0] * operands[1]
    if "wait_group 0" in text:
        assert not here.unread
        _dawdle()
        while here.unwritten:
            view, at, block = here.unwritten.popleft()
            there, part = view.inside(at)
            view.tensor[there] = block[part]
    return 0


def _product(x: Any, y: Any, total: np.ndarray, is_async: bool, use_acc: bool = True) -> np.ndarray:
    assert is_async

    def add() -> None:
        one = x.memory if isinstance(x, Shared) else x  # in registers
        other = y.of.memory.transpose(y.sides) if hasattr(y, "of") else y.memory
        total[...] = (total if use_acc else 0.0) + one.astype(np.float32) @ other.astype(np.float32)

    here.products.append(add)
    return total


def _products_wait(num_outstanding: int, deps: tuple[np.ndarray, ...]) -> Any:
    while len(here.products) > num_outstanding:
        here.products.popleft()()
    return deps if len(deps) > 1 else deps[0]


def _load(pointer: Pointer, mask: Any = True, other: float = 0, cache_modifier: str = "", volatile: bool = False) -> Any:  # noqa: ARG001
    if volatile:  # it is polled
        _dawdle()
        assert not stopped.is_set(), "another partition has failed"
    at, mask = np.broadcast_arrays(pointer.at, mask)
    assert (at[mask] >= 0).all()
    values = np.full(at.shape, other, pointer.memory.dtype)
    values[mask] = pointer.memory[at[mask]]
    return values.view(Array)


def _store(pointer: Pointer, block: np.ndarray, mask: Any = True) -> None:
    block = np.asarray(block)
    at, mask = np.broadcast_to(pointer.at, block.shape), np.broadcast_to(mask, block.shape)
    counts = pointer.memory.dtype.kind == "i"
    assert counts or np.isnan(pointer.memory[at[mask]]).all(), "an element is stored twice"
    pointer.memory[at[mask]] = block[mask]


def _wait_first(flags: list[np.ndarray], first: int, count: int, source: int, epoch: int, *_: Any) -> int:
    """See `roles.wait_first`. Here `flags` are those of all ranks."""
    end = time.monotonic() + PATIENCE_S
    while True:
        seen = flags[here.rank][first : first + count]
        raised = (seen == epoch) | (seen == epoch + 1)
        if raised[0]:
            return count if raised.all() else int(raised.argmin())
        assert not stopped.is_set(), "another rank has failed"
        assert time.monotonic() < end, f"rank {here.rank} waits for a flag of rank {source} that is never set"
        time.sleep(2e-5)


def _raised(flags: list[np.ndarray], index: np.ndarray, epoch: int) -> Array:
    seen = flags[here.rank][index]
    return ((seen == epoch) | (seen == epoch + 1)).view(Array)


def _missing(_: Any, source: int, *__: Any) -> None:
    raise AssertionError(f"rank {here.rank} gave up waiting for rank {source}")


_counting = threading.Lock()


def _count(word: Pointer, *_: Any) -> int:
    """See `primitives.count`."""
    with _counting:
        word.memory[word.at] += 1
        return int(word.memory[word.at]) - 1


def _set_flag(flag: tuple[list[np.ndarray], int, int], epoch: int, **_: Any) -> None:
    flags, index, rank = flag
    flags[rank][index] = epoch


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    program = here.rank, here.program, here.programs
    together([(lambda call=call, args=args: _begin(program, call, args)) for call, args in partitions])


def _begin(program: tuple[int, int, int], call: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
    here.rank, here.program, here.programs = program
    here.products, here.unread, here.unwritten = deque(), deque(), deque()
    call(*args)
    assert not here.products
    assert not here.unread
    assert not here.unwritten


def together(calls: Iterable[Callable[[], None]]) -> None:
    """Runs each in a thread. Raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
            stopped.set()

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _shared(dtype: Any, shape: list[int], _: Any) -> Any:
    if dtype is np.int64:  # barriers
        return Barrier() if len(shape) == 1 else SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
    return Shared(np.full(shape, np.nan, dtype))


def _nothing(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = count


def _expect(barrier: Barrier, size: int) -> None:
    barrier.come(1, size)


def _arrive(barrier: Barrier, pred: Any = True) -> None:
    _dawdle()
    if pred:
        barrier.come(1, 0)


def _minimum(one: Any, other: Any) -> Any:
    return np.minimum(one, other).view(Array) if isinstance(one, np.ndarray) else min(one, other)


def _maximum(one: Any, other: Any) -> Any:
    return np.maximum(one, other).view(Array) if isinstance(one, np.ndarray) else max(one, other)


def _where(*args: Any) -> Any:
    """A number where all are numbers: unlike an array, `+=` does not change it for others."""
    chosen = np.where(*args)
    return chosen.view(Array) if chosen.ndim else chosen.item()


def _of_rows(reduce: Callable[..., Any]) -> Callable[[Array, int], Array]:
    return lambda block, axis: np.asarray(reduce(np.asarray(block), axis)).view(Array)


gluon_language = SimpleNamespace(
    program_id=lambda _: here.program, num_programs=lambda _: here.programs, static_range=range, static_assert=_nothing,
    cdiv=lambda a, b: -(-a // b), cast=lambda value, _: int(value), where=_where,
    minimum=_minimum, maximum=_maximum, min=_of_rows(np.min), max=_of_rows(np.max),
    sum=_of_rows(np.sum), exp2=np.exp2, log2=np.log2,
    convert_layout=lambda block, _: block, float8e4nv="codes",
    float32=np.float32, int64=np.int64, int32=np.int32, int16=np.int16,
    zeros=lambda shape, dtype, _: np.zeros(shape, dtype).view(Array), load=_load, store=_store,
    arange=lambda first, end, layout: np.arange(first, end).view(Array),  # noqa: ARG005
    inline_asm_elementwise=_assembly, atomic_xchg=_set_flag, allocate_shared_memory=_shared, warp_specialize=_specialize,
    constexpr=None, SliceLayout=_nothing, BlockedLayout=_nothing, NVMMADistributedLayout=_nothing, NVMMASharedLayout=_nothing,
    DotOperandLayout=_nothing, SwizzledSharedLayout=_nothing,
)  # fmt: skip
FAKES: dict[str, Any] = {
    "gl": gluon_language, "tl": gluon_language,
    "mbarrier": SimpleNamespace(wait=Barrier.wait, arrive=_arrive, expect=_expect, init=_init, MBarrierLayout=_nothing),
    "tma": SimpleNamespace(store_wait=_store_wait),
    "warpgroup_mma": _product, "warpgroup_mma_wait": _products_wait, "fence_async_shared": _nothing, "settle": _nothing,
    "load_block": _load_block, "store_block": _store_block, "wait_first": _wait_first, "raised": _raised, "count": _count,
    "layout_of_words": _nothing,
    "reinterpret": lambda block, dtype, shape, _: (
        Codes(block.memory) if dtype == "codes" else Shared(block.memory.reshape(-1).view(dtype).reshape(shape))
    ),
    "note_missing": _missing, "flag_address": lambda flags, index, bases, rank, peer: (flags, index, peer),  # noqa: ARG005
}  # fmt: skip


def plain(kernel: Any) -> Callable[..., Any]:
    """The function behind a kernel, with what it calls replaced likewise."""
    source = kernel.fn
    known = dict(source.__globals__)
    for name in source.__code__.co_names:
        if name in FAKES:
            known[name] = FAKES[name]
        elif isinstance(known.get(name), JITFunction):
            known[name] = plain(known[name])
        elif hasattr(known.get(name), "value"):
            known[name] = known[name].value
    return FunctionType(source.__code__, known, source.__name__, source.__defaults__)


def programs_of(rank: int, programs: int, call: Callable[..., None], args: tuple[Any, ...]) -> Iterator[Callable[[], None]]:
    """A launch: the same call by every program."""
    for program in range(programs):
        yield lambda program=program: _begin((rank, program, programs), call, args)
