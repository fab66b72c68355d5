"""Distributed Flash Decode: one module per variant. The ladder goes from bulk-synchronous kernels to a single kernel."""
