"""Decode merge: one module per variant. The exchange and the merge come from `kernels.flash_decode`."""
