"""Decode merge: one module a variant; the exchange and the merge itself are those of `kernels.flash_decode`."""
