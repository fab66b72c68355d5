"""WHAT was tuned with sources that were published, before winners named the sources of their variant alone.

Databases up to schema version 3 and files of version 1 tell one digest of all kernel sources. Of the release below it is known
what its variants were made of. Nothing is ever added: whatever is tuned since tells it by itself.
"""

from __future__ import annotations

ALL_SOURCES = "c6be04882bf5470b"

_OF = {
    "all-gather-gemm": {
        "bsp": "ffeef92ba7bece81",
        "decomposed": "69f1ffb56d62b46d",
        "copy_engine": "e5be9b6648c2a476",
        "pull": "ff3c369d0c7dad64",
        "push": "0836224b68ab25ce",
        "staged_pull": "69cf5a450e204977",
        "push_two_kernel": "a72a78eba99d0619",
    },
    "flash-decode": {
        "bsp": "8eed5bc28a520739",
        "gather": "3d8bc81ec0d94e4a",
        "fine_grained": "0bab01369fa63cce",
        "fused": "854d5dc843397528",
        "single": "afd865e16dd76abe",
        "resident": "fa50163323792473",
    },
}

VARIANTS = {(op, variant): digest for op, variants in _OF.items() for variant, digest in variants.items()}
"""The digest of the sources of each variant of the release."""


def variant_digest(all_sources: str, op: str, variant: str) -> str:
    """The digest of the sources of a variant, from that of all; the latter, which no variant has, for what was not released."""
    return VARIANTS.get((op, variant), all_sources) if all_sources == ALL_SOURCES else all_sources
