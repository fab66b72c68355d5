"""Decode merge: kernels of its variants. The exchange and the merge come from `kernels.flash_decode`."""
