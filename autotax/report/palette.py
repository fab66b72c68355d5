"""One colour for each variant, the same in all charts and tables. All colours can be seen on white and on near-black."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from autotax.operators import operators

BASELINE = "#808080"
COLOURS = (
    "#1f7fd1", "#c46a00", "#d1437a", "#8a5cd6", "#7d8512", "#0d8fa3", "#d2452b", "#4d8f2a", "#b04fc4", "#a0622d", "#5570e0",
)  # fmt: skip
WORK, STILL_PAID, WON_BACK = "#66809a", "#b5831a", "#12905c"
"""Parts of a bulk-synchronous call. No variant has these colours."""


def colour_of(variant: str) -> str:
    """Of a variant that no operator declares, too: it may come from an older version or from a module that is not loaded."""
    declared = _declared(tuple(tuple(operator.variants) for operator in operators().values()))
    return declared.get(variant) or COLOURS[sum(variant.encode()) % len(COLOURS)]


@cache
def _declared(families: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """Variants of one operator differ as long as there are colours; a name that several operators have is one variant."""
    chosen = {"bsp": BASELINE}
    for name in dict.fromkeys(name for family in families for name in family):
        taken = {chosen[other] for family in families if name in family for other in family if other in chosen}
        used = list(chosen.values())
        chosen.setdefault(name, min(COLOURS, key=lambda colour: (colour in taken, used.count(colour))))
    return chosen


def scale(variants: Iterable[str]) -> dict[str, list[str]]:
    """Domain and range of a colour scale, in the order of the names."""
    names = sorted(set(variants))
    return {"domain": names, "range": [colour_of(name) for name in names]}
