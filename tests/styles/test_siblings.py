"""Our styles give the results of torch's styles for any layer, input and layouts; torch's style handles unsupported cases."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Replicate

from autotax.runner.ranks import Ranks
from tests.styles.siblings import Case, K, refusals, same, uneven_chain
from tests.torch.conftest import ranks  # noqa: F401 - the same processes

CASES = {
    f"{'column' if column else 'row'}, {name}": Case(column, **more)  # type: ignore[arg-type]
    for column in (True, False)
    for name, more in {
        "one dimension": {"shape": (K,), "dim": 0, "fused": False},
        "two dimensions": {"shape": (8, K), "dim": 0},
        "the last of two": {"shape": (8, K), "dim": 1, "fused": False},
        "the last of two, counted from the end": {"shape": (8, K), "dim": -1, "fused": False},
        "the first of three": {"shape": (4, 6, K), "dim": 0},
        "the second of three": {"shape": (2, 6, K), "dim": 1},
        "the second of three, counted from the end": {"shape": (2, 6, K), "dim": -2},
        "the last of three": {"shape": (2, 6, K), "dim": 2, "fused": False},
        "the third of four": {"shape": (2, 3, 4, K), "dim": 2},
        "no bias": {"shape": (8, K), "dim": 0, "bias": False},
        "DTensor": {"shape": (2, 6, K), "dim": 1, "as_dtensor": True, "local_output": False},
        "replicated DTensor": {"shape": (8, K), "dim": 0, "as_dtensor": True, "placed": Replicate(), "fused": False},
        "uneven DTensor": {"shape": (7, K), "dim": 0, "as_dtensor": True, "fused": False},
        "uneven DTensor, one row": {"shape": (1, K), "dim": 0, "as_dtensor": True, "local_output": False, "fused": False},
        "uneven rows of three dimensions": {"shape": (2, 5, K), "dim": 1, "as_dtensor": True, "fused": False},
        "no rows": {"shape": (0, K), "dim": 0, "as_dtensor": True, "fused": False},
        "other end replicated": {"shape": (8, K), "dim": 0, "other": Replicate(), "fused": False},
        "DTensor output": {"shape": (8, K), "dim": 0, "local_output": False},
        "no_grad": {"shape": (8, K), "dim": 0, "mode": "no_grad"},
        "inference mode": {"shape": (8, K), "dim": 0, "mode": "inference"},
        "twice": {"shape": (8, K), "dim": 0, "twice": True},
        "frozen weight": {"shape": (8, K), "dim": 0, "frozen": ("weight",)},
        "all frozen": {"shape": (8, K), "dim": 0, "frozen": ("weight", "bias")},
        "deep copy": {"shape": (8, K), "dim": 0, "change": "deepcopy"},
        "subclass": {"shape": (8, K), "dim": 0, "change": "subclass", "fused": False},
        **{
            change: {"shape": (8, K), "dim": 0, "change": change, "fused": change == "hook after"}
            for change in (
                "patched before",
                "patched after",
                "pre-hook after",
                "hook before",
                "hook after",
                "backward hook",
                "parametrized",
                "replicated after",
            )
        },
        "pre-hook before": {"shape": (8, K), "dim": 0, "change": "pre-hook before"},
    }.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_that_of_torchs_own_style(ranks: Ranks, name: str) -> None:  # noqa: F811
    ranks.run(same, CASES[name])


def test_uneven_rows_go_from_one_style_to_the_other(ranks: Ranks) -> None:  # noqa: F811
    ranks.run(uneven_chain)


def test_what_torchs_style_refuses_is_refused(ranks: Ranks) -> None:  # noqa: F811
    for keyword, pickling, second in ranks.run(refusals):
        assert keyword == ("IndexError", "IndexError")
        assert pickling[0] == pickling[1] != "none"
        assert second[0] == "UsageError"
        assert "second derivative" in second[1]
