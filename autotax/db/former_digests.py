"""Digests of variants as autotax 0.1 computed them, which depended on the names of modules, and the digests of the same code now.

Winners in databases, exports and shared files keep their meaning by this table. It goes with the next release.
"""

from __future__ import annotations

CURRENT = {
    "fe0bb2886133dd1f": "4d125d0930f1f4ba",  # all-gather-gemm/bsp
    "c8a0d36aecd63d13": "f901382276b9de8e",  # all-gather-gemm/decomposed
    "21a515005894653a": "0956944f643385f9",  # all-gather-gemm/copy_engine
    "6fed33a6fa964287": "bad8e5a2c80a10a5",  # all-gather-gemm/pull
    "bf706b5dfba1ddc5": "6cea6774c437a47f",  # all-gather-gemm/push
    "e4f0eb3d5b8171fc": "94829bf41fc2e9bc",  # all-gather-gemm/push_specialized
    "09711bc28747b7c4": "337c787917ac60e3",  # all-gather-gemm/push_words
    "82037b6f0e76fbf5": "6359b0bc84023102",  # all-gather-gemm/push_packets
    "9ba879831786ea94": "9ad977da6fc682f4",  # all-gather-gemm/staged_pull
    "73ed1c04cb7287de": "fd5bbfab7b1eeb4b",  # all-gather-gemm/push_two_kernel
    "ebf24f3fdd3d6263": "362ed9968e58c4b1",  # decode-merge/bsp
    "96ad667509d140bd": "32fe47317aa778bb",  # decode-merge/gather
    "8a6e8434acc79ce2": "f3dd6aa33e5d6f2e",  # decode-merge/fine_grained
    "b9ec9ac8a89fea7d": "4bbf3c4c28f71c7c",  # decode-merge/words
    "3c0d91f651ee8527": "c7c54d764f2e98fb",  # decode-merge/compact
    "3d1712e1f4db8526": "1a5d1765d1f972d8",  # flash-decode/bsp
    "7659f1ffadbe0f64": "4f070036afbe5c18",  # flash-decode/gather
    "42ecd53b08c9bb29": "0c65f54e80701c51",  # flash-decode/fine_grained
    "f6b5321262a2e0b7": "ee8c60abbb54c862",  # flash-decode/fused
    "b33b0952a97b73ca": "5c72be66dbe11ec0",  # flash-decode/single
    "64d50ef743601d9e": "1d4899b284eeafdf",  # flash-decode/resident
    "72aacc8bf78cbc19": "8acf01d2eef25d5c",  # flash-decode/compact
    "b26684f604a75676": "5ede4ddf21623bef",  # gemm-reduce-scatter/bsp
    "f5a132cbadb05cbb": "fe1274c238783706",  # gemm-reduce-scatter/decomposed
    "d0d051949b79d731": "6dbd5bd533b7fb6c",  # gemm-reduce-scatter/push
    "5da769fcff0e6761": "b26ec5c2948f0d8e",  # gemm-reduce-scatter/pull_reduce
    "9f2cb5b1a19b2654": "94e5d04077202cce",  # gemm-reduce-scatter/push_specialized
    "61b084ebc06e8254": "e4fb0b589bab5604",  # gemm-reduce-scatter/words
    "8f742c7113e5bbe1": "1295781522752061",  # head-gather/bsp
    "7e0a30f37f938799": "6bb2713afe602295",  # head-gather/push
    "26f57f11c0c18a78": "33eb655d94b8f6cc",  # head-gather/words
}
"""The digest that `autotax.sources` computes now, by the former digest of the same code."""


def current_digest(digest: str) -> str:
    """The digest of the same code as computed now; any other digest as it is."""
    return CURRENT.get(digest, digest)
