"""Gather + attention: one module per variant.

`library` has the vendor's attention and `vendor` the merge of its parts, `copies` the inbox that copy engines fill. `core` is the
attention of `push`, `warp_attention` that of `copy_engine` and `push_specialized`.
"""
