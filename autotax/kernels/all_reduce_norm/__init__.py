"""All-Reduce + RMSNorm: one module a variant, and what they share in `norm` and `packets`."""
