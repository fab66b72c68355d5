"""Distributed Flash Decode: one module a variant, in the order of the ladder from bulk-synchronous to a single kernel."""
