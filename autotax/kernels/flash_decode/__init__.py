"""Distributed Flash Decode: kernels of its variants. The ladder goes from bulk-synchronous kernels to a single kernel."""
