"""The order of samples: drawn anew each round, and balanced, so that each row follows each other row equally often.

Each sample is influenced by the previous one: clocks, caches, a late host. A row that always follows the same row would always
get the influence of that row. Rounds are Williams designs. For an even number n of rows, each ordered pair is adjacent once in n
rounds. For an odd n this takes n - 1 rounds, which are Walecki's Hamiltonian cycles with one start. There, pairs across the ends
of rounds count too.
"""

from __future__ import annotations

import random
from collections import Counter


class BalancedOrder:
    """An endless sequence of rounds, each a permutation of `rows` numbers. Equal seeds give equal rounds.

    No row follows itself across the end of a round, unless it is the only one. For an odd number n of rows, the adjacency counts
    of two ordered pairs differ by at most one after each n - 1 rounds. For an even number they differ by at most four after any
    number of rounds.
    """

    def __init__(self, rows: int, seed: str) -> None:
        self._random = random.Random(seed)
        names = list(range(rows))
        self._random.shuffle(names)
        self._designs = [[names[place] for place in design] for design in designs(rows)]
        self._taken: Counter[int] = Counter()
        self._across: Counter[tuple[int, int]] = Counter()
        self._last: int | None = None

    def next_round(self) -> list[int]:
        """The rows in the order of sampling. Among the designs used about equally often, it takes one whose first row has
        followed the previous round's last row least often.
        """
        taken = [self._taken[number] for number in range(len(self._designs))]
        early = [max(0, count - min(taken) - 1) for count in taken]
        fit = [number for number, design in enumerate(self._designs) if design[0] != self._last or len(design) == 1]
        chosen = min(fit, key=lambda number: (early[number], self._follows(number), taken[number], self._random.random()))
        design = self._designs[chosen]
        self._taken[chosen] += 1
        if self._last is not None:
            self._across[self._last, design[0]] += 1
        self._last = design[-1]
        return list(design)

    def _follows(self, number: int) -> int:
        return self._across[self._last, self._designs[number][0]] if self._last is not None else 0


def designs(rows: int) -> list[list[int]]:
    """Rounds in which each ordered pair is adjacent equally often: see the module."""
    even = rows - rows % 2
    start = [even] if rows % 2 else []
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(even)]
    return [start + [(first + step) % even for step in zigzag] for first in range(max(1, even))]
