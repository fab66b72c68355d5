"""Winners of other software that hold, because their kernels compile to the machine code that was proven.

The Triton at hand compiles them offline, in processes of their own. A winner that holds is stored as one of this software, so
every look-up finds it and nothing is compiled a second time. Other winners have to be proven again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from autotax.db import Store, WinnerRecord
from autotax.db.records import Entry, Stale, same_kernel
from autotax.hardware import Hardware
from autotax.operators import loaded
from autotax.runner.precompile import CompileAhead
from autotax.software import environment

START_S, EACH_S = 10.0, 1.0
"""Seconds in which compilers start, and in addition for each winner. What is not compiled by then has to be proven."""
MOST_COMPILERS = 16


def hold(stale: Sequence[Stale], hardware: Hardware, store: Store, within_s: float) -> list[Stale]:
    """Stores winners whose machine code is equal here. Returns what has to be proven. Takes `within_s` seconds at most."""
    former = {index: winner for index, item in enumerate(stale) if (winner := _comparable(item))}
    if not former:
        return list(stale)
    here = environment(hardware.backend)
    codes = _compiled(list(former.values()), hardware, min(within_s, START_S + EACH_S * len(former)))
    equal = {index for (index, winner), code in zip(former.items(), codes, strict=True) if code == winner.machine_code}
    if entries := [Entry(replace(former[index], environment=here)) for index in sorted(equal)]:
        store.merge(entries, "equal machine code, measured with other software")
    return [item for index, item in enumerate(stale) if index not in equal]


def _comparable(stale: Stale) -> WinnerRecord | None:
    """The former winner that would answer look-ups if the software were the same, unless its machine code is unknown."""
    winner = min(stale.winners, key=lambda winner: winner.conditions.mode != stale.conditions.mode)
    return winner if winner.machine_code and same_kernel(winner) else None


def _compiled(winners: Sequence[WinnerRecord], hardware: Hardware, within_s: float) -> list[str | None]:
    """The digests of their machine code here; None for what does not compile in time."""
    compilers = CompileAhead(hardware, min(len(winners), MOST_COMPILERS, os.cpu_count() or 1), loaded())
    ends = time.monotonic() + within_s
    try:
        for winner in winners:
            compilers.expect(winner.problem, [winner.config])
        while time.monotonic() < ends and not all(compilers.ready(winner.problem, winner.config) for winner in winners):
            compilers.pump(timeout=0.05)
        return [compilers.code(winner.problem, winner.config) for winner in winners]
    finally:
        compilers.close()
