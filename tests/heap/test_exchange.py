"""Messages between ranks are typed, bounded and never unpickled. All ranks refuse a malformed message together."""

from __future__ import annotations

from typing import Any

from autotax.core.errors import MachineError
from autotax.heap import world as exchange
from autotax.heap.world import World
from autotax.runner.ranks import run_ranks


def gathered(world: World, values: list[Any], kind: Any) -> Any:
    try:
        return world.gather(values[world.rank], kind)
    except MachineError as error:
        return str(error)


def several(world: World) -> list[Any]:
    large = "x" * (exchange.LARGEST + 1)
    return [
        gathered(world, ["short", "y" * 5000], str),
        gathered(world, [("", 1), ("ä" * exchange.FIRST, 2**40)], tuple[str, int]),
        gathered(world, [None, "why"], str | None),
        gathered(world, [1, "one"], int),
        gathered(world, ["small", large], str),
        gathered(world, [object(), "a text"], str),
        gathered(world, ["\ud800", "a text"], str),
        gathered(world, [1.5, float("inf")], float),
    ]


def test_ranks_exchange_values_of_a_type_and_refuse_others_together() -> None:
    first, second = run_ranks(several, 2)
    assert first == second
    right, pairs, none, mistyped, large, thing, surrogate, floats = first
    assert right == ["short", "y" * 5000] and pairs == [("", 1), ("ä" * exchange.FIRST, 2**40)] and none == [None, "why"]
    assert mistyped.startswith("what rank 1 sends is no int")
    assert "rank 1" in large and f"at most {exchange.LARGEST}" in large
    assert thing.startswith("rank 0 cannot encode") and surrogate.startswith("rank 0 cannot encode")
    assert floats == [1.5, float("inf")]
    assert not any("\n" in line for line in (mistyped, large, thing, surrogate))
