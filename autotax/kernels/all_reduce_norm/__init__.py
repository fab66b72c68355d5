"""All-Reduce + RMSNorm: one module per variant; `norm` and `packets` hold their shared parts."""
