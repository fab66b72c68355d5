"""All-Reduce + RMSNorm."""
