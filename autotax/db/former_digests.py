"""Digests of variants as autotax 0.1 computed them, which depended on the names of modules, and the digests of the same code now.

Winners in databases, exports and shared files keep their meaning by this table. It goes with the next release.
"""

from __future__ import annotations

CURRENT = {
    "fe0bb2886133dd1f": "1000c87cc9cb1142",  # all-gather-gemm/bsp
    "c8a0d36aecd63d13": "288138f39989b98b",  # all-gather-gemm/decomposed
    "21a515005894653a": "bc62f90a8e5b4cfd",  # all-gather-gemm/copy_engine
    "6fed33a6fa964287": "41dea08e93ff8eea",  # all-gather-gemm/pull
    "bf706b5dfba1ddc5": "a916e62d334141eb",  # all-gather-gemm/push
    "e4f0eb3d5b8171fc": "551270e7b1344b59",  # all-gather-gemm/push_specialized
    "09711bc28747b7c4": "99e0df8eaa9b06aa",  # all-gather-gemm/push_words
    "82037b6f0e76fbf5": "ebddc85dc0755cf0",  # all-gather-gemm/push_packets
    "9ba879831786ea94": "861cc207b33fb64d",  # all-gather-gemm/staged_pull
    "73ed1c04cb7287de": "614ba080d88f59ac",  # all-gather-gemm/push_two_kernel
    "ebf24f3fdd3d6263": "69588bc7d904b42f",  # decode-merge/bsp
    "96ad667509d140bd": "3b530c483e4ddca1",  # decode-merge/gather
    "8a6e8434acc79ce2": "8d93631fdf81ee5c",  # decode-merge/fine_grained
    "b9ec9ac8a89fea7d": "bb58e6e2de345bc8",  # decode-merge/words
    "3c0d91f651ee8527": "76e54fc1745e5e9f",  # decode-merge/compact
    "3d1712e1f4db8526": "6b8e6dfb87c287ca",  # flash-decode/bsp
    "7659f1ffadbe0f64": "e565691f7f47f26e",  # flash-decode/gather
    "42ecd53b08c9bb29": "50f6de53524a6c44",  # flash-decode/fine_grained
    "f6b5321262a2e0b7": "7990d5696770e2e5",  # flash-decode/fused
    "b33b0952a97b73ca": "8d974b19db355aa0",  # flash-decode/single
    "64d50ef743601d9e": "85a6464456d52a78",  # flash-decode/resident
    "72aacc8bf78cbc19": "cb972e8bc50129b5",  # flash-decode/compact
    "b26684f604a75676": "65fc6c5d44bdc4b6",  # gemm-reduce-scatter/bsp
    "f5a132cbadb05cbb": "973c7f6b2f6ef0dc",  # gemm-reduce-scatter/decomposed
    "d0d051949b79d731": "3d52c5bdddc21be0",  # gemm-reduce-scatter/push
    "5da769fcff0e6761": "5e7dd3f60d465858",  # gemm-reduce-scatter/pull_reduce
    "9f2cb5b1a19b2654": "9f65f645b813e677",  # gemm-reduce-scatter/push_specialized
    "61b084ebc06e8254": "e2373c0fce33c577",  # gemm-reduce-scatter/words
    "8f742c7113e5bbe1": "0e9e7c6cb54918e9",  # head-gather/bsp
    "7e0a30f37f938799": "a8587d3393d7f0c7",  # head-gather/push
    "26f57f11c0c18a78": "5f37fb6b21c7ef07",  # head-gather/words
}
"""The digest that `autotax.sources` computes now, by the former digest of the same code."""


def current_digest(digest: str) -> str:
    """The digest of the same code as computed now; any other digest as it is."""
    return CURRENT.get(digest, digest)
