"""Signals that programs of one die make together: no interleaving of their steps loses a signal or sends one too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from autotax.kernels.primitives import die_of_program, signal_of_die
from tests.kernels.compilers import compilers
from tests.kernels.releases import AMD, faults, instructions


class State(NamedTuple):
    """Progress of the programs of one or more dies. A step is one memory access of `signal_of_die`."""

    at: tuple[int, ...]
    """The next step of each program."""
    seen: tuple[int, ...]
    """The pending count that each program has read."""
    pending: tuple[int, ...]
    """Pending signals of each die."""
    dirty: frozenset[int]
    """Programs whose data are in the L2 of their die only."""
    signalled: int
    """Value of the flag."""


STORE, COUNT, READ, WRITE_BACK, TELL, TAKE_OFF, DONE = range(7)


def after(state: State, program: int, die: tuple[int, ...], write_back_first: bool) -> State:
    """One step of a program; the wrong order writes back before it reads the count."""
    order = (WRITE_BACK, READ) if write_back_first else (READ, WRITE_BACK)
    at, seen, pending, dirty, flag = list(state.at), list(state.seen), list(state.pending), set(state.dirty), state.signalled
    mine, step = die[program], at[program]
    step = order[step - READ] if step in (READ, WRITE_BACK) else step
    at[program] += 1
    if step == STORE:
        dirty.add(program)
    elif step == COUNT:
        at[program] = READ if pending[mine] == 0 else DONE
        pending[mine] += 1
    elif step == READ:
        seen[program] = pending[mine]
    elif step == WRITE_BACK:
        dirty -= {other for other in dirty if die[other] == mine}
    elif step == TELL:
        flag += seen[program]
    else:
        pending[mine] -= seen[program]
        at[program] = READ if pending[mine] else DONE
    return State(tuple(at), tuple(seen), tuple(pending), frozenset(dirty), flag)


def reached(die: tuple[int, ...], write_back_first: bool = False) -> Iterator[State]:
    """Every state that some interleaving reaches."""
    start = State((STORE,) * len(die), (0,) * len(die), (0,) * len(die), frozenset(), 0)
    states, coming = {start}, [start]
    while coming:
        state = coming.pop()
        yield state
        for program, step in enumerate(state.at):
            if step != DONE and (new := after(state, program, die, write_back_first)) not in states:
                states.add(new)
                coming.append(new)


def early(state: State) -> bool:
    """Whether a flag that has all signals has been seen while data are not yet where a peer finds them."""
    return state.signalled == len(state.at) and bool(state.dirty)


@pytest.mark.parametrize("die", [(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (0, 0, 1, 1)], ids=str)
def test_every_interleaving_tells_of_all_once_and_of_none_too_early(die: tuple[int, ...]) -> None:
    states = list(reached(die))
    assert not any(early(state) or state.signalled > len(die) for state in states)
    ends = [state for state in states if set(state.at) == {DONE}]
    assert ends
    assert all(state.signalled == len(die) and not any(state.pending) for state in ends)


def test_reading_the_count_after_the_write_back_would_tell_too_early() -> None:
    assert any(early(state) for state in reached((0, 0), write_back_first=True))


@triton.jit
def _sending(data, flag, pending):
    tl.store(data + tl.arange(0, 256), 1)
    signal_of_die(flag, pending + die_of_program(8, "hip"), "hip")


def _assembly(target: str) -> str:
    from autotax.kernels.offline import pretend

    words: list[Any] = [torch.empty(1024, dtype=torch.int32, device="meta") for _ in range(3)]
    with pretend(target):
        return _sending.warmup(*words, grid=(1,), num_warps=4).asm["amdgcn"]


@pytest.mark.volume
def test_amd_is_asked_for_the_die_and_knows_the_count_before_it_writes_back() -> None:
    with compilers(1) as pool:
        listings = [pool.submit(_assembly, target).result() for target in AMD]
    for listing in listings:
        code = instructions(listing)
        assert faults(listing) == []
        assert any("hwreg(HW_REG_XCC_ID" in line for line in code)
        back = code.index("buffer_wbl2 sc0 sc1")
        known = max(at for at in range(back) if code[at] == "s_barrier")
        assert not any(line.startswith("global_") for line in code[known:back])
        assert any(line.startswith(("global_load_dword ", "global_atomic_add")) for line in code[:known])
        atomic = next(line for line in code[back:] if line.startswith("global_atomic"))
        assert atomic.endswith("sc1")
        assert "sc0" not in atomic
