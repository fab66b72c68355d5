"""Digests of variants as autotax 0.1 computed them, which depended on the names of modules, and the digests of the same code now.

Winners in databases, exports and shared files keep their meaning by this table. It goes with the next release.
"""

from __future__ import annotations

CURRENT = {
    "fe0bb2886133dd1f": "be95cc05ac6f4283",  # all-gather-gemm/bsp
    "c8a0d36aecd63d13": "43c89fafeeaf951a",  # all-gather-gemm/decomposed
    "21a515005894653a": "cbe2b1f07ec33270",  # all-gather-gemm/copy_engine
    "6fed33a6fa964287": "55ad396ba14ca79f",  # all-gather-gemm/pull
    "bf706b5dfba1ddc5": "9d55d90b78669463",  # all-gather-gemm/push
    "e4f0eb3d5b8171fc": "2f868c839d464011",  # all-gather-gemm/push_specialized
    "09711bc28747b7c4": "7e2508fb8a2aa502",  # all-gather-gemm/push_words
    "82037b6f0e76fbf5": "5d89877e16cb3687",  # all-gather-gemm/push_packets
    "9ba879831786ea94": "2ffa05c216a0e379",  # all-gather-gemm/staged_pull
    "73ed1c04cb7287de": "e308c3ea46bfc8fb",  # all-gather-gemm/push_two_kernel
    "ebf24f3fdd3d6263": "e97162c29504a0ce",  # decode-merge/bsp
    "96ad667509d140bd": "266d7b2f6958cfa4",  # decode-merge/gather
    "8a6e8434acc79ce2": "61610584055d813e",  # decode-merge/fine_grained
    "b9ec9ac8a89fea7d": "331b8f5bddad6d42",  # decode-merge/words
    "3c0d91f651ee8527": "d89f7585b3a68a38",  # decode-merge/compact
    "3d1712e1f4db8526": "0f5ee5955283447a",  # flash-decode/bsp
    "7659f1ffadbe0f64": "2f9cae8bb02c84fb",  # flash-decode/gather
    "42ecd53b08c9bb29": "4a9e0565d0000eba",  # flash-decode/fine_grained
    "f6b5321262a2e0b7": "3b4ee1688b59c45d",  # flash-decode/fused
    "b33b0952a97b73ca": "8769bab8aebe5425",  # flash-decode/single
    "64d50ef743601d9e": "7689408d43ffffd1",  # flash-decode/resident
    "72aacc8bf78cbc19": "69b2c5c7ff0fb829",  # flash-decode/compact
    "b26684f604a75676": "ca42ca7c722ff4f8",  # gemm-reduce-scatter/bsp
    "f5a132cbadb05cbb": "a7c0e6e63f5c4df2",  # gemm-reduce-scatter/decomposed
    "d0d051949b79d731": "63e24e5fbba46f2a",  # gemm-reduce-scatter/push
    "5da769fcff0e6761": "d141c62b4569bac9",  # gemm-reduce-scatter/pull_reduce
    "9f2cb5b1a19b2654": "c30a7753d50b201c",  # gemm-reduce-scatter/push_specialized
    "61b084ebc06e8254": "0166d5b96ea142c5",  # gemm-reduce-scatter/words
    "8f742c7113e5bbe1": "678375d8cc229406",  # head-gather/bsp
    "7e0a30f37f938799": "2cd25a7f7a120c21",  # head-gather/push
    "26f57f11c0c18a78": "230dbed894586807",  # head-gather/words
}
"""The digest that `autotax.digests` computes now, by the former digest of the same code."""


def current_digest(digest: str) -> str:
    """The digest of the same code as computed now; any other digest as it is."""
    return CURRENT.get(digest, digest)
