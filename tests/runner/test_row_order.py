"""The order of samples: the number of times that each row follows each other row."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from autotax.runner.sampling import BalancedOrder, designs

ROWS = range(2, 26)
SEEDS = ("1", "2", "3")
BLOCKS = 12
"""Blocks, each of as many rounds as there are designs for a number of rows."""


def follows(rounds: list[list[int]]) -> Counter[tuple[int, int]]:
    """Counts how often each row follows each other row, also across the ends of rounds."""
    sequence = [row for permutation in rounds for row in permutation]
    return Counter(pairwise(sequence))


@pytest.mark.parametrize("rows", ROWS)
def test_each_row_follows_each_other_equally_often(rows: int) -> None:
    pairs = [(one, other) for one in range(rows) for other in range(rows) if one != other]
    for seed in SEEDS:
        order, rounds = BalancedOrder(rows, seed), []
        for _ in range(BLOCKS):
            rounds += [order.next_round() for _ in designs(rows)]
            transitions = follows(rounds)
            counts = [transitions[pair] for pair in pairs]
            assert max(counts) - min(counts) <= (1 if rows % 2 or rows == 2 else 4), (seed, len(rounds))
            assert sum(counts) == len(rounds) * rows - 1, "no row follows itself"
        assert all(sorted(permutation) == list(range(rows)) for permutation in rounds), "each row has one sample in each round"


@pytest.mark.parametrize("rows", ROWS)
def test_designs_hold_each_pair_once(rows: int) -> None:
    within = Counter(pair for design in designs(rows) for pair in pairwise(design))
    across = Counter((design[-1], design[0]) for design in designs(rows)) if rows % 2 else Counter()
    assert set((within + across).values()) == {1} and len(within + across) == rows * (rows - 1)


def test_no_row_follows_the_same_row_most_of_the_time() -> None:
    """A rotation fails this: each of nine rows follows the same row in eight rounds of nine."""
    order = BalancedOrder(9, "7")
    transitions = follows([order.next_round() for _ in range(50)])
    assert max(transitions.values()) <= 8


def test_equal_seeds_give_equal_rounds_and_others_others() -> None:
    one, same, other = (BalancedOrder(8, seed) for seed in ("5/order", "5/order", "6/order"))
    rounds = [one.next_round() for _ in range(20)]
    assert rounds == [same.next_round() for _ in range(20)] != [other.next_round() for _ in range(20)]


def test_one_row_follows_itself() -> None:
    order = BalancedOrder(1, "1")
    assert [order.next_round() for _ in range(3)] == [[0]] * 3
