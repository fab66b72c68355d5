"""Gather + attention: one module per variant; `vendor` and `merging` hold their shared parts."""
